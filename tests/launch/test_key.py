import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import InvalidArgumentError
from firesteel.launch import LaunchKey
from firesteel.launch.key import nearest_key

KEY = LaunchKey(
    "module.gate_kernel",
    (("x_ptr", "*bf16@16"), ("M", "i64")),
    (("BLOCK", 64), ("IS_EVEN", True), ("scale_ptr", None), ("MODE", "fast"), ("EPS", 1e-6)),
    num_warps=8,
    num_stages=2,
    pdl=True,
)

names = st.text(min_size=1, max_size=5)
constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    st.text(max_size=5),
)
keys = st.builds(
    LaunchKey,
    names,
    st.dictionaries(names, st.sampled_from(["*bf16@16", "*i64", "i64", "fp32"])).map(
        lambda found: tuple(found.items())
    ),
    st.dictionaries(names, constants).map(lambda found: tuple(found.items())),
    num_warps=st.sampled_from([1, 4, 32]),
    num_stages=st.integers(0, 5),
    pdl=st.booleans(),
    cooperative=st.booleans(),
    max_registers=st.sampled_from((0, 128)),
)


@given(key=keys)
def test_json_gives_the_key_back(key: LaunchKey) -> None:
    found = LaunchKey.from_dict(json.loads(json.dumps(key.as_dict())))
    assert found == key
    assert hash(found) == hash(key)
    assert repr(found) == repr(key)
    assert key.differences(found) == ()


@given(key=keys, other=keys)
def test_keys_are_equal_exactly_where_nothing_differs(key: LaunchKey, other: LaunchKey) -> None:
    assert (key == other) == (repr(key) == repr(other))
    assert other in (key, other)
    if key == other:
        assert key.differences(other) == ()


@pytest.mark.parametrize(
    ("ours", "theirs"), [(True, 1), (False, 0), (1, 1.0), (0.0, -0.0), ("1", 1), (None, 0)]
)
def test_values_that_python_holds_equal_are_other_keys(ours: object, theirs: object) -> None:
    first = replace(KEY, constexprs=(("A", ours),))
    second = replace(KEY, constexprs=(("A", theirs),))
    assert first != second
    assert len({first, second}) == 2
    assert {first: "first", second: "second"}[second] == "second"


def test_differences_tell_true_from_one() -> None:
    other = replace(KEY, constexprs=(("BLOCK", 64), ("IS_EVEN", 1)))
    assert KEY.differences(other) == (
        "IS_EVEN: True, nearest has 1",
        "scale_ptr: None, nearest has absent",
        "MODE: 'fast', nearest has absent",
        "EPS: 1e-06, nearest has absent",
    )


def test_differences_name_every_field() -> None:
    other = LaunchKey("module.other_kernel", (("x_ptr", "*fp16@16"), ("N", "i64")), KEY.constexprs)
    assert KEY.differences(other) == (
        "kernel: 'module.gate_kernel', nearest has 'module.other_kernel'",
        "num_warps: 8, nearest has 4",
        "num_stages: 2, nearest has 3",
        "pdl: True, nearest has False",
        "x_ptr: '*bf16@16', nearest has '*fp16@16'",
        "M: 'i64', nearest has absent",
        "N: absent, nearest has 'i64'",
    )


def test_the_nearest_key_is_of_the_same_kernel_first() -> None:
    same_but_for_name = replace(KEY, kernel="module.other_kernel")
    far = replace(KEY, num_warps=1, num_stages=1, pdl=False)
    near = replace(KEY, num_warps=1)
    assert nearest_key(KEY, [same_but_for_name, far, near]) == near
    assert nearest_key(KEY, [same_but_for_name, far]) == far
    assert nearest_key(KEY, [same_but_for_name]) == same_but_for_name
    assert nearest_key(KEY, []) is None


def test_text_has_the_functions_own_name_and_every_field() -> None:
    assert str(KEY) == (
        "gate_kernel(x_ptr: *bf16@16, M: i64, BLOCK=64, IS_EVEN=True, MODE=fast, "
        "EPS=1e-06, num_warps=8, num_stages=2, pdl)"
    )
    assert str(replace(KEY, pdl=False, cooperative=True)).endswith("num_stages=2, cooperative)")


def test_a_key_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        KEY.num_warps = 4  # type: ignore[misc]


def test_fields_with_defaults_may_be_left_out_of_json() -> None:
    found = LaunchKey.from_dict({"kernel": "m.k", "arguments": {}, "constexprs": {"A": 1}})
    assert found == LaunchKey("m.k", (), (("A", 1),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": None}, "must have kernel, arguments and constexprs"),
        ({"arguments": None}, "must have kernel, arguments and constexprs"),
        ({"num_ctas": 2}, r"unknown fields \['num_ctas'\]"),
    ],
)
def test_json_of_other_fields_is_refused(change: dict[str, object], message: str) -> None:
    value = {**KEY.as_dict(), **change}
    value = {name: field for name, field in value.items() if field is not None}
    with pytest.raises(InvalidArgumentError, match=message):
        LaunchKey.from_dict(value)


@pytest.mark.parametrize("name", ["arguments", "constexprs"])
def test_json_of_a_wrong_class_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"key.{name}: got \\[1\\], must be an object"):
        LaunchKey.from_dict({**KEY.as_dict(), name: [1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": 5}, "key.kernel: got 5, must be text"),
        ({"num_warps": True}, "key.num_warps: got True, must be an integer"),
        ({"num_warps": 4.0}, "key.num_warps: got 4.0, must be an integer"),
        ({"num_stages": "3"}, "key.num_stages: got '3', must be an integer"),
        ({"pdl": 1}, "key.pdl: got 1, must be true or false"),
        ({"cooperative": None}, "key.cooperative: got None, must be true or false"),
        ({"max_registers": 1.5}, "key.max_registers: got 1.5, must be an integer"),
        ({"arguments": {"x": 5}}, "key.arguments.x: got 5, must be text"),
        (
            {"constexprs": {"A": [1]}},
            r"key.constexprs.A: got \[1\], must be a number, text or None",
        ),
        ({"constexprs": {"A": float("nan")}}, "key.constexprs.A: got nan, must be a number"),
    ],
)
def test_a_field_of_a_wrong_class_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LaunchKey.from_dict({**KEY.as_dict(), **change})


@pytest.mark.parametrize("value", [None, 5, [1], "kernel arguments constexprs"])
def test_json_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must have kernel, arguments and constexprs"):
        LaunchKey.from_dict(value)
