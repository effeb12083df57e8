"""When packed experts go to kernels, and when not; the kernels themselves run on a GPU only."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint.families import Geometry
from firesteel.errors import InvalidArgumentError
from firesteel.integrations.transformers import PackedExperts, load_model, load_report
from firesteel.modules import kernels
from firesteel.modules.kernels import Arenas, why_no_kernels
from firesteel.moe.tuning_file import default_table

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


def test_why_a_layer_has_no_kernels_is_known_before_it_is_filled(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = _packed(model)
    given: dict[str, Any] = {"top_k": 2, "dtype": torch.bfloat16}
    assert why_no_kernels(new, **given) == "device: cpu, kernels need a CUDA device"
    monkeypatch.setattr(kernels, "_device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(kernels, "device_target", lambda _: "sm_90")
    monkeypatch.setattr(kernels, "table_of_device", lambda _: default_table())
    assert why_no_kernels(new, **given) is None
    assert "float64" in str(why_no_kernels(new, top_k=2, dtype=torch.float64))


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


def _packed(model: Any) -> PackedExperts:
    """A layer in the form that kernels read; on a CPU the load leaves another."""
    loaded = next(m for m in model.modules() if isinstance(m, PackedExperts))
    made = PackedExperts(
        model.config,
        Geometry(1, loaded.num_experts, loaded.hidden_dim, loaded.intermediate_dim),
        (
            [loaded.gate_up.scheme] * 2 * loaded.num_experts,
            [loaded.down.scheme] * loaded.num_experts,
        ),
        loaded.activation,
        torch.float32,
    )
    for buffer in made.buffers():
        buffer.zero_()
    return made


def _load_assigning(module: PackedExperts) -> None:
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def _set_codes(module: PackedExperts) -> None:
    module.gate_up.codes = module.gate_up.codes.clone()


def _set_stack(module: PackedExperts) -> None:
    module.down = copy.deepcopy(module.down)


def _register(module: PackedExperts) -> None:
    module.down.register_buffer("scales", module.down.scales.clone())


def _move_stack(module: PackedExperts) -> None:
    module.gate_up.to("cpu")


def _set_bias(module: PackedExperts) -> None:
    module.gate_up_bias = torch.zeros(1)


@pytest.mark.parametrize(
    "replace", [_load_assigning, _set_codes, _set_stack, _register, _move_stack, _set_bias]
)
@pytest.mark.parametrize("copied", [False, True])
def test_replacing_a_tensor_drops_the_kernels_and_says_so(
    model: Any, caplog: pytest.LogCaptureFixture, replace: Any, copied: bool
) -> None:
    module = _packed(model)
    if copied:
        module = copy.deepcopy(module)
    module.kernels = Kernels()
    replace(module)
    assert module.kernels is None
    assert caplog.text.count("PyTorch path") == 1


def test_loading_in_place_or_setting_the_same_tensor_keeps_the_kernels(model: Any) -> None:
    module = _packed(model)
    kernels = module.kernels = Kernels()
    module.load_state_dict(module.state_dict())
    module.gate_up.scales = module.gate_up.scales
    module.down = module.down
    assert module.kernels is kernels


def _arenas() -> Arenas:
    return Arenas(4096, torch.device("cpu"))


def test_each_stream_has_one_arena_and_many_streams_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arenas = _arenas()
    made = [arenas.of(stream) for stream in range(4)]
    assert made[0] is arenas.first
    assert len(set(map(id, made))) == 4
    assert caplog.text == ""
    made += [arenas.of(stream) for stream in range(4, 7)]
    assert caplog.text.count("more than 4 streams: each keeps an arena of 4096 bytes") == 1
    assert [arenas.of(stream) for stream in range(7)] == made


def test_an_arena_that_compiled_code_took_is_not_given_to_another_stream() -> None:
    arenas = _arenas()
    arenas.first.owner_cell[0] = 0x7000
    assert arenas.of(0x8000) is not arenas.first
    arenas = _arenas()
    arenas.first.owner_cell[0] = 0x7000
    assert arenas.of(0x7000) is arenas.first


def test_threads_that_meet_a_stream_at_once_share_its_arena() -> None:
    arenas = _arenas()
    arenas.of(1)
    start = threading.Barrier(8)

    def ask(_: int) -> object:
        start.wait()
        return arenas.of(2)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(ask, range(8))))) == 1


def test_a_report_of_arenas_counts_them() -> None:
    arenas = _arenas()
    assert arenas.as_dict() == {"device": "cpu", "bytes": 4096, "count": 1}
    for stream in (1, 2, 1):
        arenas.of(stream)
    assert arenas.as_dict()["count"] == 2


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


def test_a_bundle_that_cannot_be_opened_is_named_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setenv("FIRESTEEL_BUNDLE", str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"has no readable manifest.json: .* format is"):
        load_model(LITTLE, device="cpu")
