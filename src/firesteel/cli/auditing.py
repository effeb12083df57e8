"""`firesteel audit`: token counts replayed through a plan, against what a warm-up compiled.

What another library launches is audited from two JSON files that it wrote, not from a Python file
of its own: the command runs nobody's code, works for programs that log their keys and cannot be
imported, and both files can be kept beside the result. `firesteel plan --json` prints the same
form, so a plan of today can be audited against the keys of yesterday's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, cast

from rich.console import Group
from rich.table import Table

from firesteel.cli.console import print_json, stdout, table
from firesteel.cli.keys import key_cells
from firesteel.cli.planning import PlanChoice, make_plans, make_specs
from firesteel.errors import InvalidArgumentError
from firesteel.launch import LaunchKey, Plan, Replay
from firesteel.launch.audit import replay_keys

__all__ = ["AuditRequest", "Usage", "read_traffic", "read_usage", "run"]

_COMMENT = "#"
_MAX_DIGITS = 18
# Of one key in one call.
_MAX_LAUNCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """What to audit.

    Fields
        choice     the plan of a model or checkpoint; or
        plan_file  JSON: {"max_tokens": N, "keys": [{..., "tokens": [[first, last], ...]}, ...]}; a
                   range of which each call launches the key more than once has the number last
        traffic    files of token counts
        prewarmed  JSON list of keys that a warm-up compiled; the plan's own by default
    """

    choice: PlanChoice
    traffic: tuple[Path, ...]
    plan_file: Path | None = None
    prewarmed: Path | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Which keys a call of each token count launches.

    Fields
        title       of what
        max_tokens  where it ends
        keys        all that any call launches
        used        the keys of a call, each as often as it is launched
    """

    title: str
    max_tokens: int
    keys: tuple[LaunchKey, ...]
    used: Callable[[int], Iterable[LaunchKey]]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Usage:
        """Of a layer of each kind, and of all types of ids, since traffic does not say which."""
        keys = dict.fromkeys(key for made in plans for key in made.keys)
        title = ", ".join(made.spec.title for made in plans)

        def used(num_tokens: int) -> Iterator[LaunchKey]:
            for made in plans:
                yield from made.used(num_tokens).elements()

        return cls(title, plans[0].max_tokens, tuple(keys), used)


def run(request: AuditRequest, *, as_json: bool) -> bool:
    """Print what the traffic reaches; whether every launch was prewarmed and every count planned.

    Raises
        InvalidArgumentError: not exactly one plan is given, or a file is not what it must be.
        UnsupportedError, CheckpointError: as `firesteel plan`.
    """
    counts = [count for path in request.traffic for count in read_traffic(path)]
    usage = _usage(request)
    prewarmed = None if request.prewarmed is None else _read_keys(request.prewarmed)
    keys = usage.keys if prewarmed is None else prewarmed
    found = replay_keys(usage.used, usage.max_tokens, counts, prewarmed=keys)
    passed = not found.misses and not found.too_long
    if as_json:
        print_json(_as_dict(usage, found, counts, passed))
    else:
        stdout().print(_tables(usage, found, counts))
    return passed


def _usage(request: AuditRequest) -> Usage:
    if request.plan_file is None:
        return Usage.of(make_plans(request.choice, make_specs(request.choice)))
    if request.choice != PlanChoice():
        raise InvalidArgumentError(
            f"--plan: got {request.plan_file} beside other options that choose a plan, must be "
            "alone: the file says all"
        )
    return read_usage(request.plan_file)


def read_traffic(path: Path) -> list[int]:
    """The token counts in a file: a JSON list, or one a line with `#` before comments.

    Raises
        InvalidArgumentError: the file cannot be read, holds no count, or a line is none.
    """
    text = _read(path)
    if text.lstrip().startswith("["):
        values = _parse(path, text)
        for place, value in enumerate(values):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgumentError(
                    f"{path}: entry {place} is {value!r}, must be a token count, an integer from 0"
                )
    else:
        values = list(_lines(path, text))
    if not values:
        raise InvalidArgumentError(f"{path}: holds no token count, must hold at least one")
    return values


def _lines(path: Path, text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition(_COMMENT)[0].strip()
        if not word:
            continue
        if not (word.isascii() and word.isdecimal()) or len(word) > _MAX_DIGITS:
            raise InvalidArgumentError(
                f"{path}:{number}: got {word!r}, must be a token count, an integer from 0"
            )
        yield int(word)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path}: cannot be read: {error}") from error


