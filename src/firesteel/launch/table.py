"""`plan`: enumerates `select` over every token count and flag, into tables that `run` indexes.

One table a combination of flags. It holds the distinct sequences of launches, and for each token
count one row of integers: which sequence, then the grid and the integer arguments of each launch.
`run` reads the row and launches; it has nothing to decide.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from firesteel.errors import InvalidArgumentError, NotPlannedError
from firesteel.launch.kernel import Kernel, Launch, Stride
from firesteel.launch.key import LaunchKey
from firesteel.launch.spec import MAX_GRID, Flags, Operand, Spec, all_flags, check_grids
from firesteel.launch.workspace import Workspace

__all__ = [
    "MAX_LAUNCHES",
    "Plan",
    "RowInteger",
    "Step",
    "Table",
    "check_count",
    "plan",
    "plan_count",
]

MAX_LAUNCHES = 1024
"""Most launches of one call; a launcher holds room for so many."""

_MAX_TOKENS = 1 << 24
# `bind` takes flags as keywords beside these.
_TAKEN = ("self", "tensors", "arena")


@dataclass(frozen=True, slots=True)
class RowInteger:
    """An integer argument that stands in the token count's row, at this place of the launch's."""

    place: int


@dataclass(frozen=True, slots=True)
class Step:
    """A launch without what changes from count to count: its key, and where arguments come from."""

    key: LaunchKey
    arguments: tuple[str | RowInteger | Stride, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The launches of every token count, for one combination of flags.

    Fields
        flags      the combination
        sequences  the distinct sequences of launches
        index      [max_tokens + 1] int32: where a count's row starts
        rows       int64: sequence, then for each launch grid x, y, z and its integer arguments
        operands   the caller's tensors under these flags, as the spec had them
    """

    flags: Flags
    sequences: tuple[tuple[Step, ...], ...]
    index: array[int]
    rows: array[int]
    operands: tuple[Operand, ...] = ()

    def resolve(self, num_tokens: int) -> tuple[Step, ...]:
        """The launches of a count.

        Raises
            NotPlannedError: the count is outside the plan.
        """
        return self.sequences[self.rows[self._start(num_tokens)]]

    def launches(self, num_tokens: int) -> list[tuple[Step, tuple[int, int, int], tuple[int, ...]]]:
        """Step, grid and integers of each launch, as a launcher reads them from the row.

        Raises
            NotPlannedError: the count is outside the plan.
        """
        at = self._start(num_tokens) + 1
        found: list[tuple[Step, tuple[int, int, int], tuple[int, ...]]] = []
        for step in self.resolve(num_tokens):
            count = sum(isinstance(argument, RowInteger) for argument in step.arguments)
            x, y, z = self.rows[at : at + 3]
            found.append((step, (x, y, z), tuple(self.rows[at + 3 : at + 3 + count])))
            at += 3 + count
        return found

    def used(self, num_tokens: int) -> Counter[LaunchKey]:
        """How often a call of a count launches each key; empty grids are left out.

        Raises
            NotPlannedError: the count is outside the plan.
        """
        return Counter(step.key for step, grid, _ in self.launches(num_tokens) if all(grid))

    def _start(self, num_tokens: int) -> int:
        if not 0 <= num_tokens < len(self.index):
            raise NotPlannedError(
                f"num_tokens: got {num_tokens}, the plan holds 0..{len(self.index) - 1}"
            )
        return self.index[num_tokens]


