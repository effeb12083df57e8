"""Checkpoints that the formats' own tools wrote: the same weights as theirs, and the same bytes.

`reference.json` in each folder holds the SHA-256 of every weight as the tool itself decodes it.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from firesteel.formats.base import Format, TensorHeader
from firesteel.formats.registry import FORMATS, detect
from tests.strategies import bits_of

ROOT = Path(__file__).parents[1] / "data" / "checkpoints"
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def layers_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every module of the checkpoint, by name, with its tensors by suffix."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            layer, _, suffix = name.rpartition(".")
            layers.setdefault(layer, {})[suffix] = tensor
    return layers


def sha256(weight: torch.Tensor) -> str:
    """The digest as reference.json has it: -0.0 counts as +0.0."""
    data = (weight + 0.0).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def check_layer(
    entry: Format, config: dict, name: str, stored: dict[str, torch.Tensor], wanted: dict
) -> None:
    """One layer against the tool's own decoding, and packed again against its own bytes."""
    headers = {key: TensorHeader(tuple(t.shape), t.dtype) for key, t in stored.items()}
    scheme = entry.scheme(config, name, headers)
    matrix = entry.unpack(scheme, stored)
    weight = matrix.dequantize(scheme, getattr(torch, wanted["dtype"]))
    assert list(weight.shape) == wanted["shape"], name
    assert sha256(weight) == wanted["sha256"], name
    again = entry.pack(scheme, matrix)
    assert stored.keys() - again.keys() <= entry.optional() | {"bias"}, name
    for suffix, tensor in again.items():
        assert tensor.dtype == stored[suffix].dtype, f"{name}.{suffix}"
        assert torch.equal(bits_of(tensor), bits_of(stored[suffix])), f"{name}.{suffix}"


def test_there_are_checkpoints_of_every_tool():
    for tool in ("llmcompressor-", "ct0.17-", "autoround-", "gptqmodel-", "modelopt-"):
        assert any(name.startswith(tool) for name in FOLDERS), tool


@pytest.mark.parametrize("name", FOLDERS)
def test_every_quantised_layer_is_the_tool_s(name):
    folder = ROOT / name
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    reference = json.loads((folder / "reference.json").read_text())
    wanted = {entry["name"]: entry for entry in reference["linears"]}
    assert wanted
    markers = {entry.marker() for entry in FORMATS}
    seen = set()
    for layer, stored in layers_of(folder).items():
        entry = detect(config, stored)
        assert (entry is None) == (not markers & stored.keys()), layer
        if entry is not None:
            check_layer(entry, config, layer, stored, wanted[layer])
            seen.add(layer)
    assert seen == wanted.keys()
