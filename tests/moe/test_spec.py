"""`MoeSpec`: titles that tell plans apart, and what a rank of several holds."""

import sys
from dataclasses import replace

import pytest
import triton

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.moe.activation import Activation
from firesteel.moe.spec import MoeSpec, StoredWeights, geometry

IDS = (("ids", "i32"),)
PLAIN = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
ASYMMETRIC = StoredWeights(has_zero_points=True)
CHANGES = {
    "": {},
    "batch_invariant": {"batch_invariant": True},
    "weight_on_input": {"weight_on_input": True},
    "no pdl": {"pdl": False},
    "no wgmma": {"wgmma": False},
    "E=8 of 16": {"num_global_experts": 16},
    "int4-g128/int4-g64": {"w2": StoredWeights(group_size=64)},
    "int4-g128/int4-g128-asym": {"w2": ASYMMETRIC},
    "int4-g128-asym/int4-g128": {"w13": ASYMMETRIC},
    "int4-g128-asym ": {"w13": ASYMMETRIC, "w2": ASYMMETRIC},
    "int4-g128-fp32": {"w13": StoredWeights(scale="fp32")},
    "int4-g128-bias": {"w13": StoredWeights(has_bias=True)},
    "mxfp4 K": {"w13": StoredWeights.fp4("mxfp4"), "w2": StoredWeights.fp4("mxfp4")},
    "int4-g128/mxfp4-bias": {"w2": StoredWeights.fp4("mxfp4", has_bias=True)},
    "int4-g128/nvfp4-divisor": {"w2": StoredWeights.fp4("nvfp4")},
    "int4-g128/nvfp4-multiplier": {"w2": StoredWeights.fp4("nvfp4", global_scale="multiplier")},
    "nf3 K": {"w13": StoredWeights.nf3(), "w2": StoredWeights.nf3()},
    "int3-g128/int4-g128": {"w13": StoredWeights(element="int3")},
    "silu limit=7.0": {"activation": Activation(limit=7.0)},
    "swigluoai": {"activation": Activation(name="swigluoai")},
    "swigluoai alpha=1.5": {"activation": Activation(name="swigluoai", alpha=1.5)},
}


@pytest.mark.parametrize("word", CHANGES)
def test_a_title_has_what_was_changed(word: str) -> None:
    assert word in replace(PLAIN, **CHANGES[word]).title


@pytest.mark.parametrize("max_tokens", [0, 1, 8192])
def test_a_layer_is_planned_for_all_tokens_that_are_asked_for(max_tokens: int) -> None:
    assert PLAIN.planned_tokens(max_tokens) == max_tokens


def test_no_two_titles_are_alike() -> None:
    titles = {replace(PLAIN, **changes).title for changes in CHANGES.values()}
    assert len(titles) == len(CHANGES)
    assert PLAIN.title == "MoE int4-g128 K=256 N=128 E=8 top_k=2 bf16 silu"


def test_the_type_of_scales_is_named_where_it_is_not_the_layers() -> None:
    fp16 = StoredWeights(scale="fp16")
    assert replace(PLAIN, dtype="fp16", w13=fp16, w2=fp16).title.startswith("MoE int4-g128 K=")
    assert replace(PLAIN, dtype="fp16").title.startswith("MoE int4-g128-bf16 K=")


