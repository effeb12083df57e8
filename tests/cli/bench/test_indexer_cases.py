from dataclasses import replace

import pytest

from firesteel.cli.bench.indexer_cases import CASES, Case, chosen_cases
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer.spec import DecodeSpec, PrefillSpec


# What others measured beside: one H200, keys read once, or products at 1,500 TFLOP/s.
@pytest.mark.parametrize(
    ("name", "floor", "what"),
    [
        ("turnkey-8k", 2.1, "products"),
        ("turnkey-32k", 8.6, "products"),
        ("turnkey-131k", 34.4, "products"),
        ("one-8k", 0.25, "keys"),
        ("one-131k", 4.0, "keys"),
        ("batch-8k", 12.1, "keys"),
        ("batch-131k", 193, "keys"),
        ("prefill-32k", 524, "products"),
        ("prefill-131k", 2173, "products"),
    ],
)
def test_floors_are_those_of_the_reference_table(name: str, floor: float, what: str) -> None:
    us, words = CASES[name].floor()
    assert us == pytest.approx(floor, rel=0.025)
    assert words.split()[0] == what


def test_floors_by_hand() -> None:
    case = Case(name="", requests=2, rows=3, heads=8, context=10, top_k=512)
    # Rows see 8, 9 and 10 keys. A key has 128 values and a scale; its product is 256 operations.
    assert case.operations == 2 * (8 + 9 + 10) * 8 * 256
    assert case.key_bytes == 2 * 10 * 132
    assert case.floor() == (pytest.approx(2640 / 4.3e12 * 1e6), "keys read once at 4.3 TB/s")
    many = Case(name="", mode="prefill", requests=1, rows=10, heads=64, context=10, top_k=512)
    assert many.operations == 55 * 64 * 256
    us, words = many.floor()
    assert us == pytest.approx(55 * 64 * 256 / 1500e12 * 1e6)
    assert words == "products at 1500 TFLOP/s"
    # Of 16 bits keys have no scale, and products half the rate.
    case, many = (replace(each, cache_dtype="bf16") for each in (case, many))
    assert case.floor() == (pytest.approx(20 * 256 / 4.3e12 * 1e6), "keys read once at 4.3 TB/s")
    assert many.floor() == (pytest.approx(2 * us), "products at 750 TFLOP/s")
    assert (case.spec().cache_dtype, many.spec().cache_dtype) == ("bf16", "bf16")


def test_cases_are_of_the_kinds_that_the_table_has() -> None:
    assert list(CASES) == [
        *(f"turnkey-{size}" for size in ("8k", "32k", "131k", "524k", "1m")),
        *("one-8k", "one-131k", "batch-8k", "batch-131k"),
        *("prefill-32k", "prefill-131k", "prefill-1m"),
    ]
    assert all(case.top_k == 2048 and case.name == name for name, case in CASES.items())
    turnkey, one, batch, prefill = (
        CASES[f"{name}-131k"] for name in ("turnkey", "one", "batch", "prefill")
    )
    assert turnkey.spec() == DecodeSpec(num_heads=32, top_k=2048, rows=6, width=2048)
    assert one.spec(has_scores=True) == DecodeSpec(
        num_heads=64, top_k=2048, width=2048, has_scores=True
    )
    assert prefill.spec() == PrefillSpec(num_heads=32, top_k=2048, num_keys=131072)
    assert [case.count for case in (turnkey, one, batch, prefill)] == [8, 1, 48, 3072]


def test_names_choose_and_none_is_all() -> None:
    assert chosen_cases(None, {}, {}) == tuple(CASES.values())
    assert chosen_cases("one-8k, prefill-32k", {"mode": None}, {}) == (
        CASES["one-8k"],
        CASES["prefill-32k"],
    )


def test_a_case_of_one_s_own_has_the_numbers_given_and_a_name() -> None:
    (case,) = chosen_cases(None, {"requests": 3, "context": 5000, "heads": None}, {})
    assert (case.requests, case.rows, case.heads, case.context) == (3, 6, 32, 5000)
    assert (case.name, case.width) == ("decode-3x6-h32-k2048-5000", 79)
    (case,) = chosen_cases(None, {"mode": "prefill", "top_k": 512}, {"route": "auto"})
    assert (case.requests, case.rows, case.top_k) == (1, 3072, 512)


@pytest.mark.parametrize(
    ("names", "own", "every", "message"),
    [
        ("one-9k", {}, {}, "--case: got 'one-9k', must be one of turnkey-8k, "),
        ("", {}, {}, "--case: got ''"),
        ("one-8k", {"rows": 2}, {}, "must not be given with --rows"),
        (None, {"mode": "both"}, {}, "--mode: got 'both', must be one of decode, prefill"),
        (None, {"requests": 0}, {}, "--requests: got 0, must be 1 or more"),
        (None, {"rows": 0}, {}, "--rows: got 0"),
        (None, {"context": -1}, {}, "--context: got -1"),
        (None, {"mode": "prefill", "requests": 2}, {}, "--requests: got 2, must be 1 with"),
        (None, {"mode": "prefill", "context": 9}, {}, "--rows: got 3072, must be at most"),
        (None, {}, {"cache_dtype": "int2"}, "--cache-dtype: got 'int2', must be one of e4m3"),
        (None, {}, {"route": "stream"}, "--route: got 'stream', must be one of auto, filtered, t"),
    ],
)
def test_what_is_no_case_is_named(names: str | None, own: dict, every: dict, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match="got") as caught:
        chosen_cases(names, own, every)
    assert message in str(caught.value)


def test_what_no_kernel_takes_is_named_by_the_spec() -> None:
    (case,) = chosen_cases(None, {"top_k": 100}, {})
    with pytest.raises(UnsupportedError, match="top_k: got 100"):
        case.spec()


def test_a_route_is_that_of_decode_s_spec() -> None:
    for route, is_filtered in (("auto", None), ("filtered", True), ("tiled", False)):
        (case,) = chosen_cases("one-8k", {}, {"route": route})
        spec = case.spec()
        assert isinstance(spec, DecodeSpec)
        assert spec.is_filtered is is_filtered
        kernels = [each.key.name for each in spec.select(1, ())]
        assert ("filter_kernel" in kernels) == (route == "filtered")