def _parse(path: Path, text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        # The decoder's message ends in line and column.
        raise InvalidArgumentError(f"{path}: not JSON: {error}") from error


def _read_keys(path: Path) -> list[LaunchKey]:
    value = _parse(path, _read(path))
    if not isinstance(value, list):
        raise InvalidArgumentError(f"{path}: got {type(value).__name__}, must be a list of keys")
    entries = cast(list[Any], value)
    return [_key(path, number, entry) for number, entry in enumerate(entries)]


def _key(path: Path, number: int, entry: object) -> LaunchKey:
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{path}: key {number} is {entry!r}, must be an object")
    fields = cast(dict[str, Any], entry)
    try:
        key = LaunchKey.from_dict({name: v for name, v in fields.items() if name != "tokens"})
        hash(key)
    except (InvalidArgumentError, TypeError) as error:
        raise InvalidArgumentError(f"{path}: key {number}: {error}") from error
    return key


def read_usage(path: Path) -> Usage:
    """A plan in a file: an object with max_tokens and keys, as `firesteel plan --json` prints it.

    Raises
        InvalidArgumentError: the file cannot be read, or is no such object.
    """
    value = _parse(path, _read(path))
    if not isinstance(value, dict) or not {"max_tokens", "keys"} <= set(cast(Any, value)):
        raise InvalidArgumentError(f"{path}: must be an object with max_tokens and keys")
    fields = cast(dict[str, Any], value)
    max_tokens, entries = fields["max_tokens"], fields["keys"]
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0:
        raise InvalidArgumentError(f"{path}: max_tokens is {max_tokens!r}, must be an integer")
    if not isinstance(entries, list):
        raise InvalidArgumentError(f"{path}: keys is {entries!r}, must be a list")
    keys: dict[LaunchKey, list[tuple[int, int, int]]] = {}
    for number, entry in enumerate(cast(list[Any], entries)):
        key = _key(path, number, entry)
        keys.setdefault(key, []).extend(_spans(path, number, entry.get("tokens"), max_tokens))

    def used(num_tokens: int) -> Iterator[LaunchKey]:
        for key, spans in keys.items():
            launches = [n for first, last, n in spans if first <= num_tokens <= last]
            yield from repeat(key, max(launches, default=0))

    return Usage(str(fields.get("title", path)), max_tokens, tuple(keys), used)


def _spans(path: Path, number: int, value: object, max_tokens: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for span in cast(list[Any], value) if isinstance(value, list) else [None]:
        match span:
            case [int(first), int(last)] if 0 <= first <= last <= max_tokens:
                found.append((first, last, 1))
            case [int(first), int(last), int(launches)] if (
                0 <= first <= last <= max_tokens and 1 <= launches <= _MAX_LAUNCHES
            ):
                found.append((first, last, launches))
            case _:
                raise InvalidArgumentError(
                    f"{path}: key {number}: tokens is {value!r}, must be a list of [first, last] "
                    f"within 0..{max_tokens}, with the launches of a call behind where it makes "
                    f"more than one, up to {_MAX_LAUNCHES}"
                )
    return found


def _numbers(keys: Sequence[LaunchKey], chosen: Sequence[LaunchKey]) -> list[int]:
    places = {key: number for number, key in enumerate(keys)}
    return [places[key] for key in chosen]


def _as_dict(usage: Usage, found: Replay, counts: Sequence[int], passed: bool) -> dict[str, Any]:
    return {
        "title": usage.title,
        "max_tokens": usage.max_tokens,
        "planned": len(usage.keys),
        "calls": len(counts),
        "passed": passed,
        **found.as_dict(),
        "never_reached_numbers": _numbers(found.prewarmed, found.never_reached),
    }


def _tables(usage: Usage, found: Replay, counts: Sequence[int]) -> Group:
    head = table("", "")
    head.show_header = False
    planned = _count(len(usage.keys), "key")
    head.add_row("plan", f"{usage.title}, 0..{usage.max_tokens} tokens, {planned}")
    distinct = _count(len(set(counts)), "token count")
    head.add_row("traffic", f"{_count(len(counts), 'call')} of {distinct}")
    head.add_row("prewarmed", _count(len(found.prewarmed), "key"))
    head.add_row("reached", _count(len(found.reached), "key"))
    never = _numbers(found.prewarmed, found.never_reached)
    listed = f": {', '.join(map(str, never))}" if never else ""
    head.add_row("never reached", _count(len(never), "key") + listed)
    missed = sum(found.launches[miss.key] for miss in found.misses if miss.key is not None)
    missing = _count(len(found.misses), "key")
    head.add_row("misses", f"{missing}, {_count(missed, 'launch', 'launches')}")
    calls = Counter(counts)
    beyond = [f"{count} ({_count(calls[count], 'call')})" for count in found.too_long]
    head.add_row("beyond the plan", ", ".join(beyond) or "none")
    parts: list[Table | str] = [head, "", _key_table(found)]
    if found.misses:
        parts += ["", _miss_table(found)]
    return Group(*parts)


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def _key_table(found: Replay) -> Table:
    made = table("key>", "kernel", "what sets it apart", "launches>", "")
    cells = key_cells(found.prewarmed)
    for number, (key, (kernel, apart, _, _)) in enumerate(zip(found.prewarmed, cells, strict=True)):
        launches = found.launches[key]
        note = "" if launches else "never reached"
        made.add_row(str(number), kernel, apart, str(launches), note)
    return made


def _miss_table(found: Replay) -> Table:
    made = table(
        "first at>", "kernel", "launches>", "not prewarmed: differs from the nearest key in"
    )
    for miss in found.misses:
        assert miss.key is not None
        nearest = "no key was prewarmed" if miss.nearest is None else "; ".join(miss.differences)
        made.add_row(miss.asked, miss.key.name, str(found.launches[miss.key]), nearest)
    return made
