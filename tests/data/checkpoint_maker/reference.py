"""Second half of reference.json: what the bf16 model says with the decoded weights in it.

The model is transformers' own Qwen3-MoE on the CPU, with eager attention and eager
experts. It gets the checkpoint's own 16-bit tensors, and for each quantised linear the
weight that the tool's decoder gave, cast to bf16; experts are stacked as its fused
parameters.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from checkpoint_maker.staging import CHECKPOINTS, dump_reference, versions

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13)
CANDIDATES = 192
NEW_TOKENS = 8
MIN_DISTINCT = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint that waits for its second half."""

    name: str


def _all_cases() -> tuple[Case, ...]:
    return tuple(Case(path.parent.name) for path in sorted(CHECKPOINTS.glob("*/reference.json")))


CASES = _all_cases()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, of all its shards."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def fuse_experts(state: dict[str, torch.Tensor], num_layers: int, num_experts: int) -> None:
    """Replace per-expert weights in place by transformers' stacked gate_up and down."""
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate_up, down = [], []
        for expert in range(num_experts):
            gate, up, last = (
                state.pop(f"{prefix}.{expert}.{proj}.weight")
                for proj in ("gate_proj", "up_proj", "down_proj")
            )
            gate_up.append(torch.cat([gate, up]))
            down.append(last)
        state[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        state[f"{prefix}.down_proj"] = torch.stack(down)


def build_model(folder: Path, decoded: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The bf16 model of a checkpoint with decoded weights in the place of packed ones."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model = model.to(torch.bfloat16).eval()
    wanted = {name.removesuffix(".weight") for name in model.state_dict()}
    state = {}
    for name, value in read_tensors(folder).items():
        if name.removesuffix(".weight") in wanted and value.is_floating_point():
            state[name] = value.to(torch.bfloat16)
    state.update({f"{name}.weight": value.to(torch.bfloat16) for name, value in decoded.items()})
    fuse_experts(state, config.num_hidden_layers, config.num_experts)
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def _continue(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [B, 8], and how clear each row's choices were [B].

    Clearness is the least of every top-1 lead over the logits' spread and every router
    lead of the last chosen expert over the router logits' spread.
    """
    start, clear = ids.shape[1], torch.full((ids.shape[0],), torch.inf)
    for _ in range(NEW_TOKENS):
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        last = out.logits[:, -1].float()
        best = last.topk(2).values
        clear = torch.minimum(clear, (best[:, 0] - best[:, 1]) / last.std(-1))
        for router in out.router_logits:
            gates = router.float().view(*ids.shape, -1)
            ranked = gates.sort(-1, descending=True).values
            gap = ((ranked[..., 1] - ranked[..., 2]) / gates.std(-1)).amin(-1)
            clear = torch.minimum(clear, gap)
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], dim=1)
    return ids[:, start:], clear


def _clear_prompts(model: PreTrainedModel, vocab_size: int) -> Iterator[list[int]]:
    """One prompt a length: of many seeded ones, that with the clearest choices.

    Continuations of fewer than four different tokens come last: they test little.
    """
    for length in PROMPT_LENGTHS:
        gen = torch.Generator().manual_seed(length)
        pool = torch.randint(vocab_size, (CANDIDATES, length), generator=gen)
        tokens, clear = _continue(model, pool)
        distinct = torch.tensor([len(set(row)) for row in tokens.tolist()])
        clear = torch.where(distinct >= MIN_DISTINCT, clear, clear - 1.0)
        yield pool[clear.argmax()].tolist()


@torch.no_grad()
def _record(model: PreTrainedModel, prompt: list[int]) -> dict[str, object]:
    """Greedy continuation and last-position logits of one prompt, alone in its batch."""
    ids = torch.tensor([prompt])
    tokens, clear = _continue(model, ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return {
        "prompt": prompt,
        "greedy": tokens[0].tolist(),
        "clearness": float(f"{clear.item():.3g}"),
        "logits": [float(f"{value:.6g}") for value in logits.tolist()],
    }


def make(case: Case, work: Path, _tool: str) -> None:
    """Add the model's half to one checkpoint's reference.json."""
    torch.set_num_threads(1)
    folder = CHECKPOINTS / case.name
    decoded = load_file(work / "decoded" / f"{case.name}.safetensors")
    model = build_model(folder, decoded)
    reference = json.loads((folder / "reference.json").read_text())
    reference["model_versions"] = versions("transformers", "torch")
    reference["model"] = "bf16, CPU, eager attention, eager experts, no cache"
    prompts = _clear_prompts(model, model.config.vocab_size)
    reference["prompts"] = [_record(model, prompt) for prompt in prompts]
    dump_reference(reference, folder / "reference.json")
    print(case.name, [p["clearness"] for p in reference["prompts"]])
