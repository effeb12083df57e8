"""`TrellisMoeSpec` and `StoredTrellis`: titles, operands, ranks, and what is refused."""

import json
from dataclasses import replace

import pytest
import triton

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis import TrellisCode
from firesteel.launch import NUM_TOKENS
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec, trellis_geometry

IDS = (("ids", "i32"),)
PLAIN = TrellisMoeSpec(hidden_size=576, intermediate_size=192, num_experts=8, top_k=2)
MIXED = StoredTrellis(rates=(2, 3), codebook="mul1", has_bias=True)
CHANGES = {
    "": {},
    "batch_invariant": {"batch_invariant": True},
    "no pdl": {"pdl": False},
    "no wgmma": {"wgmma": False},
    "E=8 of 16": {"num_global_experts": 16},
    "fp16": {"dtype": "fp16"},
    "exl3-2,3-mul1-bias/exl3-3-mcg": {"w13": MIXED},
    "exl3-3-mcg/exl3-2,3-mul1-bias": {"w2": MIXED},
    "exl3-2,3-mul1-bias ": {"w13": MIXED, "w2": MIXED},
    "exl3-3-mcg/exl3-3-3inst": {"w2": StoredTrellis(codebook="3inst")},
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
    assert PLAIN.title == "MoE exl3-3-mcg K=576 N=192 E=8 top_k=2 bf16 silu"


@pytest.mark.parametrize("changes", CHANGES.values())
def test_json_has_every_field(changes: dict[str, object]) -> None:
    spec = replace(PLAIN, **changes)
    found = json.loads(json.dumps(spec.as_dict()))
    assert set(found) == set(TrellisMoeSpec.__dataclass_fields__)
    for name in ("w13", "w2"):
        found[name] = StoredTrellis(**{**found[name], "rates": tuple(found[name]["rates"])})
    assert TrellisMoeSpec(**{**found, "activation": Activation(**found["activation"])}) == spec


@pytest.mark.parametrize(
    ("target", "pdl", "wgmma"),
    [("sm_80", False, False), ("sm_90", True, True), ("sm_120", True, False)],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_target_says_which_launches_and_kernels_there_are(
    target: str, pdl: bool, wgmma: bool, before: bool
) -> None:
    spec = replace(PLAIN, pdl=before, wgmma=before).for_target(target)
    assert spec == replace(PLAIN, pdl=pdl, wgmma=wgmma)
    with pytest.raises(InvalidArgumentError, match="target: got '90', must be sm_80"):
        spec.for_target("90")


def test_operands_are_stacks_as_formats_hold_them() -> None:
    spec = replace(PLAIN, w2=MIXED, num_global_experts=16)
    found = {each.name: (each.dtype, each.shape) for each in spec.operands((("ids", "i64"),))}
    assert found == {
        "w13.words": ("i32", ("any",)),
        "w13.matrices": ("i32", (8, 2, 2)),
        "w13.suh": ("fp16", (8, 2, 640)),
        "w13.svh": ("fp16", (8, 2, 256)),
        "w2.words": ("i32", ("any",)),
        "w2.matrices": ("i32", (8, 1, 2)),
        "w2.suh": ("fp16", (8, 1, 256)),
        "w2.svh": ("fp16", (8, 1, 640)),
        "w2.bias": ("bf16", (8, 576)),
        "expert_map": ("i32", (16,)),
        "x": ("bf16", (NUM_TOKENS, 576)),
        "topk_ids": ("i64", (NUM_TOKENS, 2)),
        "topk_weights": ("fp32", (NUM_TOKENS, 2)),
        "out": ("bf16", (NUM_TOKENS, 576)),
    }
    plain = replace(PLAIN, w13=MIXED, activation=Activation(name="relu2"), dtype="fp16")
    found = {each.name: (each.dtype, each.shape) for each in plain.operands(IDS)}
    assert found["w13.matrices"] == ("i32", (8, 1, 2))
    assert found["w13.bias"] == ("fp16", (8, 192))
    assert "expert_map" not in found


def test_a_rank_has_whole_rotations() -> None:
    spec = replace(PLAIN, intermediate_size=768, w2=MIXED)
    assert spec.shard(3) == replace(spec, intermediate_size=256)
    assert PLAIN.shard(1) == PLAIN
    for ranks in (2, 4):
        message = f"tensor_parallel: got {ranks}, each rank must have whole blocks of 128 of the"
        with pytest.raises(InvalidArgumentError, match=message):
            replace(PLAIN, intermediate_size=640).shard(ranks)
    with pytest.raises(InvalidArgumentError, match="tensor_parallel: got 0"):
        PLAIN.shard(0)


def test_a_model_by_name_is_stored_as_asked() -> None:
    spec = trellis_geometry("gpt-oss-120b", TrellisCode(4.0, "mul1"))
    assert spec.w13 == spec.w2 == StoredTrellis(rates=(4,), codebook="mul1", has_bias=True)
    rank = trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"), tensor_parallel=4)
    assert (rank.hidden_size, rank.intermediate_size) == (6144, 512)
    with pytest.raises(UnsupportedError, match=r"bits: got 2\.5, kernels read whole"):
        trellis_geometry("glm-5.2", TrellisCode(2.5, "mcg"))
    with pytest.raises(InvalidArgumentError, match="model: got 'glm-9', must be one of glm-5"):
        trellis_geometry("glm-9", TrellisCode(3.0, "mcg"))


@pytest.mark.parametrize(
    ("stored", "bytes_per_weight", "mask"),
    [(StoredTrellis(), 0.375, 0b1000), (StoredTrellis(rates=(1, 2, 8)), 11 / 24, 0b100000110)],
)
def test_rates(stored: StoredTrellis, bytes_per_weight: float, mask: int) -> None:
    assert stored.bytes_per_weight == pytest.approx(bytes_per_weight)
    assert stored.mask == mask


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rates": ()}, r"rates: got \(\), must be some of 1 to 8, whole, each once, ascending"),
        ({"rates": (3, 2)}, r"rates: got \(3, 2\), must be"),
        ({"rates": (3, 3)}, r"rates: got \(3, 3\), must be"),
        ({"rates": (0, 3)}, r"rates: got \(0, 3\), must be"),
        ({"rates": (9,)}, r"rates: got \(9,\), must be"),
        ({"rates": (2.5,)}, r"rates: got \(2.5,\), must be"),
        ({"rates": (3.0,)}, r"rates: got \(3.0,\), must be"),
        ({"rates": [3]}, r"rates: got \[3\], must be .* in a tuple"),
        ({"rates": 3}, r"rates: got 3, must be .* in a tuple"),
        ({"rates": ("3",)}, r"rates: got \('3',\), must be"),
        ({"codebook": "mul2"}, "codebook: got 'mul2', must be one of mcg, 3inst, mul1"),
    ],
)
def test_what_no_kernel_reads_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        StoredTrellis(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 0}, InvalidArgumentError, "hidden_size: got 0"),
        ({"hidden_size": 129}, UnsupportedError, "hidden_size: got 129, must be a multiple of 8"),
        ({"intermediate_size": -1}, InvalidArgumentError, "intermediate_size: got -1"),
        ({"num_experts": True}, InvalidArgumentError, "num_experts: got True"),
        ({"num_experts": 2049}, UnsupportedError, "num_experts: got 2049, must be at most 2048"),
        ({"num_global_experts": 0}, InvalidArgumentError, "num_global_experts: got 0"),
        ({"top_k": 9}, InvalidArgumentError, "top_k: got 9, must be at most 8 experts"),
        ({"dtype": "fp32"}, UnsupportedError, "dtype: got 'fp32', must be one of bf16, fp16"),
        ({"w13": None}, InvalidArgumentError, "w13: got None, must be of class StoredTrellis"),
        (
            {"activation": "silu"},
            InvalidArgumentError,
            "activation: got 'silu', must be of class Activation",
        ),
        (
            {"hidden_size": 1 << 18, "intermediate_size": 1 << 15},
            UnsupportedError,
            "matrix: got 262144 x 32768 padded, must have less than 2",
        ),
    ],
)
def test_a_bad_spec_names_its_field(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    small = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    with pytest.raises(error, match=words):
        TrellisMoeSpec(**{**small, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [PLAIN, TrellisLinearSpec(in_features=128, out_features=128)])
def test_a_triton_without_gluon_is_refused(
    monkeypatch: pytest.MonkeyPatch, spec: TrellisMoeSpec | TrellisLinearSpec
) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(UnsupportedError, match=r"kernels for EXL3 need Triton 3\.6 or later"):
        replace(spec)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert replace(spec) == spec
