import pytest
import torch

from firesteel.cli.bench.expand import expand_model
from firesteel.errors import UnsupportedError
from firesteel.integrations.transformers import load_model
from tests.cli.command import CHECKPOINTS


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llmcompressor-ct-w4-g32-asym-attn", torch.bfloat16),
        ("llmcompressor-nvfp4a16-w4-g16-sym-attn", torch.bfloat16),
        ("llmcompressor-ct-w4-g32-sym", torch.float16),
    ],
)
def test_the_twin_has_the_same_numbers(name: str, dtype: torch.dtype):
    packed = load_model(CHECKPOINTS / name, device="cpu", dtype=dtype)
    dense = expand_model(packed, "grouped_mm")
    assert dense.config._experts_implementation == "grouped_mm"
    assert not hasattr(dense.config, "quantization_config")
    assert packed.config._experts_implementation == "firesteel"
    assert dense.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in (*dense.parameters(), *dense.buffers()))
    experts, own = dense.model.layers[0].mlp.experts, packed.model.layers[0].mlp.experts
    n = own.gate_up.scheme.n
    for part in (0, 1):
        matrix = own.gate_up.read(1, part).dequantize(own.gate_up.scheme, torch.bfloat16)
        assert torch.equal(experts.gate_up_proj[1, part * n : (part + 1) * n], matrix)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        theirs, ours = dense(input_ids=ids).logits.float(), packed(input_ids=ids).logits.float()
    assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median() < 0.05


def test_what_is_not_packed_is_shared(packed_folder):
    packed = load_model(packed_folder, device="cpu")
    dense = expand_model(packed, "eager")
    theirs = dict(dense.named_parameters())
    for name, parameter in packed.named_parameters():
        assert theirs[name] is parameter


def test_there_must_be_something_packed(plain_folder):
    with pytest.raises(UnsupportedError, match="nothing of it is packed"):
        expand_model(load_model(plain_folder, device="cpu"), "eager")
