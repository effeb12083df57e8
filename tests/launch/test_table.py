"""`plan`: what it holds, against `select` itself, and what it refuses."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from examples.scale_rows.scale_rows import SCALE, ScaleRows
from firesteel.errors import InvalidArgumentError, NotPlannedError
from firesteel.launch import (
    NUM_TOKENS,
    Flags,
    Kernel,
    Launch,
    LaunchKey,
    Operand,
    Region,
    Stride,
    plan,
)
from firesteel.launch.table import MAX_LAUNCHES, RowInteger, Table, plan_count

ROOT = Path(__file__).parent.parent.parent


@triton.jit(do_not_specialize=["M", "stride", "eps"])
def sample_kernel(x_ptr, acc_ptr, M: tl.int64, stride: tl.int64, eps: tl.float32, B: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, B), M + stride + eps)


@triton.jit(do_not_specialize=["n"])
def short_kernel(x_ptr, n: tl.int32):
    tl.store(x_ptr, n)


def _factory(offset: int) -> Kernel:
    @triton.jit
    def made_kernel(x_ptr):
        tl.store(x_ptr, offset)

    return Kernel(made_kernel)


SAMPLE, SHORT = Kernel(sample_kernel), Kernel(short_kernel)
TYPES = {"x_ptr": "*fp32", "acc_ptr": "*fp32", "M": "i64", "stride": "i64", "eps": "fp32"}
X = Operand("x", "fp32", (NUM_TOKENS, 8), has_stride=True)


def launch_of(
    block: Any = 16, grid: Any = (1, 1, 1), types: Mapping[str, str] = TYPES, **arguments: Any
) -> Launch:
    key = SAMPLE.key({**TYPES, **types}, {"B": block})
    given = {"x_ptr": "x", "acc_ptr": "acc", "M": 0, "stride": Stride("x"), "eps": 0.5}
    return SAMPLE.launch(key, grid, {**given, **arguments})


def short_launch(n: int) -> Launch:
    return SHORT.launch(
        SHORT.key({"x_ptr": "*fp32", "n": "i32"}), (1, 1, 1), {"x_ptr": "x", "n": n}
    )


@dataclass(frozen=True)
class Drawn:
    """A spec whose `select` is a function of the token count."""

    chosen: Callable[[int], tuple[Launch, ...]]
    given: tuple[Operand, ...] = (X,)
    regions: Callable[[int], tuple[Region, ...]] = lambda m: (Region("acc", "fp32", (m,)),)
    allowed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    title: str = "drawn"

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        return self.allowed

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        del flags
        return self.given

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        return self.regions(num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        del flags
        return self.chosen(num_tokens)

    def as_dict(self) -> dict[str, Any]:
        return {}


def one(launch: Launch, **changes: Any) -> Drawn:
    return Drawn(lambda m: (launch,), **changes)


def expected_row(launch: Launch) -> tuple[LaunchKey, tuple[int, int, int], list[object]]:
    """Key, grid and arguments of a launch, numbers as they are."""
    return launch.key, launch.grid, list(launch.arguments)


def found_rows(table: Table, num_tokens: int) -> list[tuple[LaunchKey, Any, list[object]]]:
    """The same, as a launcher reads them from the table."""
    rows: list[tuple[LaunchKey, Any, list[object]]] = []
    for step, grid, integers in table.launches(num_tokens):
        arguments: list[object] = []
        for argument, (_, kind) in zip(step.arguments, step.key.arguments, strict=True):
            if not isinstance(argument, RowInteger):
                arguments.append(argument)
            elif kind == "fp32":
                bits = integers[argument.place] & 0xFFFFFFFF
                value = memoryview(bits.to_bytes(4, sys.byteorder)).cast("f")[0]
                arguments.append(value)
            else:
                arguments.append(integers[argument.place])
        rows.append((step.key, grid, arguments))
    return rows


launches = st.builds(
    lambda block, grid, m, eps, strided: launch_of(
        block, grid, M=m, eps=eps, stride=Stride("x") if strided else m // 3
    ),
    st.sampled_from([16, 32, 64, True, 1]),
    st.tuples(
        st.sampled_from([0, 1, 7, 2**31 - 1]), st.sampled_from([1, 65535]), st.sampled_from([1, 2])
    ),
    st.sampled_from([0, 1, -1, 2**40, -(2**63), 2**63 - 1]),
    st.floats(width=32, allow_nan=False),
    st.booleans(),
)


@given(
    chosen=st.lists(st.lists(launches, max_size=3).map(tuple), min_size=1, max_size=5),
    data=st.data(),
)
@hypothesis_settings(max_examples=60)
def test_rows_are_what_select_says_at_every_count(
    chosen: list[tuple[Launch, ...]], data: st.DataObject
) -> None:
    pick = data.draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=25), label="by count")
    made = plan(Drawn(pick.__getitem__), len(pick) - 1)
    (table,) = made.tables.values()
    for num_tokens, wanted in enumerate(pick):
        assert found_rows(table, num_tokens) == [expected_row(launch) for launch in wanted]
        assert [step.key for step in table.resolve(num_tokens)] == [x.key for x in wanted]
    # In the order in which they are first needed, each once.
    assert list(made.keys) == list(dict.fromkeys(x.key for wanted in pick for x in wanted))
    assert set(made.kernels) == {key.kernel for key in made.keys}


@given(
    chosen=st.lists(st.lists(launches, max_size=3).map(tuple), min_size=1, max_size=4),
    data=st.data(),
)
@hypothesis_settings(max_examples=60)
def test_ranges_are_the_counts_that_use_a_key(
    chosen: list[tuple[Launch, ...]], data: st.DataObject
) -> None:
    pick = data.draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=25), label="by count")
    made = plan(Drawn(pick.__getitem__), len(pick) - 1)
    ranges = made.ranges()
    assert list(ranges) == list(made.keys)
    for key, whole in made.launch_ranges().items():
        found = {m: n for first, last, n in whole for m in range(first, last + 1)}
        often = [sum(x.key == key and all(x.grid) for x in wanted) for wanted in pick]
        assert found == {m: n for m, n in enumerate(often) if n}
        assert all(a[1] + 1 < b[0] or a[2] != b[2] for a, b in pairwise(whole))
    for key, spans in ranges.items():
        made_at = [[x.key for x in wanted if all(x.grid)] for wanted in pick]
        counts = [m for m, keys in enumerate(made_at) if key in keys]
        assert [m for first, last in spans for m in range(first, last + 1)] == counts
        # As few as can be: a gap between each and the next.
        assert all(a[1] + 1 < b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_table_of_the_example_is_its_select(dtype: str) -> None:
    spec, flags = ScaleRows(k=96), (("dtype", dtype),)
    made = plan(spec, 300)
    for num_tokens in range(301):
        wanted = [expected_row(launch) for launch in spec.select(num_tokens, flags)]
        assert found_rows(made.tables[flags], num_tokens) == wanted
        alone = plan_count(spec, num_tokens, flags)
        assert found_rows(alone.tables[flags], 0) == wanted
        assert alone.keys == tuple(key for key, _, _ in wanted)


@pytest.mark.parametrize("num_tokens", [-1, -301, 301, 2**40])
def test_a_count_outside_the_plan_is_refused_by_its_table(num_tokens: int) -> None:
    made = plan(ScaleRows(k=96), 300)
    for table in made.tables.values():
        assert table.resolve(0) != table.resolve(300)
        for ask in (table.resolve, table.launches):
            with pytest.raises(NotPlannedError, match=f"got {num_tokens}, the plan holds 0..300"):
                ask(num_tokens)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_smallest_plans(max_tokens: int) -> None:
    made = plan(ScaleRows(k=96), max_tokens)
    assert len(made.keys) == 2
    for table in made.tables.values():
        assert len(table.index) == max_tokens + 1
        assert table.launches(0)[0][1] == (0, 1, 1)


@pytest.mark.parametrize("max_tokens", [-1, (1 << 24) + 1, 2**63, 8.0, True, "8", None])
def test_a_wrong_largest_count_is_refused(max_tokens: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"max_tokens: got .*, must be an integer from 0"
    ):
        plan(ScaleRows(k=96), max_tokens)


@pytest.mark.parametrize("num_tokens", [-1, (1 << 24) + 1])
def test_one_count_alone_is_refused_where_no_plan_could_hold_it(num_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError, match="num_tokens: got"):
        plan_count(ScaleRows(k=96), num_tokens, (("dtype", "fp16"),))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtyp": ["fp16"]}, r"flags: got 'dtyp', must be among \['dtype'\]"),
        ({"dtype": ["bf16"]}, r"flags\['dtype'\]: got \['bf16'\], must be some of \['fp16', 'fp32"),
        ({"dtype": ["fp16", "bf16"]}, r"flags\['dtype'\]: got"),
        ({"dtype": []}, r"flags\['dtype'\]: got \[\]"),
        ({"dtype": "fp16"}, r"flags\['dtype'\]: got 'fp16'"),
    ],
)
def test_unknown_flags_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(ScaleRows(k=96), 8, flags=flags)


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ({"arena": ("a",)}, r"spec\.flags: got 'arena', must be none of self, tensors, arena"),
        ({"tensors": ("a",)}, r"spec\.flags: got 'tensors'"),
        ({"self": ("a",)}, r"spec\.flags: got 'self'"),
        ({"ids": ()}, r"spec\.flags\['ids'\]: got \(\), must be one value or more"),
        ({"ids": "i32"}, r"spec\.flags\['ids'\]: got 'i32', must be one value or more"),
    ],
)
def test_flags_that_bind_could_not_be_given_are_refused(allowed: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(one(launch_of(), allowed=allowed), 2)


def test_a_plan_says_why_it_cannot_be_copied() -> None:
    made = plan(ScaleRows(k=96), 3)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Plan: cannot be pickled or deep-copied"):
            copying(made)


def test_flags_narrow_the_plan() -> None:
    whole = plan(ScaleRows(k=96), 100)
    half = plan(ScaleRows(k=96), 100, flags={"dtype": ["fp32", "fp32"]})
    assert list(half.tables) == [(("dtype", "fp32"),)]
    assert set(half.keys) == {
        key for key in whole.keys if dict(key.arguments)["x_ptr"] == "*fp32@16"
    }
    assert half.digest != whole.digest


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (launch_of(x_ptr="y"), r"sample_kernel.x_ptr: names 'y', must be one of \['acc', 'x'\]"),
        (launch_of(types={"x_ptr": "*fp16"}), "x_ptr: points to fp16, 'x' holds fp32"),
        (launch_of(types={"acc_ptr": "*i32"}), "acc_ptr: points to i32, 'acc' holds fp32"),
        (launch_of(stride=Stride("y")), "stride: names 'y'"),
        (launch_of(stride=Stride("acc")), "a stride of 'acc', must be of an operand with has_str"),
        (launch_of(eps=1e300), "eps: got 1e.300, must fit fp32"),
        (launch_of(eps=10**400), "eps: got 10.*, must fit fp32"),
        (launch_of(M=2**63), "M: got 9223372036854775808, must fit i64"),
        (launch_of(M=-(2**63) - 1), "M: got -9223372036854775809, must fit i64"),
        (short_launch(2**31), "n: got 2147483648, must fit i32"),
        (short_launch(-(2**31) - 1), "n: got -2147483649, must fit i32"),
    ],
)
def test_a_launch_that_no_call_could_make_is_refused(launch: Launch, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan(one(launch), 2)


def test_a_stride_of_an_operand_whose_rows_are_packed_or_given_once_is_refused() -> None:
    for operand in (replace(X, has_stride=False), Operand("w", "fp32", (8, 8), has_stride=True)):
        given = (replace(X, name="first"), operand)
        launch = launch_of(x_ptr="first", stride=Stride(operand.name))
        with pytest.raises(InvalidArgumentError, match=f"a stride of '{operand.name}', must be of"):
            plan(one(launch, given=given), 2)


def test_an_operand_of_any_alignment_is_refused_where_the_key_needs_16_bytes() -> None:
    given = (replace(X, is_aligned=False),)
    with pytest.raises(
        InvalidArgumentError, match="for 16-byte alignment, 'x' has is_aligned=False"
    ):
        plan(one(launch_of(), given=given), 2)


def test_bytes_may_be_read_as_any_element() -> None:
    spec = one(launch_of(), regions=lambda m: (Region("acc", "u8", (m,)),))
    assert len(plan(spec, 2).keys) == 1


@pytest.mark.parametrize(
    "grid",
    [
        (-1, 1, 1),
        (2**31, 1, 1),
        (1, 65536, 1),
        (1, 1, 65536),
        (1, -1, 1),
        (1, 1),
        (1, 1, 1, 1),
        (1.0, 1, 1),
        (True, 1, 1),
    ],
)
def test_a_grid_that_the_driver_would_refuse_is_refused(grid: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"select\(0\): grid .*, must be three integers"):
        plan(one(launch_of(grid=grid)), 2)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("most", [0, 1, 6, 99])
def test_the_most_tokens_that_grids_have_room_for_are_named(axis: int, most: int) -> None:
    room = (2**31 - 1, 65535, 65535)[axis]

    def chosen(num_tokens: int) -> tuple[Launch, ...]:
        grid = [1, 1, 1]
        grid[axis] = room + num_tokens - most
        return (launch_of(), launch_of(grid=tuple(grid)))

    counts: list[int] = []
    spec = Drawn(lambda m: (counts.append(m), chosen(m))[1])
    assert plan(spec, most).max_tokens == most
    counts.clear()
    grid = re.escape(str(chosen(most + 1)[1].grid))
    message = (
        f"max_tokens: got 100, must be at most {most}: one more takes a grid of {grid} of samp"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        plan(spec, 100)
    # Not one after the other.
    assert len(counts) < 10


def test_too_many_launches_are_refused() -> None:
    most = (launch_of(),) * MAX_LAUNCHES
    assert len(plan(Drawn(lambda m: most), 2).keys) == 1
    with pytest.raises(
        InvalidArgumentError, match=r"select\(1\): 1025 launches, must be at most 1024"
    ):
        plan(Drawn(lambda m: (*most, most[0]) if m == 1 else most), 2)


@pytest.mark.parametrize(
    "regions",
    [
        lambda m: (Region("acc", "fp32", (100 - m,)),),
        lambda m: (Region("acc", "fp32", (100 if m == 3 else 4,)),),
        lambda m: (Region("acc", "fp32", (4,)), *((Region("z", "u8", (1,)),) * (m == 0))),
        lambda m: (Region("acc", "fp32" if m == 5 else "i32", (4,)),),
    ],
)
def test_a_workspace_that_shrinks_or_changes_is_refused(regions: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"workspace\(\d\): "):
        plan(one(launch_of(), regions=regions), 5)


def test_names_that_stand_for_two_tensors_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"an operand and a region .* have one name"):
        plan(one(launch_of(), regions=lambda m: (Region("x", "fp32", (m,)),)), 2)
    with pytest.raises(InvalidArgumentError, match=r"two operands have one name, of \['x', 'x'\]"):
        plan(one(launch_of(), given=(X, X)), 2)


def test_a_spec_whose_tokens_nobody_could_count_is_refused() -> None:
    given = (Operand("x", "fp32", (8,)),)
    with pytest.raises(InvalidArgumentError, match="drawn has no operand of each call"):
        plan(one(launch_of(stride=0), given=given), 2)


def test_two_kernels_of_one_name_are_refused() -> None:
    # Their keys are equal, so that one would run where the other was asked for.
    first, second = _factory(1), _factory(2)
    made = [
        kernel.launch(kernel.key({"x_ptr": "*fp32"}), (1, 1, 1), {"x_ptr": "x"})
        for kernel in (first, second)
    ]
    assert made[0].key == made[1].key
    assert plan(Drawn(lambda m: (made[0],)), 2).kernels
    with pytest.raises(InvalidArgumentError, match=r"two kernels are named .*made_kernel, must"):
        plan(Drawn(lambda m: (made[m % 2],)), 2)


def test_constants_that_python_holds_equal_are_planned_apart() -> None:
    made = plan(Drawn(lambda m: (launch_of((1, True)[m]),)), 1)
    assert [repr(dict(key.constexprs)["B"]) for key in made.keys] == ["1", "True"]
    (table,) = made.tables.values()
    assert [dict(table.resolve(m)[0].key.constexprs)["B"] for m in (0, 1)] == [1, True]
    assert table.resolve(0) != table.resolve(1)


def test_digests_of_equal_plans_and_of_their_sources_are_equal_in_every_process() -> None:
    script = (
        "from examples.scale_rows.scale_rows import SCALE, ScaleRows\n"
        "from firesteel.launch import plan\n"
        "made = plan(ScaleRows(k=96), 100)\n"
        "print(SCALE.source_digest, made.digest, made, sep='\\n')"
    )
    # One of another environment and another order of sets than here.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    made = plan(ScaleRows(k=96), 100)
    assert done.stdout == f"{SCALE.source_digest}\n{made.digest}\n{made}\n"


def test_plans_that_differ_anywhere_have_other_digests() -> None:
    specs = {
        "as it is": one(launch_of()),
        "key": one(launch_of(32)),
        "class of a constant": one(launch_of(True)),
        "constant": one(launch_of(1)),
        "grid": one(launch_of(grid=(2, 1, 1))),
        "integer": one(launch_of(M=7)),
        "source of an integer": one(launch_of(stride=5)),
        "pointer": one(launch_of(x_ptr="acc")),
        "launches": Drawn(lambda m: (launch_of(), launch_of())),
        "one count": Drawn(lambda m: (launch_of(M=7 * (m == 2)),)),
        "region": one(launch_of(), regions=lambda m: (Region("acc", "fp32", (m + 99,)),)),
        "operand": one(launch_of(), given=(replace(X, shape=(NUM_TOKENS, 16)),)),
    }
    digests = {name: plan(spec, 2).digest for name, spec in specs.items()}
    digests["count"] = plan(one(launch_of()), 3).digest
    assert len(set(digests.values())) == len(digests), digests


def test_a_plan_prints_as_a_table_and_as_json() -> None:
    made = plan(ScaleRows(k=96), 100)
    first, *rows, last = str(made).splitlines()
    assert first == "scale rows of 96: 4 keys for 0..100 tokens"
    assert [row.split()[:2] for row in rows] == [
        ["0", "1-63"],
        ["1", "64-100"],
        ["2", "1-63"],
        ["3", "64-100"],
    ]
    assert last == f"workspace 0 bytes, digest {made.digest[:16]}"
    found = json.loads(json.dumps(made.as_dict()))
    assert [
        LaunchKey.from_dict({k: v for k, v in key.items() if k != "tokens"})
        for key in found["keys"]
    ] == list(made.keys)
    # No tokens are an empty grid, which launches nothing.
    assert [key["tokens"] for key in found["keys"][:2]] == [[[1, 63]], [[64, 100]]]
    assert found["flags"] == [{"dtype": "fp16"}, {"dtype": "fp32"}]
    assert found["spec"] == {"k": 96}
    assert found["digest"] == made.digest
