"""What plain transformers does with each checkpoint: one line of the README's table each."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint_maker.staging import CHECKPOINTS

# bf16 rounding alone, in another order of sums, stays far below this.
RIGHT_WITHIN = 0.03
SCRIPT = "from checkpoint_maker.before import child; child()"


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint to load."""

    name: str


CASES = tuple(Case(path.name) for path in sorted(CHECKPOINTS.glob("*")))


def _expert_bytes_stored(folder: Path) -> int:
    """Bytes of all tensors of experts in a checkpoint's files."""
    return sum(
        value.nbytes
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
        if ".experts." in name
    )


def _expert_bytes_loaded(model: PreTrainedModel) -> int:
    """Bytes of all parameters and buffers of experts in a loaded model."""
    return sum(
        value.nbytes
        for values in (model.named_parameters(), model.named_buffers())
        for name, value in values
        if ".experts." in name
    )


@torch.no_grad()
def _logits_error(model: PreTrainedModel, reference: dict) -> float:
    """Greatest logits error over the prompts, relative to the greatest logit."""
    worst = 0.0
    for record in reference["prompts"]:
        want = torch.tensor(record["logits"])
        got = model(input_ids=torch.tensor([record["prompt"]])).logits[0, -1].float()
        error = ((got - want).abs().max() / want.abs().max()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _outcome(folder: Path) -> str:
    """Load a checkpoint as any user would, and judge the result."""
    reference = json.loads((folder / "reference.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    loaded, stored = _expert_bytes_loaded(model), _expert_bytes_stored(folder)
    size = f"experts {loaded} bytes, {stored} in the file"
    is_random = any(".experts." in name for name in info["missing_keys"])
    try:
        error = _logits_error(model, reference)
    except Exception as failure:
        load = "experts random (missing keys)" if is_random else "loads"
        return f"{load}; forward {_first_line(failure)}; {size}"
    if is_random:
        return f"experts random (missing keys); logits off by {error:.2g}; {size}"
    if error > RIGHT_WITHIN:
        return f"silently wrong: logits off by {error:.2g}; {size}"
    return f"loads right ({error:.1g}), {model.dtype}; {size}"


def _first_line(failure: Exception) -> str:
    first = (str(failure).strip().splitlines() or [""])[0]
    return f"fails: {type(failure).__name__}: {first[:160]}"


def child() -> None:
    """Body of the subprocess: print one outcome as JSON on the last line."""
    torch.set_num_threads(1)
    try:
        outcome = _outcome(Path(sys.argv[1]))
    except Exception as failure:
        outcome = _first_line(failure)
    print("\n" + json.dumps(outcome))


def _lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip())


def make(case: Case, _work: Path, _tool: str) -> None:
    """Load one checkpoint in a process of its own and print its row."""
    folder = CHECKPOINTS / case.name
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=CHECKPOINTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = list(_lines(result.stdout))
    outcome = json.loads(lines[-1]) if lines and result.returncode == 0 else "process died"
    print(f"| `{case.name}` | {outcome} |", flush=True)
