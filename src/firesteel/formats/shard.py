"""Parts of a matrix for ranks that share it: rows, or columns, with the same numbers as the whole.

    dequantize(part) == dequantize(whole)[rows] or [:, columns]     bit for bit

Rows are free: each has scales of its own. Columns share scales in groups. Where a cut goes through
a group both sides keep its scale, and the part's group size is the largest that divides what is
left of every group and that the packed form holds: of groups of 128, columns 0 to 319 have groups
of 64. Columns that name their group (act-order) may be cut anywhere too, but what is left of their
groups is then of any size, down to 1: who may choose which columns a rank has takes whole groups
(`columns_of_groups`).

A matrix of EXL3 lies between rotations of 128 rows and 128 columns, so it is cut there alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from firesteel.errors import InvalidArgumentError
from firesteel.formats.base import Matrix, QuantizedMatrix, Scheme
from firesteel.formats.expand import BLOCK_K
from firesteel.formats.trellis import BLOCK, TILE
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, padded, trellis_scheme

__all__ = [
    "columns_of_groups",
    "columns_scheme",
    "cut_unit",
    "rows_scheme",
    "split",
    "take_columns",
    "take_rows",
]

_UNIT = 32
"""The smallest group of integers that kernels take; of floats no format has one that this cuts."""


def split(size: int, count: int, unit: int = 1) -> tuple[range, ...]:
    """`count` runs that make up `range(size)`, as even as can be in whole units, longer ones first.

    A rest of less than a unit goes to the last run that is not empty. Example: 1856 in 3 by 64s is
    29 units, 640 + 640 + 576.

    Raises
        InvalidArgumentError: a negative size, or a count or unit that is not positive.
    """
    for name, value, least in (("size", size, 0), ("count", count, 1), ("unit", unit, 1)):
        if value < least:
            raise InvalidArgumentError(f"{name}: got {value}, must be at least {least}")
    units = -(-size // unit)
    each, more = divmod(units, count)
    ends = [min(size, unit * (rank * each + min(rank, more))) for rank in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def cut_unit(schemes: Sequence[Scheme]) -> int:
    """Rows or columns of which parts are best made: kernels still take what is left of groups."""
    return BLOCK if any(isinstance(scheme, TrellisScheme) for scheme in schemes) else _UNIT


def columns_of_groups(scheme: Scheme, matrix: Matrix, groups: range) -> Tensor:
    """The columns of whole groups, ascending: int64 `[len(groups) * group_size]`."""
    assert isinstance(matrix, QuantizedMatrix)
    if matrix.group_index is None:
        first, last = groups.start * scheme.group_size, groups.stop * scheme.group_size
        return torch.arange(first, last)
    index = matrix.group_index
    return ((index >= groups.start) & (index < groups.stop)).nonzero().flatten()


def rows_scheme(scheme: Scheme, num_rows: int) -> Scheme:
    """The scheme of so many rows of a matrix, which rows they are aside."""
    if isinstance(scheme, TrellisScheme):
        return trellis_scheme(num_rows, scheme.k, scheme.code, layout=scheme.layout)
    return replace(scheme, n=num_rows)


def columns_scheme(scheme: Scheme, columns: range) -> Scheme:
    """The scheme of a run of columns; where columns name their group, of whole groups of them.

    `take_columns` of other columns that name their group may give smaller groups.
    """
    num_columns = len(columns)
    if isinstance(scheme, TrellisScheme):
        return trellis_scheme(scheme.n, num_columns, scheme.code, layout=scheme.layout)
    size = scheme.group_size
    if not scheme.has_group_index:
        first, last = columns.start // size, (columns.stop - 1) // size
        if first == last:
            size = num_columns
        else:
            # What the first and the last group have of it, and the whole ones between.
            parts = ((first + 1) * size - columns.start, columns.stop - last * size)
            size = _held(math.gcd(*parts, size if last - first > 1 else 0), num_columns)
    return replace(scheme, k=num_columns, group_size=size)


def take_rows(scheme: Scheme, matrix: Matrix, rows: range | Tensor) -> tuple[Scheme, Matrix]:
    """The scheme and the numbers of some rows, in the order given.

    Args:
        rows: a run of rows, or their numbers, int64; of EXL3 a run that begins and ends at a
            multiple of 128 or where the matrix ends.

    Raises
        InvalidArgumentError: none, some that the matrix has not, or EXL3's cut elsewhere.
    """
    _check("rows", rows, scheme.n)
    if isinstance(scheme, TrellisScheme):
        run = _blocks("rows", rows, scheme.n)
        assert isinstance(matrix, TrellisMatrix)
        part = TrellisMatrix(
            trellis=matrix.trellis[:, run.start // TILE : run.stop // TILE],
            suh=matrix.suh,
            svh=matrix.svh[run.start : run.stop],
        )
        return rows_scheme(scheme, len(rows)), part
    assert isinstance(matrix, QuantizedMatrix)
    at = _selector(rows, matrix.codes.device)
    part = replace(
        matrix,
        codes=matrix.codes[at],
        scales=matrix.scales[at],
        zero_points=None if matrix.zero_points is None else matrix.zero_points[at],
    )
    return rows_scheme(scheme, len(rows)), part


def take_columns(scheme: Scheme, matrix: Matrix, columns: range | Tensor) -> tuple[Scheme, Matrix]:
    """The scheme and the numbers of some columns, in the order given; arguments as `take_rows` has.

    The part names the groups of its columns where the whole does, or where their order needs it.
    """
    _check("columns", columns, scheme.k)
    if isinstance(scheme, TrellisScheme):
        run = _blocks("columns", columns, scheme.k)
        assert isinstance(matrix, TrellisMatrix)
        part = TrellisMatrix(
            trellis=matrix.trellis[run.start // TILE : run.stop // TILE],
            suh=matrix.suh[run.start : run.stop],
            svh=matrix.svh,
        )
        return columns_scheme(scheme, range(len(columns))), part
    assert isinstance(matrix, QuantizedMatrix)
    at = _selector(columns, matrix.codes.device)
    whole = matrix.group_index
    if whole is None:
        whole = torch.arange(scheme.k, device=matrix.codes.device) // scheme.group_size
    size, groups, index = _regrouped(whole[at].long())
    is_trivial = bool((index == torch.arange(len(columns), device=index.device) // size).all())
    has_index = scheme.has_group_index or not is_trivial
    part = replace(
        matrix,
        codes=matrix.codes[:, at],
        scales=matrix.scales[:, groups],
        zero_points=None if matrix.zero_points is None else matrix.zero_points[:, groups],
        group_index=index.int() if has_index else None,
    )
    taken = replace(scheme, k=len(columns), group_size=size, has_group_index=has_index)
    return taken, part


def _regrouped(named: Tensor) -> tuple[int, Tensor, Tensor]:
    """Groups of one size for columns of which each names the group that it had.

    Returns
        The size, the old group of each new one, and the new group of each column.
    """
    counts = torch.bincount(named)
    size = _held(math.gcd(*counts.tolist()), named.numel())
    groups = torch.repeat_interleave(
        torch.arange(counts.numel(), device=named.device), counts // size
    )
    # Columns of a group go to its parts in their own order.
    order = torch.sort(named, stable=True).indices
    index = torch.empty_like(named)
    index[order] = torch.arange(named.numel(), device=named.device) // size
    return size, groups, index


def _held(size: int, k: int) -> int:
    """The largest divisor of a group size that the packed form of k columns holds."""
    return size if size == k or size % BLOCK_K == 0 else math.gcd(size, BLOCK_K)


def _check(name: str, taken: range | Tensor, size: int) -> None:
    if len(taken) == 0:
        raise InvalidArgumentError(f"{name}: got none, a part has at least one")
    low, high = (min(taken), max(taken)) if isinstance(taken, range) else _ends(taken)
    if low < 0 or high >= size:
        raise InvalidArgumentError(f"{name}: got {low} to {high}, must be of 0 to {size - 1}")


def _ends(taken: Tensor) -> tuple[int, int]:
    return int(taken.min()), int(taken.max())


def _selector(taken: range | Tensor, device: torch.device) -> slice | Tensor:
    if isinstance(taken, range) and taken.step == 1:
        return slice(taken.start, taken.stop)
    return torch.as_tensor(taken, device=device)


def _blocks(name: str, taken: range | Tensor, size: int) -> range:
    """A run of whole blocks of 128, padding included."""
    got = "no run of them"
    if isinstance(taken, range) and taken.step == 1:
        if taken.start % BLOCK == 0 and (taken.stop % BLOCK == 0 or taken.stop == size):
            return range(taken.start, padded(taken.stop))
        got = f"{taken.start} to {taken.stop - 1}"
    raise InvalidArgumentError(
        f"{name}: got {got} of a matrix of EXL3 with {size}, must be a run that begins and ends at "
        f"a multiple of {BLOCK} or where the matrix ends"
    )
