"""FP4 and 3-bit checkpoints bound to the kernels of their plan: the tensors are the layer's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel.cli.bench.moe_torch import layer_in_float64
from firesteel.integrations.transformers import PackedExperts, load_model
from firesteel.launch import plan
from firesteel.launch.stub import StubDriver
from firesteel.moe.layer import MoeLayer, operand_tensors
from firesteel.moe.spec import MoeSpec
from firesteel.moe.supports import moe_spec_of
from tests.launch.rig import ready_on_stub

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
STORED = {
    "llmcompressor-mxfp4a16-w4-g32-sym": ("mxfp4", "none"),
    "llmcompressor-nvfp4a16-w4-g16-sym-attn": ("nvfp4", "divisor"),
    "modelopt-nvfp4-w4-g16-sym": ("nvfp4", "multiplier"),
    "modelopt-nvfp4a16-w4-g16-sym-attn": ("nvfp4", "multiplier"),
    "llmcompressor-ct-w3-g32-asym": ("int3", "none"),
}


def spec_of(module: PackedExperts, model: Any) -> MoeSpec:
    return moe_spec_of(
        module.gate_up.scheme,
        module.down.scheme,
        num_experts=module.num_experts,
        hidden_size=module.hidden_dim,
        intermediate_size=module.intermediate_dim,
        top_k=model.config.num_experts_per_tok,
        activation=module.activation,
        dtype=torch.bfloat16,
        has_bias=module.gate_up_bias is not None,
    )


@pytest.mark.parametrize("folder", STORED)
def test_a_layer_of_a_checkpoint_binds_without_a_copy(folder: str) -> None:
    check_bound(CHECKPOINTS / folder, *STORED[folder])


def check_bound(folder: Path, element: str, global_scale: str) -> None:
    model = load_model(folder, device="cpu")
    module = next(each for each in model.modules() if isinstance(each, PackedExperts))
    spec = spec_of(module, model)
    stored = {(each.element, each.global_scale) for each in (spec.w13, spec.w2)}
    assert stored == {(element, global_scale)}
    tensors = operand_tensors(
        module.gate_up, module.down, bias13=module.gate_up_bias, bias2=module.down_bias
    )
    held = {buffer.data_ptr() for buffer in module.buffers()}
    assert {tensor.data_ptr() for tensor in tensors.values()} <= held
    ready = ready_on_stub(plan(spec, 4, flags={"ids": ["i64"]}), StubDriver.open())
    layer = MoeLayer(ready, tensors, ready.arena())
    assert set(layer.bounds) == {torch.int64}
    # What the bound tensors stand for is what the loaded layer computes.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, spec.hidden_size, generator=generator)
    ids = torch.rand(3, spec.num_experts, generator=generator).topk(spec.top_k).indices
    gates = torch.rand(3, spec.top_k, generator=generator)
    expected = layer_in_float64(spec, tensors, x, ids, gates)
    with torch.no_grad():
        got = module(x, ids, gates)
    assert (got.double() - expected).norm() <= 1e-5 * expected.norm()
