"""`firesteel inspect`: what a checkpoint holds, read from its headers. Needs no host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group

from firesteel.checkpoint.families import ANY_EXPERT_TENSOR
from firesteel.checkpoint.files import Checkpoint, resolve
from firesteel.checkpoint.layers import Contents, ExpertLayer, scan
from firesteel.checkpoint.sources import QuantizedSource, StoredBias
from firesteel.cli.console import format_bytes, print_json, stdout, table
from firesteel.errors import CheckpointError
from firesteel.formats.base import Scheme
from firesteel.formats.packed import packed_bytes
from firesteel.formats.registry import format_named
from firesteel.formats.stored import dtype_name

__all__ = ["run", "summarize"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PARTS = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class _Storage:
    """How matrices are stored, whatever their shape. A scheme without n and k."""

    format: str
    title: str
    element: str
    bits: float
    group_size: int | None
    has_zero_points: bool
    has_group_index: bool
    scale: str | None
    global_scale: str
    layout: str

    @classmethod
    def of(cls, scheme: Scheme, groups: Set[int]) -> _Storage:
        """`groups` are sizes that some matrix has less than a row of: 128 in rows of 128 is one."""
        is_row = scheme.group_size == scheme.k and scheme.group_size not in groups
        return cls(
            format=scheme.format,
            title=format_named(scheme.format).title,
            element=scheme.element,
            bits=scheme.bits_a_weight,
            group_size=None if is_row else scheme.group_size,
            has_zero_points=scheme.has_zero_points,
            has_group_index=scheme.has_group_index,
            scale=scheme.scale,
            global_scale=scheme.global_scale,
            layout=scheme.layout,
        )

    @classmethod
    def plain(cls, dtype: str, bits: float) -> _Storage:
        return cls("plain", "not quantised", dtype, bits, None, False, False, None, "none", "")


@dataclass(slots=True)
class _Tally:
    """Matrices of one storage."""

    layers: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)
    num_matrices: int = 0
    packed_bytes: int = 0
    bf16_bytes: int = 0


def run(checkpoint: str, *, as_json: bool) -> None:
    """Print what the checkpoint holds.

    Raises
        FiresteelError: it cannot be read or is not supported.
    """
    summary = summarize(scan(Checkpoint.open(resolve(checkpoint))))
    if as_json:
        print_json(summary)
    else:
        stdout().print(_tables(summary))


def summarize(contents: Contents) -> dict[str, Any]:
    """All numbers of `firesteel inspect`, for JSON.

    Layers at or beyond `num_hidden_layers` (multi-token prediction) count under "ignored" only.

    Raises
        CheckpointError: the config does not give num_hidden_layers.
    """
    checkpoint, geometry = contents.checkpoint, contents.geometry
    num_layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or num_layers < 1:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {num_layers!r}, must be a positive integer"
        )
    beyond = {name for name in checkpoint.headers if (_layer_of(name) or 0) >= num_layers}
    expert_layers = [layer for layer in contents.experts if layer.layer < num_layers]
    dense = [s for s in contents.dense if not beyond.intersection(s.tensors.values())]
    groups = _group_sizes(expert_layers, dense)
    experts = _tally_experts(contents, expert_layers, groups)
    linears = _tally_linears(dense, groups)
    claimed = {name for t in (*experts.values(), *linears.values()) for name in t.tensors}
    plain = set(checkpoint.headers) - claimed - beyond
    files = sorted(set(checkpoint.files.values()))
    return {
        "path": str(checkpoint.path),
        "family": contents.family.title,
        "model_type": contents.family.model_type,
        "quant_method": checkpoint.quantization.get("quant_method"),
        "num_layers": num_layers,
        "expert_layers": len(expert_layers),
        "experts_per_layer": geometry.num_experts,
        "experts_per_token": checkpoint.config.get("num_experts_per_tok"),
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "experts": _entries(checkpoint, experts),
        "linears": _entries(checkpoint, linears),
        "plain": {"tensors": len(plain), "file_bytes": _file_bytes(checkpoint, plain)},
        "ignored": {
            "layers": sorted(
                {number for name in beyond if (number := _layer_of(name)) is not None}
            ),
            "tensors": len(beyond),
            "file_bytes": _file_bytes(checkpoint, beyond),
        },
        "files": files,
        "file_bytes": sum((checkpoint.path / name).stat().st_size for name in files),
    }


def _layer_of(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def _file_bytes(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    return sum(checkpoint.headers[name].num_bytes for name in names)


def _group_sizes(layers: Iterable[ExpertLayer], dense: Iterable[QuantizedSource]) -> set[int]:
    schemes = [layer.scheme(part) for layer in layers if layer.is_packed for part in range(3)]
    schemes.extend(source.scheme for source in dense)
    return {scheme.group_size for scheme in schemes if scheme.group_size != scheme.k}


def _tally_experts(
    contents: Contents, layers: Iterable[ExpertLayer], groups: Set[int]
) -> dict[_Storage, _Tally]:
    tallies: dict[_Storage, _Tally] = {}
    for layer in layers:
        if not layer.is_packed:
            _tally_plain(contents, layer, tallies)
        for part, sources in enumerate(layer.sources):
            for source in sources:
                tally = tallies.setdefault(_Storage.of(source.scheme, groups), _Tally())
                tally.layers.add(layer.layer)
                tally.parts.add(part)
                # Without a recipe every source that scan gives is a quantised one.
                assert isinstance(source, QuantizedSource)
                _add(tally, source)
    return tallies


def _tally_plain(contents: Contents, layer: ExpertLayer, tallies: dict[_Storage, _Tally]) -> None:
    stored = (source for part in layer.biases for source in part if isinstance(source, StoredBias))
    biases = {source.tensor for source in stored}
    names = [
        name
        for name in contents.checkpoint.headers
        if name.startswith(f"{layer.prefix}.")
        and ANY_EXPERT_TENSOR.fullmatch(name)
        and name not in biases
    ]
    dtype = contents.checkpoint.headers[names[0]].dtype
    storage = _Storage.plain(dtype_name(dtype), 8 * dtype.itemsize)
    tally = tallies.setdefault(storage, _Tally())
    n, k = contents.geometry.shape(0)
    num_matrices = 3 * contents.geometry.num_experts
    tally.layers.add(layer.layer)
    tally.parts.update(range(3))
    tally.tensors.update(names)
    tally.num_matrices += num_matrices
    # The host keeps them as they are.
    tally.packed_bytes += num_matrices * n * k * dtype.itemsize
    tally.bf16_bytes += num_matrices * n * k * 2


def _tally_linears(sources: Iterable[QuantizedSource], groups: Set[int]) -> dict[_Storage, _Tally]:
    tallies: dict[_Storage, _Tally] = {}
    for source in sources:
        tally = tallies.setdefault(_Storage.of(source.scheme, groups), _Tally())
        number = _layer_of(source.layer + ".")
        if number is not None:
            tally.layers.add(number)
        _add(tally, source)
    return tallies


def _add(tally: _Tally, source: QuantizedSource) -> None:
    tally.tensors.update(source.tensors.values())
    tally.num_matrices += 1
    tally.packed_bytes += packed_bytes(source.scheme)
    tally.bf16_bytes += 2 * source.scheme.n * source.scheme.k


def _entries(checkpoint: Checkpoint, tallies: dict[_Storage, _Tally]) -> list[dict[str, Any]]:
    return [
        {
            "format": storage.format,
            "title": storage.title,
            "element": storage.element,
            "bits": storage.bits,
            "group_size": storage.group_size,
            "symmetric": not storage.has_zero_points,
            "act_order": storage.has_group_index,
            "scale": storage.scale,
            "global_scale": storage.global_scale,
            "layout": storage.layout,
            "projections": [_PARTS[part] for part in sorted(tally.parts)],
            "layers": sorted(tally.layers),
            "matrices": tally.num_matrices,
            "file_bytes": _file_bytes(checkpoint, tally.tensors),
            "packed_bytes": tally.packed_bytes,
            "bf16_bytes": tally.bf16_bytes,
        }
        for storage, tally in tallies.items()
    ]


def _tables(summary: dict[str, Any]) -> Group:
    head = table("", "")
    head.show_header = False
    for name, value in _head(summary):
        head.add_row(name, value)
    columns = ("layers>", "stored as", "element", "group>", "zero points", "act order", "layout")
    sizes = ("matrices>", "in the file>", "packed>", "as bf16>", "bf16 / packed>")
    made = table("what", *columns, *sizes)
    for what, kind in (("experts", "experts"), ("linears", "linears")):
        for entry in summary[kind]:
            made.add_row(what, *_cells(entry))
    return Group(head, "", made)


def _head(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "checkpoint", summary["path"]
    yield "family", f"{summary['family']} ({summary['model_type']})"
    per_token = summary["experts_per_token"]
    used = "" if per_token is None else f", {per_token} a token"
    yield (
        "experts",
        f"{summary['experts_per_layer']} in each of {summary['expert_layers']} layers "
        f"of {summary['num_layers']}{used}; hidden {summary['hidden_size']}, "
        f"intermediate {summary['intermediate_size']}",
    )
    num_files = len(summary["files"])
    yield "files", f"{num_files}, {format_bytes(summary['file_bytes'])}"
    plain = summary["plain"]
    yield "plain", f"{plain['tensors']} tensors, {format_bytes(plain['file_bytes'])}"
    ignored = summary["ignored"]
    if ignored["tensors"]:
        layers = ", ".join(map(str, ignored["layers"]))
        yield (
            "ignored",
            f"layers beyond num_hidden_layers ({layers}): {ignored['tensors']} tensors, "
            f"{format_bytes(ignored['file_bytes'])}",
        )


def _cells(entry: dict[str, Any]) -> list[str]:
    is_plain = entry["format"] == "plain"
    group = "row" if entry["group_size"] is None else str(entry["group_size"])
    return [
        str(len(entry["layers"])),
        entry["title"],
        entry["element"],
        "" if is_plain else group,
        "" if is_plain else ("none" if entry["symmetric"] else "stored"),
        "yes" if entry["act_order"] else "",
        entry["layout"],
        str(entry["matrices"]),
        format_bytes(entry["file_bytes"]),
        format_bytes(entry["packed_bytes"]),
        format_bytes(entry["bf16_bytes"]),
        f"{entry['bf16_bytes'] / entry['packed_bytes']:.2f}",
    ]
