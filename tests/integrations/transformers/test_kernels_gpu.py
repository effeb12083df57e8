"""Loaded models on the GPU kernels: which layers are, that they say so, and the same numbers."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel.checkpoint.families import Geometry
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.formats.shard import take_columns, take_rows
from firesteel.integrations.transformers import PackedExperts, load_model, load_report
from firesteel.modules.kernels import attach_kernels
from firesteel.moe.activation import Activation

pytestmark = pytest.mark.gpu

CHECKPOINTS = sorted((Path(__file__).parents[2] / "data" / "checkpoints").iterdir())
LITTLE = Path(__file__).parents[3] / "examples" / "little_moe" / "int4-g128"


def _experts(model: Any) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def _without_kernels(model: Any) -> Any:
    """The same model on the PyTorch path."""
    other = copy.deepcopy(model)
    assert all(module.kernels is None for module in _experts(other))
    return other


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids.cuda()).logits.float().cpu()


@pytest.fixture
def little() -> Any:
    return load_model(LITTLE, device="cuda")


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_a_checkpoint_on_kernels_gives_what_the_pytorch_path_gives(folder: Path) -> None:
    model = load_model(folder, device="cuda", dtype=torch.bfloat16)
    report = load_report(model)
    on_kernels = [module for module in _experts(model) if module.kernels is not None]
    assert len(on_kernels) == report.kernels.num_layers
    assert ("triton" in report.backend) == bool(on_kernels)
    # Every other layer says why.
    others = len(_experts(model)) - len(on_kernels)
    assert sum(report.kernels.refused.values()) == others
    stored = " ".join(report.experts)
    has_integers = "int4" in stored or "int3" in stored
    if (has_integers and "act-order" not in stored) or "e2m1" in stored:
        assert on_kernels, report.kernels.refused
    if not on_kernels:
        return
    ids = torch.arange(1, 25).view(2, 12)
    got, expected = _logits(model, ids), _logits(_without_kernels(model), ids)
    # Each rounds FC1, FC2 and the sum to bf16, of sums in another order: 3 layers of eps / 2.
    assert (got - expected).norm() <= 0.02 * expected.norm()
    for ready in report.kernels.ready:
        audit = ready.audit.as_dict()
        assert audit["launches"] > 0
        assert audit["misses"] == audit["launched_unplanned"] == []


def test_the_little_model_generates_the_same_tokens(little: Any) -> None:
    report = load_report(little)
    assert report.backend == "triton"
    assert report.kernels.ready[0].launcher == "native"
    ids = torch.tensor([[5, 17, 300, 41, 8]]).cuda()
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    got = little.generate(ids, **options)
    expected = _without_kernels(little).generate(ids, **options)
    assert got.tolist() == expected.tolist()


def test_a_prompt_past_the_plan_runs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRESTEEL_MAX_TOKENS", "16")
    model = load_model(LITTLE, device="cuda")
    assert load_report(model).kernels.ready[0].plan.max_tokens == 16
    ids = torch.arange(1, 101).view(1, 100)
    got, expected = _logits(model, ids), _logits(_without_kernels(model), ids)
    assert (got - expected).norm() <= 0.02 * expected.norm()


def test_a_layer_can_be_captured_as_its_first_call(little: Any) -> None:
    module = _experts(little)[0]
    x = torch.randn(7, module.hidden_dim, device="cuda").to(little.dtype)
    ids = torch.stack([torch.randperm(module.num_experts)[:2] for _ in range(7)]).cuda()
    weights = torch.rand(7, 2, device="cuda")
    top_k = little.config.num_experts_per_tok
    ids, weights = ids[:, :1].repeat(1, top_k), weights[:, :1].repeat(1, top_k)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = module(x, ids, weights)
    graph.replay()
    replayed = out.clone()
    with torch.no_grad():
        assert torch.equal(replayed, module(x, ids, weights))


def test_each_stream_has_an_arena_of_its_own(little: Any) -> None:
    ids = torch.arange(1, 30).view(1, 29)
    expected = _logits(little, ids)
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(_logits(little, ids), expected)


def test_streams_in_turn_share_one_arena(little: Any) -> None:
    top_k = little.config.num_experts_per_tok
    modules = _experts(little)
    report = attach_kernels(modules, top_k=top_k, dtype=little.dtype, ids=("i32",), one_arena=True)
    assert [key for key in report.ready[0].plan.tables] == [(("ids", "i32"),)]
    # Large calls, so that the next one is enqueued long before the last has run.
    generator = torch.Generator().manual_seed(0)
    calls = []
    for rows in (4096, 1, 4000, 64, 2):
        x = torch.randn(rows, modules[0].hidden_dim, generator=generator).to(little.dtype).cuda()
        ids = torch.randint(modules[0].num_experts, (rows, top_k), generator=generator)
        calls.append((x, ids.int().cuda(), torch.rand(rows, top_k, generator=generator).cuda()))
    with torch.no_grad():
        wanted = [module(*call) for call in calls for module in modules]
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for _ in range(20):
            got = []
            for place, call in enumerate(calls):
                with torch.cuda.stream(streams[place % 3]):
                    got += [module(*call) for module in modules]
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert [arenas["count"] for arenas in report.as_dict()["arenas"]] == [1]


def test_moving_a_model_leaves_the_kernels_and_says_so(
    little: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(1, 30).view(1, 29)
    expected = _logits(little, ids)
    little.to(torch.float32)
    assert "PyTorch path" in caplog.text
    assert all(module.kernels is None for module in _experts(little))
    assert (_logits(little, ids) - expected).norm() <= 0.02 * expected.norm()


def test_a_gradient_goes_through_the_pytorch_path(little: Any) -> None:
    module = _experts(little)[0]
    x = torch.randn(5, module.hidden_dim, device="cuda").to(little.dtype).requires_grad_()
    top_k = little.config.num_experts_per_tok
    ids = torch.zeros(5, top_k, dtype=torch.int64, device="cuda")
    module(x, ids, torch.rand(5, top_k, device="cuda")).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_a_model_on_kernels_can_be_copied_and_pickled(little: Any) -> None:
    ids = torch.arange(1, 30).view(1, 29)
    expected = _logits(little, ids)
    module = _experts(little)[0]
    again = pickle.loads(pickle.dumps(module))
    assert again.kernels is None
    assert (_logits(copy.deepcopy(little), ids) - expected).norm() <= 0.02 * expected.norm()


# torch's own, of its inductor's first import.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_is_the_eager_one(little: Any, backend: str) -> None:
    module = _experts(little)[0]
    x = torch.randn(9, module.hidden_dim, device="cuda").to(little.dtype)
    top_k = little.config.num_experts_per_tok
    ids = torch.zeros(9, top_k, dtype=torch.int64, device="cuda")
    weights = torch.rand(9, top_k, device="cuda")
    with torch.no_grad():
        expected = module(x, ids, weights)
        compiled = torch.compile(lambda *args: module(*args), backend=backend, fullgraph=True)
        assert torch.equal(compiled(x, ids, weights), expected)


@pytest.mark.parametrize("recipe", ["int4-g128", "exl3-3.0-mcg"])
def test_a_rank_s_part_of_a_layer_runs_on_kernels(recipe: str) -> None:
    """Half of each of three of eight experts, whose ids are those of all."""
    generator = torch.Generator().manual_seed(0)
    parsed = parse_recipe(recipe)
    held, half, hidden = (6, 1, 4), 128, 256
    schemes: dict[int, list[Any]] = {0: [], 2: []}
    matrices: list[tuple[int, int, int, Any]] = []
    for expert in range(len(held)):
        for part, (n, k) in enumerate(((256, hidden), (256, hidden), (hidden, 256))):
            weight = torch.randn(n, k, generator=generator) / k**0.5
            scheme, matrix = quantize_matrix(weight, parsed)
            take = take_columns if part == 2 else take_rows
            scheme, matrix = take(scheme, matrix, range(half))
            schemes[2 if part == 2 else 0].append(scheme)
            matrices.append((expert, part, part % 2, matrix))
    expert_map = torch.full((8,), -1, dtype=torch.int32)
    expert_map[list(held)] = torch.arange(len(held), dtype=torch.int32)
    geometry = Geometry(1, len(held), hidden, half)
    module = PackedExperts(
        None, geometry, (schemes[0], schemes[2]), Activation(), expert_map=expert_map
    )
    for expert, part, place, matrix in matrices:
        (module.down if part == 2 else module.gate_up).write(expert, place, matrix)
    module = module.cuda()
    x = torch.randn(40, hidden, generator=generator).bfloat16().cuda()
    ids = torch.randint(-1, 9, (40, 4), generator=generator, dtype=torch.int32).cuda()
    weights = torch.rand(40, 4, generator=generator).cuda()
    with torch.no_grad():
        wanted = module(x, ids, weights).float()
        report = attach_kernels([module], top_k=4, dtype=torch.bfloat16)
        assert report.refused == {}
        for dtype in (torch.int32, torch.int64):
            got = module(x, ids.to(dtype), weights).float()
            assert (got - wanted).norm() <= 0.01 * wanted.norm()
            assert (got[wanted.abs().sum(dim=1) == 0] == 0).all()