@pytest.mark.parametrize(
    ("target", "pdl", "wgmma"),
    [
        ("sm_80", False, False),
        ("sm_89", False, False),
        ("sm_90", True, True),
        ("sm_120", True, False),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_target_says_which_launches_and_kernels_there_are(
    target: str, pdl: bool, wgmma: bool, before: bool
) -> None:
    spec = replace(PLAIN, pdl=before, wgmma=before).for_target(target)
    assert spec == replace(PLAIN, pdl=pdl, wgmma=wgmma)


@pytest.mark.parametrize("target", ["90", "sm_75", "sm_9"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"target: got '{target}', must be sm_80"):
        PLAIN.for_target(target)


@pytest.mark.parametrize("version", ["3.5.1", "3.4.0", None])
def test_hoppers_own_kernels_need_a_triton_that_has_gluon(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setattr(triton, "__version__", version)
    words = "wgmma: got True, must be False with Triton before 3.6"
    with pytest.raises(UnsupportedError, match=words):
        replace(PLAIN, wgmma=True)
    made = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
    assert not made.wgmma
    if version is not None:
        assert made.for_target("sm_90") == replace(PLAIN, pdl=version != "3.4.0", wgmma=False)


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1", "4.0.0+git"])
def test_from_triton_3_6_on_they_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert replace(PLAIN, wgmma=False).for_target("sm_90").wgmma
    assert MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2).wgmma


def test_a_rank_keeps_the_bias_so_that_all_ranks_share_a_plan() -> None:
    whole = geometry("gpt-oss-120b", group_size=32)
    rank = whole.shard(2)
    assert rank.w2.has_bias
    assert rank.intermediate_size == whole.intermediate_size // 2
    assert rank == geometry("gpt-oss-120b", group_size=32, tensor_parallel=2)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (StoredWeights(), 0.515625),
        (StoredWeights(group_size=32, has_zero_points=True), 0.59375),
        (StoredWeights.fp4("mxfp4"), 0.53125),
        (StoredWeights.fp4("nvfp4"), 0.5625),
        (StoredWeights.nf3(), 0.40625),
        (StoredWeights(element="int3"), 0.390625),
    ],
)
def test_bytes_a_weight(stored: StoredWeights, expected: float) -> None:
    assert stored.bytes_per_weight == expected


@pytest.mark.parametrize("element", ["mxfp4", "nvfp4"])
def test_a_model_by_name_is_stored_as_asked(element: str) -> None:
    spec = geometry("gpt-oss-120b", element=element)
    assert spec.w13 == spec.w2 == StoredWeights.fp4(element, has_bias=True)


def test_operands_of_3_bits_are_three_runs_of_words() -> None:
    spec = replace(PLAIN, w13=StoredWeights.nf3(), w2=StoredWeights(element="int3"))
    found = {operand.name: (operand.dtype, operand.shape) for operand in spec.operands(IDS)}
    assert found["w13.codes"] == ("i16", (8, 2, 2, 2, 3, 64, 8))
    assert found["w13.scales"] == ("u8", (8, 8, 256))
    assert found["w2.codes"] == ("i16", (8, 1, 4, 1, 3, 64, 8))
    assert geometry("gpt-oss-120b", element="nf3").w2 == StoredWeights.nf3(has_bias=True)


def test_operands_of_fp4_are_bytes_and_matrix_wide_scales() -> None:
    stored = StoredWeights.fp4("nvfp4")
    operands = replace(PLAIN, w13=stored, w2=stored).operands(IDS)
    found = {operand.name: (operand.dtype, operand.shape) for operand in operands}
    assert found["w13.scales"] == ("u8", (8, 16, 256))
    assert found["w13.global_scale"] == ("fp32", (8, 2))
    assert found["w2.scales"] == ("u8", (8, 8, 256))
    assert found["w2.global_scale"] == ("fp32", (8, 1))
    mxfp4 = replace(PLAIN, w13=StoredWeights.fp4("mxfp4")).operands(IDS)
    assert not any(operand.name == "w13.global_scale" for operand in mxfp4)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 0}, InvalidArgumentError, "hidden_size: got 0"),
        ({"hidden_size": 129}, UnsupportedError, "hidden_size: got 129"),
        ({"num_experts": True}, InvalidArgumentError, "num_experts: got True"),
        ({"num_experts": 2049}, UnsupportedError, "num_experts: got 2049, must be at most 2048"),
        ({"top_k": 9}, InvalidArgumentError, "top_k: got 9"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got 'fp32'"),
        ({"w13": StoredWeights(group_size=48)}, UnsupportedError, "w13.group_size: got 48"),
        ({"w13": StoredWeights(group_size=0)}, UnsupportedError, "w13.group_size: got 0"),
        ({"w2": StoredWeights(scale="e4m3")}, UnsupportedError, "w2.scale: got 'e4m3'"),
        ({"w2": StoredWeights(element="int8")}, UnsupportedError, "w2.element: got 'int8'"),
        ({"w2": StoredWeights(global_scale="divisor")}, UnsupportedError, "w2.global_scale: got"),
        (
            {"w13": replace(StoredWeights.fp4("nvfp4"), global_scale="none")},
            UnsupportedError,
            "w13.global_scale: got 'none', must be 'multiplier' or 'divisor' of nvfp4",
        ),
        (
            {"w13": replace(StoredWeights.fp4("mxfp4"), group_size=64)},
            UnsupportedError,
            "w13.group_size: got 64 for 256 columns, must be 32 of mxfp4",
        ),
        (
            {"w13": replace(StoredWeights.fp4("mxfp4"), scale="bf16")},
            UnsupportedError,
            "w13.scale: got 'bf16', must be e8m0 of mxfp4",
        ),
        (
            {"w13": replace(StoredWeights.nf3(), scale="e4m3")},
            UnsupportedError,
            "w13.scale: got 'e4m3', must be e5m3 of nf3",
        ),
        (
            {"w2": replace(StoredWeights.fp4("nvfp4"), has_zero_points=True)},
            UnsupportedError,
            "w2.has_zero_points: got True",
        ),
        (
            {"intermediate_size": 48, "w2": StoredWeights.fp4("mxfp4")},
            UnsupportedError,
            "w2.group_size: got 32 for 48 columns",
        ),
        # 1856 columns are 14.5 groups of 128.
        ({"intermediate_size": 1856}, UnsupportedError, r"w2.group_size: got 128 .* \[32, 64\]"),
    ],
)
def test_a_bad_spec_names_its_field(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    small = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    with pytest.raises(error, match=words):
        MoeSpec(**{**small, **changes})  # type: ignore[arg-type]


def test_a_group_that_straddles_two_ranks_is_refused() -> None:
    spec = MoeSpec(
        hidden_size=256,
        intermediate_size=640,
        num_experts=8,
        top_k=2,
        w2=StoredWeights(group_size=128),
    )
    with pytest.raises(InvalidArgumentError, match="320 columns must be whole scale groups of 128"):
        spec.shard(2)
    assert spec.shard(5).intermediate_size == 128
    with pytest.raises(InvalidArgumentError, match="must divide intermediate_size 640"):
        spec.shard(3)


def test_an_activation_that_is_not_gated_has_one_part() -> None:
    spec = MoeSpec(
        hidden_size=256,
        intermediate_size=128,
        num_experts=8,
        top_k=2,
        activation=Activation(name="relu2"),
    )
    shapes = {operand.name: operand.shape for operand in spec.operands(IDS)}
    assert shapes["w13.codes"] == (8, 1, 2, 2, 64, 32)
    assert shapes["w13.scales"] == (8, 2, 128)
    gated = replace(spec, activation=Activation())
    shapes = {operand.name: operand.shape for operand in gated.operands(IDS)}
    assert shapes["w13.codes"] == (8, 2, 2, 2, 64, 32)
    assert shapes["w13.scales"] == (8, 2, 256)
    assert shapes["w2.codes"] == (8, 1, 4, 1, 64, 32)
    assert shapes["w2.scales"] == (8, 1, 256)
