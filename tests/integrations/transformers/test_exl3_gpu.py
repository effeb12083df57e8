"""Loaded EXL3 models on GPU kernels: experts and linears, and the numbers of the PyTorch path."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel.integrations.transformers import PackedExperts, load_model, load_report
from firesteel.modules.packed import PackedLinear
from tests.checkpoints import STORAGES, write

pytestmark = pytest.mark.gpu


def _load(folder: Path, storage: str, family: str = "glm_moe_dsa", **options: Any) -> Any:
    written = write(folder / "in", family, STORAGES[storage], linears=True)
    return load_model(written.path, device="cuda", **options)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.cuda()).logits.float().cpu()


def _modules(model: Any, kind: type) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("storage", ["exl3-whole-mcg", "exl3-4-3inst-signs"])
def test_kernels_give_what_the_pytorch_path_gives(
    tmp_path: Path, storage: str, dtype: torch.dtype
) -> None:
    model = _load(tmp_path, storage, dtype=dtype)
    report = load_report(model).kernels
    experts, linears = _modules(model, PackedExperts), _modules(model, PackedLinear)
    assert report.num_layers == len(experts) > 0
    assert report.num_linears == len(linears) > 0
    assert not report.refused
    assert not report.refused_linears
    other = copy.deepcopy(model)
    copies = (*_modules(other, PackedExperts), *_modules(other, PackedLinear))
    assert all(module.kernels is None for module in copies)
    x = torch.randn(40, experts[0].hidden_dim, device="cuda").to(dtype)
    top_k = model.config.num_experts_per_tok
    ids = torch.rand(40, experts[0].num_experts, device="cuda").topk(top_k).indices
    weights = torch.rand(40, top_k, device="cuda")
    with torch.no_grad():
        for ours, theirs in zip(experts, _modules(other, PackedExperts), strict=True):
            got, expected = ours(x, ids, weights).double(), theirs(x, ids, weights).double()
            assert (got - expected).norm() <= 0.01 * expected.norm()
        for ours, theirs in zip(linears, _modules(other, PackedLinear), strict=True):
            for rows in (1, 12, 40):
                y = torch.randn(rows, ours.in_features, device="cuda").to(dtype)
                got, expected = ours(y).double(), theirs(y).double()
                assert (got - expected).norm() <= 0.01 * expected.norm()
    for ready in report.ready:
        audit = ready.audit.as_dict()
        assert audit["launches"] > 0
        assert audit["misses"] == audit["launched_unplanned"] == []


def test_layers_of_other_rates_share_a_plan(tmp_path: Path) -> None:
    model = _load(tmp_path, "exl3-whole-mcg", "qwen3_moe")
    report = load_report(model).kernels
    assert report.num_layers > 1
    assert sum("MoE" in ready.plan.spec.title for ready in report.ready) == 1


@pytest.mark.parametrize("storage", ["exl3-mixed", "exl3-2.5-mul1"])
def test_what_no_kernel_reads_says_so_and_runs(tmp_path: Path, storage: str) -> None:
    model = _load(tmp_path, storage)
    report = load_report(model).kernels
    assert report.refused
    assert all("codebooks" in reason or "bits" in reason for reason in report.refused)
    assert torch.isfinite(_logits(model, torch.arange(1, 9).view(1, 8))).all()


def test_moving_a_model_takes_linears_off_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _load(tmp_path, "exl3-3-mcg")
    linear = _modules(model, PackedLinear)[0]
    assert linear.kernels is not None
    model.cpu()
    assert linear.kernels is None
    assert "PyTorch path" in caplog.text


def test_a_gradient_goes_through_the_pytorch_path(tmp_path: Path) -> None:
    linear = _modules(_load(tmp_path, "exl3-3-mcg"), PackedLinear)[0]
    x = torch.randn(3, linear.in_features, device="cuda", dtype=linear.dtype, requires_grad=True)
    linear(x).float().sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