@dataclass(frozen=True, eq=False)
class Plan:
    """Every launch that an operation can make, from 0 to `max_tokens` tokens.

    Fields
        spec        what was planned
        max_tokens  largest token count
        keys        the distinct keys, in the order in which they are first needed
        tables      by combination of flags
        workspace   regions and their places at `max_tokens`
        kernels     by name, for those that the keys name
        digest      SHA-256 of all of it; equal plans have equal digests on every machine
    """

    spec: Spec
    max_tokens: int
    keys: tuple[LaunchKey, ...]
    tables: Mapping[Flags, Table]
    workspace: Workspace
    kernels: Mapping[str, Kernel]
    digest: str = field(repr=False)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Plan: cannot be pickled or deep-copied, since its kernels belong to this process; "
            "send the spec and plan again: equal plans have equal digests"
        )

    def used(self, num_tokens: int) -> Counter[LaunchKey]:
        """How often a call of a count launches each key, empty grids left out.

        Of several combinations of flags, a key counts as under that which launches it most.

        Raises
            NotPlannedError: the count is outside the plan.
        """
        found: Counter[LaunchKey] = Counter()
        for table in self.tables.values():
            found |= table.used(num_tokens)
        return found

    def ranges(self) -> dict[LaunchKey, list[tuple[int, int]]]:
        """The token ranges, ends included, in which a call launches each key under any flags."""
        found: dict[LaunchKey, list[tuple[int, int]]] = {}
        for key, spans in self.launch_ranges().items():
            merged = found[key] = []
            for first, last, _ in spans:
                if merged and merged[-1][1] == first - 1:
                    first, _ = merged.pop()
                merged.append((first, last))
        return found

    def launch_ranges(self) -> dict[LaunchKey, list[tuple[int, int, int]]]:
        """As `ranges`, with how often a call launches the key; ranges of one number are whole."""
        found: dict[LaunchKey, list[tuple[int, int, int]]] = {key: [] for key in self.keys}
        for num_tokens in range(self.max_tokens + 1):
            for key, launches in self.used(num_tokens).items():
                spans = found[key]
                first = num_tokens
                if spans and spans[-1][1:] == (num_tokens - 1, launches):
                    first = spans.pop()[0]
                spans.append((first, num_tokens, launches))
        return found

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON: keys with their token ranges, workspace, digest.

        A range is [first, last], or [first, last, launches] of a key that a call launches more than
        once.
        """
        ranges = {
            key: [span if span[2] > 1 else span[:2] for span in spans]
            for key, spans in self.launch_ranges().items()
        }
        return {
            "title": self.spec.title,
            "spec": self.spec.as_dict(),
            "max_tokens": self.max_tokens,
            "flags": [dict(flags) for flags in self.tables],
            "keys": [{**key.as_dict(), "tokens": ranges[key]} for key in self.keys],
            "workspace": self.workspace.as_dict(),
            "digest": self.digest,
        }

    def __str__(self) -> str:
        """A table of the keys and of the token counts that use them."""
        ranges = self.ranges()
        lines = [f"{self.spec.title}: {len(self.keys)} keys for 0..{self.max_tokens} tokens"]
        for number, key in enumerate(self.keys):
            lines.append(f"{number:3d}  {_spans(ranges[key])}  {key}")
        lines.append(f"workspace {self.workspace.num_bytes} bytes, digest {self.digest[:16]}")
        return "\n".join(lines)


def plan(spec: Spec, max_tokens: int, *, flags: Mapping[str, Sequence[str]] | None = None) -> Plan:
    """Enumerate `spec.select` over 0..max_tokens and every value of every flag. Needs no GPU.

    Args:
        spec: the operation.
        max_tokens: largest token count of a call.
        flags: plan only these values of these flags; the others in full.

    Raises
        InvalidArgumentError: `max_tokens` or a flag is not allowed, a call would need more programs
            than a grid has, or the spec breaks its contract: launches name no tensor, or the
            workspace of a smaller count is larger.
    """
    check_count("max_tokens", max_tokens, least=0, most=_MAX_TOKENS)
    allowed = _narrowed(spec, flags or {})
    workspace = Workspace.of(spec.workspace(max_tokens))
    keys: dict[LaunchKey, None] = {}
    kernels: dict[str, Kernel] = {}
    tables: dict[Flags, Table] = {}
    for values in all_flags(allowed):
        builder = _Builder(spec, values, workspace)
        check_grids(spec, max_tokens, values)
        for num_tokens in range(max_tokens + 1):
            for launch in builder.add(num_tokens):
                keys.setdefault(launch.key)
                _keep_kernel(kernels, launch)
        tables[values] = builder.table()
    for num_tokens in range(max_tokens + 1):
        workspace.check_holds(num_tokens, spec.workspace(num_tokens))
    digest = _digest(keys, tables, workspace)
    return Plan(spec, max_tokens, tuple(keys), tables, workspace, kernels, digest)


def check_count(name: str, value: object, *, least: int, most: int) -> None:
    """Refuse what is no integer from `least` to `most`.

    Raises
        InvalidArgumentError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgumentError(
            f"{name}: got {value!r}, must be an integer from {least} to {most}"
        )


