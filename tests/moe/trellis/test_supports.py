"""From schemes of a checkpoint to specs: what is taken, what is refused, what is united."""

from dataclasses import replace

import pytest
import torch

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.formats.trellis import Codebook, TrellisCode
from firesteel.formats.trellis_matrix import TrellisScheme, trellis_scheme
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec, trellis_geometry
from firesteel.moe.trellis.supports import stored_of, trellis_moe_spec_of, united

K, N = 576, 192
SIZES = {"num_experts": 2, "hidden_size": K, "intermediate_size": N, "top_k": 2}


def schemes(
    *bits: float, codebook: Codebook = "mcg", n: int = N, k: int = K
) -> list[TrellisScheme]:
    return [trellis_scheme(n, k, TrellisCode(rate, codebook)) for rate in bits]


def spec_of(*w13: float, w2: list[TrellisScheme] | None = None, **changes: object):
    given = {**SIZES, "activation": Activation(), "dtype": torch.bfloat16, "has_bias": False}
    w2 = w2 or schemes(3, 3, n=K, k=N)
    return trellis_moe_spec_of(schemes(*w13), w2, **{**given, **changes})


def test_every_field_is_taken_from_where_it_stands() -> None:
    activation = Activation(name="swigluoai", limit=3.0)
    w2 = schemes(6, 4, codebook="mul1", n=K, k=N)
    spec = spec_of(2, 3, 3, 2, w2=w2, activation=activation, dtype=torch.float16, has_bias=True)
    assert spec == TrellisMoeSpec(
        **SIZES,
        dtype="fp16",
        w13=StoredTrellis(rates=(2, 3), has_bias=True),
        w2=StoredTrellis(rates=(4, 6), codebook="mul1", has_bias=True),
        activation=activation,
    )


def test_a_model_by_name_and_its_schemes_give_one_spec() -> None:
    spec = trellis_moe_spec_of(
        schemes(3, 3, n=2048, k=6144),
        schemes(3, n=6144, k=2048),
        num_experts=256,
        hidden_size=6144,
        intermediate_size=2048,
        top_k=8,
        activation=Activation(),
        dtype=torch.bfloat16,
        has_bias=False,
    )
    assert spec == trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (schemes(3, 2.5, 4), r"bits: got 2\.5, kernels read whole numbers of bits"),
        (schemes(1.5), r"bits: got 1\.5, kernels read whole numbers of bits"),
        (
            [*schemes(3), *schemes(3, codebook="mul1"), *schemes(2)],
            "codebooks: got mcg, mul1 in one stack, kernels read one",
        ),
    ],
)
def test_what_no_kernel_reads_is_refused(found: list[TrellisScheme], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        stored_of(found, has_bias=False)
    with pytest.raises(UnsupportedError, match=words):
        spec_of(3, w2=found)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", ["mcg", "3inst", "mul1"])
def test_every_whole_rate_of_every_codebook_is_taken(bits: int, codebook: Codebook) -> None:
    wanted = StoredTrellis(rates=(bits,), codebook=codebook, has_bias=True)
    assert stored_of(schemes(bits, bits, codebook=codebook), has_bias=True) == wanted


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dtype": torch.float32}, UnsupportedError, "dtype: got torch.float32, must be bfloat16"),
        ({"top_k": 3}, InvalidArgumentError, "top_k: got 3, must be at most 2 experts"),
        ({"hidden_size": 0}, InvalidArgumentError, "hidden_size: got 0"),
    ],
)
def test_a_bad_layer_is_refused(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        spec_of(3, **changes)


def test_layers_that_differ_in_their_rates_alone_share_a_plan() -> None:
    one = spec_of(2, 3)
    two = replace(one, w13=StoredTrellis(rates=(3, 5)), w2=StoredTrellis(rates=(1,)))
    other = replace(one, w2=StoredTrellis(rates=(4,), codebook="mul1"))
    wide = replace(one, intermediate_size=384)
    both = replace(one, w13=StoredTrellis(rates=(2, 3, 5)), w2=StoredTrellis(rates=(1, 3)))
    found = united([one, other, two, one, wide])
    assert found == {one: both, two: both, other: other, wide: wide}
    assert united([]) == {}
    for spec, shared in found.items():
        assert set(spec.w13.rates) <= set(shared.w13.rates)
        assert set(spec.w2.rates) <= set(shared.w2.rates)


def test_a_stack_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="schemes: got none"):
        stored_of((), has_bias=False)


def test_codebooks_are_named_in_one_order() -> None:
    mixed = [trellis_scheme(128, 128, TrellisCode(3.0, name)) for name in ("mul1", "mcg")]
    for found in (mixed, mixed[::-1]):
        with pytest.raises(UnsupportedError, match="codebooks: got mcg, mul1 in one stack"):
            stored_of(found, has_bias=False)
