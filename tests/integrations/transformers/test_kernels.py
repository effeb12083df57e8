"""When packed experts go to kernels, and when not; the kernels themselves run on a GPU only."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import PackedExperts, load_model, load_report

LITTLE = Path(__file__).parents[3] / "examples" / "little_moe" / "int4-g128"


class Kernels:
    """Stands in for a layer's kernels; notes what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self.calls.append((x, topk_ids, topk_weights))
        return torch.full_like(x, 7.0)


@pytest.fixture
def model() -> Any:
    return load_model(LITTLE, device="cpu")


def _layer(model: Any) -> tuple[PackedExperts, Kernels, tuple[Tensor, Tensor, Tensor]]:
    module = next(m for m in model.modules() if isinstance(m, PackedExperts))
    kernels = Kernels()
    module.kernels = kernels
    x = torch.randn(module.hidden_dim, 5).to(model.dtype).t()
    ids = torch.zeros(5, 4, dtype=torch.int64)[:, ::2]
    return module, kernels, (x, ids, torch.rand(5, 2).to(model.dtype))


def test_a_layer_on_a_cpu_says_why_it_has_no_kernels(model: Any) -> None:
    report = load_report(model)
    assert report.kernels.num_layers == 0
    (reason,) = report.kernels.refused
    assert "cpu" in reason
    assert sum(report.kernels.refused.values()) == sum(report.experts.values())
    assert report.as_dict()["kernels"]["plans"] == []
    assert "triton" not in report.backend


def test_kernels_are_given_what_their_spec_says(model: Any) -> None:
    module, kernels, call = _layer(model)
    with torch.no_grad():
        assert (module(*call) == 7).all()
    ((x, ids, weights),) = kernels.calls
    assert x.is_contiguous()
    assert ids.is_contiguous()
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64


def test_a_call_that_wants_a_gradient_takes_the_pytorch_path(model: Any) -> None:
    module, kernels, (x, ids, weights) = _layer(model)
    module(x.requires_grad_(), ids, weights).sum().backward()
    assert not kernels.calls
    assert x.grad is not None


def test_moving_a_layer_drops_its_kernels_and_says_so(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, kernels, call = _layer(model)
    model.to("cpu")
    assert module.kernels is None
    assert "PyTorch path" in caplog.text
    with torch.no_grad():
        assert not (module(*call) == 7).all()
    assert not kernels.calls


def test_copies_and_pickles_go_without_kernels(model: Any) -> None:
    module, kernels, _ = _layer(model)
    assert copy.deepcopy(module).kernels is None
    assert pickle.loads(pickle.dumps(module)).kernels is None
    assert module.kernels is kernels
    assert pickle.loads(pickle.dumps(load_report(model).kernels)).ready == []


def test_a_wrong_setting_is_named_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRESTEEL_MAX_TOKEN", "16")
    with pytest.raises(InvalidArgumentError, match="did you mean FIRESTEEL_MAX_TOKENS"):
        load_model(LITTLE, device="cpu")
