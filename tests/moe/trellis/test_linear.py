"""`TrellisLinearSpec`: what a linear launches at each count, its memory, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError, NotPlannedError, UnsupportedError
from firesteel.launch import NUM_TOKENS, Launch, Stride, plan
from firesteel.launch.stub import StubDriver
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis
from tests.launch.rig import call_of, ready_on_stub, tensors_of

PLAIN = TrellisLinearSpec(in_features=2048, out_features=1024)
BIASED = StoredTrellis(rates=(4,), codebook="mul1", has_bias=True)
SPECS = {
    "2048x1024": PLAIN,
    "no-wgmma-no-pdl": replace(PLAIN, wgmma=False, pdl=False),
    "ragged-biased-fp16": TrellisLinearSpec(
        in_features=576, out_features=200, dtype="fp16", stored=BIASED
    ),
    "small": TrellisLinearSpec(in_features=8, out_features=8),
    "large": TrellisLinearSpec(in_features=6144, out_features=24576),
}
sizes = st.sampled_from((8, 128, 200, 576, 768, 2048, 6144, 16384))
specs = st.builds(
    TrellisLinearSpec,
    in_features=sizes,
    out_features=sizes,
    dtype=st.sampled_from(("bf16", "fp16")),
    stored=st.sampled_from((StoredTrellis(), BIASED)),
    pdl=st.booleans(),
    wgmma=st.booleans(),
)


def constant(launch: Launch, name: str) -> int:
    """A constant of a launch; 1 where its code has none."""
    found = dict(launch.key.constexprs).get(name, 1)
    assert isinstance(found, int)
    return found


def argument(launch: Launch, name: str) -> object:
    """What a launch passes for a parameter; None where it has none."""
    names = [parameter for parameter, _ in launch.key.arguments]
    return launch.arguments[names.index(name)] if name in names else None


@given(spec=specs, num_tokens=st.one_of(st.integers(1, 80), st.integers(81, 1 << 17)))
def test_launches_cover_every_row_and_column(spec: TrellisLinearSpec, num_tokens: int) -> None:
    rotate, product, finish = launches = spec.select(num_tokens, ())
    assert launches == replace(spec).select(num_tokens, ())
    height, width = -(-spec.out_features // 128), -(-spec.in_features // 128)
    span, spans = constant(product, "SPAN"), constant(product, "SPLIT_K")
    assert product.grid[0] * span == height
    assert product.grid[1] == math.ceil(num_tokens / constant(product, "BLOCK_M")) <= 65535
    assert product.grid[2] == spans
    assert 1 in (span, spans)
    assert width % spans == 0
    assert rotate.grid[0] == finish.grid[0] == num_tokens
    assert rotate.grid[1] * 8 >= width
    assert finish.grid[1] * 1024 >= spec.out_features
    for launch, name in ((rotate, "R"), (product, "R"), (finish, "M")):
        assert argument(launch, name) == num_tokens
        assert dict(launch.key.constexprs)["PDL"] == spec.pdl
    # No row has an id, and no weight.
    assert argument(rotate, "rotated_ptr") == argument(product, "x_ptr") == "rotated"
    for launch in launches:
        for name in ("topk_ids_ptr", "route_ids_ptr", "topk_weights_ptr", "expert_map_ptr"):
            assert argument(launch, name) is None
    assert constant(finish, "SPLIT_K") == spans
    sums, products = ("partials", None) if spans > 1 else (None, "products")
    assert (argument(product, "partials_ptr"), argument(product, "y_ptr")) == (sums, products)
    read = (argument(finish, "partials_ptr"), argument(finish, "products_ptr"))
    assert read == (sums, products)
    assert (argument(finish, "bias_ptr") == "w.bias") == spec.stored.has_bias
    assert argument(rotate, "stride_x") == Stride("x")
    assert argument(finish, "stride_out") == Stride("out")
    regions = {region.name: region.shape for region in spec.workspace(num_tokens)}
    assert regions["rotated"] == (num_tokens, 128 * width)
    assert regions["products"] == (num_tokens, 128 * height)
    assert regions["partials"][1] == 128 * height
    assert spans == 1 or regions["partials"][0] >= spans * num_tokens
    is_wgmma = product.key.name == "trellis_wgmma_kernel"
    assert spec.wgmma or not is_wgmma


@pytest.mark.parametrize("name", SPECS)
def test_memory_never_shrinks(name: str) -> None:
    before = [0, 0, 0]
    for num_tokens in range(100):
        regions = SPECS[name].workspace(num_tokens)
        assert [region.name for region in regions] == ["rotated", "partials", "products"]
        now = [math.prod(region.shape) for region in regions]
        assert all(a <= b for a, b in zip(before, now, strict=True))
        before = now


@pytest.mark.parametrize("name", SPECS)
def test_a_linear_runs_what_was_planned(name: str) -> None:
    spec, most = SPECS[name], 70
    made = plan(spec, most)
    assert 3 <= len(made.keys) <= 10
    driver = StubDriver.open()
    driver.reset()
    ready = ready_on_stub(made, driver)
    bound = ready.bind(tensors_of(spec, ()), ready.arena())
    by_handle = {ready.function(key)[0].handle: key for key in made.keys}
    for num_tokens in range(most + 1):
        driver.reset()
        bound.run(*call_of(spec, (), num_tokens))
        found = [(by_handle[launch.function], launch.grid) for launch in driver.launches()]
        assert found == [(each.key, each.grid) for each in spec.select(num_tokens, ())]
    assert not ready.audit.misses
    with pytest.raises(NotPlannedError, match=r"71 tokens, the plan holds 0..70 tokens"):
        bound.run(*call_of(spec, (), most + 1))
    x, out = call_of(spec, (), 3)
    with pytest.raises(InvalidArgumentError, match=r"x: got torch.float32, must be torch"):
        bound.run(x.float(), out)


def test_operands_are_a_stack_of_one_matrix() -> None:
    spec = SPECS["ragged-biased-fp16"]
    assert {each.name: (each.dtype, each.shape) for each in spec.operands(())} == {
        "w.words": ("i32", ("any",)),
        "w.matrices": ("i32", (1, 1, 2)),
        "w.suh": ("fp16", (1, 1, 640)),
        "w.svh": ("fp16", (1, 1, 256)),
        "w.bias": ("fp16", (1, 200)),
        "x": ("fp16", (NUM_TOKENS, 576)),
        "out": ("fp16", (NUM_TOKENS, 200)),
    }
    assert spec.flags() == {}


def test_titles_and_json() -> None:
    assert PLAIN.title == "linear exl3-3-mcg K=2048 N=1024 bf16"
    words = "linear exl3-3-mcg K=2048 N=1024 bf16 no pdl no wgmma"
    assert SPECS["no-wgmma-no-pdl"].title == words
    assert SPECS["ragged-biased-fp16"].title == "linear exl3-4-mul1-bias K=576 N=200 fp16"
    found = PLAIN.as_dict()
    assert set(found) == set(TrellisLinearSpec.__dataclass_fields__)
    assert found["stored"] == {"rates": (3,), "codebook": "mcg", "has_bias": False}
    assert PLAIN.for_target("sm_120") == replace(PLAIN, wgmma=False)
    assert SPECS["no-wgmma-no-pdl"].for_target("sm_90") == PLAIN


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"in_features": 0}, InvalidArgumentError, "in_features: got 0"),
        ({"out_features": True}, InvalidArgumentError, "out_features: got True"),
        ({"in_features": 100}, UnsupportedError, "in_features: got 100, must be a multiple of 8"),
        ({"out_features": 4}, UnsupportedError, "out_features: got 4, must be a multiple of 8"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got 'fp32', must be one of bf16, fp16"),
        ({"stored": (3,)}, InvalidArgumentError, "stored: got .*, must be of class StoredTrellis"),
        (
            {"in_features": 1 << 16, "out_features": 1 << 18},
            UnsupportedError,
            "matrix: got 65536 x 262144 padded",
        ),
    ],
)
def test_a_bad_spec_names_its_field(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        replace(PLAIN, **changes)
    with pytest.raises(InvalidArgumentError, match="num_tokens: got -1, must not be negative"):
        PLAIN.select(-1, ())


@pytest.mark.parametrize(
    ("sizes", "planned"), [((2048, 1024), 4096), ((2048, 151936), 217), ((8192, 1 << 19), 64)]
)
def test_wide_linears_are_planned_for_fewer_rows(sizes: tuple[int, int], planned: int) -> None:
    spec = replace(PLAIN, in_features=sizes[0], out_features=sizes[1])
    assert spec.planned_tokens(4096) == planned
    assert spec.planned_tokens(16) == 16


def test_unaligned_words_are_refused() -> None:
    ready = ready_on_stub(plan(PLAIN, 2), StubDriver.open())
    tensors = tensors_of(PLAIN, ())
    words = tensors["w.words"]
    shifted = torch.zeros(len(words) + 8, dtype=torch.int32)[1:]
    if shifted.data_ptr() % 16 == 0:
        shifted = shifted[1:]
    with pytest.raises(InvalidArgumentError, match=r"w.words: starts at .* multiple of 16"):
        ready.bind({**tensors, "w.words": shifted}, ready.arena())
