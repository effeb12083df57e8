"""What every tool shares: folders, clean-up, and the first half of reference.json.

A tool's own environment writes the checkpoint and the weights as that tool decodes them;
`reference.py` adds logits and tokens later, in one environment for all.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parent.parent
CHECKPOINTS = DATA / "checkpoints"
KEEP_SUFFIXES = (".safetensors",)
KEEP_NAMES = (
    "config.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "quantization_config.json",
    "quantize_config.json",
    "reference.json",
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a tool's own decoder says about a checkpoint it wrote."""

    weights: Mapping[str, torch.Tensor]
    decoder: str
    note: str = ""


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of packages, by distribution name."""
    return {name: metadata.version(name) for name in packages}


def publish(made: Path, name: str) -> Path:
    """Copy what a host needs of a made checkpoint to tests/data/checkpoints/name."""
    target = CHECKPOINTS / name
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for path in sorted(made.iterdir()):
        if path.name in KEEP_NAMES or path.suffix in KEEP_SUFFIXES:
            shutil.copyfile(path, target / path.name)
    for path in target.glob("*.json"):
        _refuse_machine_paths(path)
    return target


def _refuse_machine_paths(path: Path) -> None:
    """Fail if a JSON file names a folder of the machine that made it."""
    for line in path.read_text().splitlines():
        if any(root in line for root in ('"/tmp', '"/root', '"/home', '"/work', '"_name_or_path')):
            raise ValueError(f"{path.name}: got {line.strip()!r}, must not name a machine's path")


def tensor_bytes(weight: torch.Tensor) -> bytes:
    """Contiguous row-major little-endian bytes of a weight, each -0.0 made +0.0.

    Decoders differ in the sign of a zero (a zero code times a negative scale), and no
    host can tell.
    """
    return (weight + 0.0).contiguous().view(torch.uint8).numpy().tobytes()


def describe(name: str, weight: torch.Tensor) -> dict[str, object]:
    """The reference entry of one decoded weight [N, K]."""
    return {
        "name": name,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(tensor_bytes(weight)).hexdigest(),
        "first": [float(value) for value in weight.flatten()[:4].double()],
    }


def write_decoded(
    target: Path,
    work: Path,
    *,
    tool: str,
    tool_versions: Mapping[str, str],
    command: str,
    decoded: Decoded,
) -> None:
    """Write the weights' half of reference.json, and the weights themselves under work."""
    folder = work / "decoded"
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in decoded.weights.items()}
    save_file(weights, folder / f"{target.name}.safetensors")
    reference: dict[str, object] = {
        "tool": tool,
        "tool_versions": dict(tool_versions),
        "command": command,
        "decoder": decoded.decoder,
        "note": decoded.note,
        "linears": [describe(name, weights[name]) for name in sorted(weights)],
    }
    dump_reference(reference, target / "reference.json")


def dump_reference(reference: Mapping[str, object], path: Path) -> None:
    """Write reference.json: one key a line, and one list item a line below it."""
    lines = []
    for key, value in reference.items():
        if isinstance(value, list):
            items = ",\n    ".join(json.dumps(item) for item in value)
            lines.append(f"  {json.dumps(key)}: [\n    {items}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