def plan_count(spec: Spec, num_tokens: int, flags: Flags) -> Plan:
    """The launches of one token count alone; its row stands where a plan has that of 0 tokens.

    Raises
        InvalidArgumentError: as `plan` does.
    """
    check_count("num_tokens", num_tokens, least=0, most=_MAX_TOKENS)
    workspace = Workspace.of(spec.workspace(num_tokens))
    builder = _Builder(spec, flags, workspace)
    keys: dict[LaunchKey, None] = {}
    kernels: dict[str, Kernel] = {}
    for launch in builder.add(num_tokens):
        keys.setdefault(launch.key)
        _keep_kernel(kernels, launch)
    tables = {flags: builder.table()}
    digest = _digest(keys, tables, workspace)
    return Plan(spec, 0, tuple(keys), tables, workspace, kernels, digest)


def _keep_kernel(kernels: dict[str, Kernel], launch: Launch) -> None:
    known = kernels.setdefault(launch.key.kernel, launch.kernel)
    # Functions that one factory makes have one name, and their keys could not be told apart.
    if known is not launch.kernel and known.function is not launch.kernel.function:
        raise InvalidArgumentError(
            f"select: two kernels are named {launch.key.kernel}, must have names of their own"
        )


def _narrowed(spec: Spec, flags: Mapping[str, Sequence[str]]) -> Mapping[str, tuple[str, ...]]:
    allowed = dict(spec.flags())
    for name, values in allowed.items():
        if name in _TAKEN:
            raise InvalidArgumentError(
                f"spec.flags: got {name!r}, must be none of {', '.join(_TAKEN)}, which bind takes"
            )
        if not values or isinstance(values, str):
            raise InvalidArgumentError(
                f"spec.flags[{name!r}]: got {values!r}, must be one value or more"
            )
    for name, values in flags.items():
        if name not in allowed:
            raise InvalidArgumentError(
                f"flags: got {name!r}, must be among {sorted(allowed) or 'none'}"
            )
        if not values or isinstance(values, str) or not set(values) <= set(allowed[name]):
            raise InvalidArgumentError(
                f"flags[{name!r}]: got {values!r}, must be some of {list(allowed[name])}"
            )
        allowed[name] = tuple(dict.fromkeys(values))
    return allowed


