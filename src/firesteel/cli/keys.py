"""How commands print launch keys: what sets each apart, and the token counts that use it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from firesteel.launch import LaunchKey
from firesteel.launch.key import DTYPES, Constexpr

__all__ = ["distinctions", "key_cells", "spans"]

_MAX_SPANS = 4


def key_cells(keys: Sequence[LaunchKey]) -> list[tuple[str, str, str, str]]:
    """Kernel, what sets it apart, warps and stages of each key."""
    return [
        (key.name, apart, str(key.num_warps), str(_num_stages(key)))
        for key, apart in zip(keys, distinctions(keys), strict=True)
    ]


def _num_stages(key: LaunchKey) -> Constexpr:
    """Those of its loop: kernels in Gluon are given theirs as a constant."""
    return dict(key.constexprs).get("STAGES", key.num_stages)


def spans(found: Sequence[tuple[int, int]]) -> str:
    """`1-4, 33-64`; of many, the first ones and how many more."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in found]
    more = len(words) - _MAX_SPANS
    return ", ".join(words if more <= 0 else [*words[:_MAX_SPANS], f"and {more} more"])


def distinctions(keys: Sequence[LaunchKey]) -> list[str]:
    """In a few words, how each key differs from the others of its kernel.

    How a MoE kernel finds its rows and which ids it reads, the constants that vary, and of the
    other fields those without which two keys would read alike. A field that is true is its name,
    one that is false is left out.
    """
    return [_apart(key, [k for k in keys if k.kernel == key.kernel]) for key in keys]


def _apart(key: LaunchKey, family: Sequence[LaunchKey]) -> str:
    if len(family) == 1:
        return ""
    fields = {other: _fields(other) for other in family}
    names = dict.fromkeys(name for found in fields.values() for name in found)
    columns: dict[str, list[Hashable]] = {
        name: [fields[other].get(name) for other in family] for name in names
    }
    shown: list[str] = []
    for is_shown in _STAGES:
        for name, column in columns.items():
            varies = len(set(column)) > 1
            if varies and name not in shown and is_shown(name, column, [columns[s] for s in shown]):
                shown.append(name)
    words = [_word(name, fields[key].get(name)) for name in shown]
    return ", ".join(word for word in words if word)


def _fields(key: LaunchKey) -> dict[str, Hashable]:
    """Every field by name; those that are absent, or None, are left out.

    Kernels in Gluon have their warps and stages as constants too: those are left out.
    """
    twice = ("WARPS", "STAGES")
    return {
        **dict(key.arguments),
        **{n: value for n, value in key.constexprs if value is not None and n not in twice},
        **{name: getattr(key, name) for name in ("num_warps", "pdl", "cooperative")},
        "max_registers": key.max_registers or None,
        "num_stages": _num_stages(key),
    }


def _is_known(name: str, column: list[Hashable], shown: list[list[Hashable]]) -> bool:
    del column, shown
    return name in ("route_ids_ptr", "topk_ids_ptr")


def _is_constant(name: str, column: list[Hashable], shown: list[list[Hashable]]) -> bool:
    del shown
    return name.isupper() and None not in column


def _parts_more(name: str, column: list[Hashable], shown: list[list[Hashable]]) -> bool:
    del name
    before = set(zip(*shown, strict=True))
    after = set(zip(*shown, column, strict=True))
    return len(after) > max(1, len(before))


_STAGES: tuple[Callable[[str, list[Hashable], list[list[Hashable]]], bool], ...] = (
    _is_known,
    _is_constant,
    _parts_more,
)


def _word(name: str, value: Hashable) -> str:
    if name == "route_ids_ptr":
        return "direct" if value is None else "packed"
    if name == "topk_ids_ptr":
        element = str(value).removeprefix("*").partition("@")[0]
        return f"int{8 * DTYPES[element].itemsize} ids" if value is not None else ""
    if isinstance(value, bool):
        return name if value else ""
    return f"{name} {'absent' if value is None else value}"