class _Builder:
    """Collects the table of one combination of flags."""

    def __init__(self, spec: Spec, flags: Flags, workspace: Workspace) -> None:
        self._spec = spec
        self._flags = flags
        operands = spec.operands(flags)
        self._operands = {operand.name: operand for operand in operands}
        if len(self._operands) != len(operands):
            raise InvalidArgumentError(
                f"spec: two operands have one name, of {[operand.name for operand in operands]}"
            )
        if not any(operand.is_per_call for operand in self._operands.values()):
            raise InvalidArgumentError(
                f"spec: {spec.title} has no operand of each call, whose rows would be counted"
            )
        self._names = {**self._operands, **workspace.regions}
        if len(self._names) != len(self._operands) + len(workspace.regions):
            raise InvalidArgumentError(
                "spec: an operand and a region of the workspace have one name, of "
                f"{sorted(self._operands)} and {sorted(workspace.regions)}"
            )
        self._all_operands = tuple(operands)
        self._steps: dict[Step, int] = {}
        # By the identity of kernel and key, which the launch keeps alive, and by the tensors.
        self._known: dict[tuple[int, int, tuple[object, ...]], tuple[int, Launch]] = {}
        self._sequences: dict[tuple[int, ...], int] = {}
        self._index = array("i")
        self._rows = array("q")

    def add(self, num_tokens: int) -> list[Launch]:
        """Append the row of the next count; returns those launches whose step is a new one."""
        launches = self._spec.select(num_tokens, self._flags)
        if len(launches) > MAX_LAUNCHES:
            raise InvalidArgumentError(
                f"select({num_tokens}): {len(launches)} launches, must be at most {MAX_LAUNCHES}"
            )
        steps: list[int] = []
        row: list[int] = []
        new: list[Launch] = []
        for launch in launches:
            if not _is_grid(launch.grid):
                raise InvalidArgumentError(
                    f"select({num_tokens}): grid {launch.grid} of {launch.key.name}, "
                    f"must be three integers from 0 to {', '.join(map(str, MAX_GRID))}"
                )
            row += launch.grid
            tensors = self._add_integers(launch, row)
            known = self._known.get(place := (id(launch.kernel), id(launch.key), tensors))
            if known is None:
                step = self._step(launch)
                known = (self._steps.setdefault(step, len(self._steps)), launch)
                self._known[place] = known
                new.append(launch)
            steps.append(known[0])
        sequence = self._sequences.setdefault(tuple(steps), len(self._sequences))
        self._index.append(len(self._rows))
        self._rows.append(sequence)
        self._rows.extend(row)
        return new

    def _add_integers(self, launch: Launch, row: list[int]) -> tuple[str | Stride | None, ...]:
        """Append a launch's integers to the row; returns its other arguments, None for each."""
        tensors: list[str | Stride | None] = []
        for place, value in enumerate(launch.arguments):
            if isinstance(value, int | float):
                name, kind = launch.key.arguments[place]
                # Nearly all are small integers of 64 bits.
                if kind != "i64" or type(value) is not int or value.bit_length() > 63:
                    value = _bits(f"{launch.key.name}.{name}", kind, value)
                row.append(value)
                tensors.append(None)
            else:
                tensors.append(value)
        return tuple(tensors)

    def _step(self, launch: Launch) -> Step:
        arguments: list[str | RowInteger | Stride] = []
        place = 0
        for (name, kind), value in zip(launch.key.arguments, launch.arguments, strict=True):
            if isinstance(value, int | float):
                arguments.append(RowInteger(place))
                place += 1
                continue
            self._check(launch, name, kind, value)
            arguments.append(value)
        return Step(launch.key, tuple(arguments))

    def _check(self, launch: Launch, name: str, kind: str, value: str | Stride) -> None:
        """Refuse an argument whose tensor is none, or not what the key was compiled for."""
        where = f"{launch.key.name}.{name}"
        tensor = value.tensor if isinstance(value, Stride) else value
        found = self._names.get(tensor)
        if found is None:
            raise InvalidArgumentError(
                f"{where}: names {tensor!r}, must be one of {sorted(self._names)}"
            )
        if isinstance(value, Stride):
            operand = self._operands.get(tensor)
            if operand is None or not operand.is_per_call or not operand.has_stride:
                raise InvalidArgumentError(
                    f"{where}: a stride of {tensor!r}, must be of an operand with has_stride "
                    "that each call passes"
                )
            return
        # uint8 storage may be read as any element; bytes are what the caller keeps packed.
        element, _, aligned = kind.removeprefix("*").partition("@")
        if found.dtype not in (element, "u8"):
            raise InvalidArgumentError(
                f"{where}: points to {element}, {tensor!r} holds {found.dtype}"
            )
        operand = self._operands.get(tensor)
        if aligned and operand is not None and not operand.is_aligned:
            raise InvalidArgumentError(
                f"{where}: compiled for 16-byte alignment, {tensor!r} has is_aligned=False"
            )

    def table(self) -> Table:
        steps = tuple(self._steps)
        sequences = tuple(tuple(steps[number] for number in numbers) for numbers in self._sequences)
        return Table(self._flags, sequences, self._index, self._rows, self._all_operands)


def _is_grid(grid: tuple[object, ...]) -> bool:
    # A plan asks this of each launch at each count.
    if len(grid) != 3:
        return False
    for size, most in zip(grid, MAX_GRID, strict=True):
        if type(size) is not int or not 0 <= size <= most:
            return False
    return True


def _bits(where: str, kind: str, value: float) -> int:
    """A number as the integer whose low bytes are the parameter."""
    if kind == "fp32":
        try:
            return struct.unpack("<i", struct.pack("<f", float(value)))[0]
        except OverflowError as error:
            raise InvalidArgumentError(f"{where}: got {value!r}, must fit fp32") from error
    limit = 1 << (31 if kind == "i32" else 63)
    if not isinstance(value, int) or not -limit <= value < limit:
        raise InvalidArgumentError(f"{where}: got {value!r}, must fit {kind}")
    return value


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _digest(
    keys: Mapping[LaunchKey, None],
    tables: Mapping[Flags, Table],
    workspace: Workspace,
) -> str:
    digest = hashlib.sha256()
    # Nothing is sorted: the order of arguments is part of a key.
    listed = [key.as_dict() for key in keys]
    numbers = {key: number for number, key in enumerate(keys)}
    digest.update(json.dumps([listed, workspace.as_dict()]).encode())
    for flags, table in tables.items():
        steps = [[(numbers[s.key], repr(s.arguments)) for s in seq] for seq in table.sequences]
        operands = [repr(operand) for operand in table.operands]
        digest.update(json.dumps([flags, operands, steps]).encode())
        # Bytes of a fixed order, for machines of either.
        for values in (table.index, table.rows):
            digest.update(json.dumps(values.tolist()).encode())
    return digest.hexdigest()
