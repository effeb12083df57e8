"""The launches that the indexer's operations are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firesteel.indexer.filter import filter_kernel
from firesteel.indexer.range_scores import range_scores_kernel
from firesteel.indexer.range_select import range_select_kernel
from firesteel.indexer.score import decode_scores_kernel
from firesteel.indexer.select import select_kernel
from firesteel.indexer.write import write_pages_kernel
from firesteel.launch.binary import has_gluon
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr

__all__ = [
    "HOPPER",
    "KERNELS",
    "Groups",
    "Keys",
    "Outputs",
    "Ranges",
    "Tile",
    "decode_scores",
    "filter_scores",
    "range_scores",
    "range_select",
    "select",
    "write_pages",
]

WRITE = Kernel(write_pages_kernel)
DECODE_SCORES = Kernel(decode_scores_kernel)
FILTER = Kernel(filter_kernel)
SELECT = Kernel(select_kernel)
RANGE_SCORES = Kernel(range_scores_kernel)
RANGE_SELECT = Kernel(range_select_kernel)


def _hopper() -> tuple[Kernel, ...]:
    """Those of decode's scores and of prefill's."""
    if not has_gluon():
        return ()
    from firesteel.indexer.range_scores_wgmma import range_scores_wgmma_kernel
    from firesteel.indexer.score_wgmma import decode_scores_wgmma_kernel

    return (
        Kernel(decode_scores_wgmma_kernel, target="sm_90"),
        Kernel(range_scores_wgmma_kernel, target="sm_90"),
    )


HOPPER = _hopper()
"""Hopper's own kernels; none where Triton has no Gluon."""
KERNELS = (WRITE, DECODE_SCORES, FILTER, SELECT, RANGE_SCORES, RANGE_SELECT, *HOPPER)

Given = dict[str, tuple[str | None, Argument | None]]
"""Of each run-time parameter its type and what it is given; (None, None) for an absent tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How rows and heads make columns of products: two products where rows are 3, 5 or 6.

    Fields
        heads, rows            of a block, as they are
        row_block, rest_block  rows of the first product and of the second, or 0; padded
        head_block             heads, padded
        warps, stages          of a program that multiplies
        registers              of a thread at most, or 0: fewer let more programs find room
        wgmma                  whether the kernels are Hopper's own: two products of one warp group,
                               and stages of two pages each
    """

    heads: int
    rows: int
    row_block: int
    rest_block: int
    head_block: int
    warps: int
    stages: int = 3
    registers: int = 0
    wgmma: bool = False

    @property
    def block(self) -> int:
        """Rows of both products."""
        return self.row_block + self.rest_block

    @property
    def constants(self) -> dict[str, Constexpr]:
        """As the kernels of decode name them."""
        found: dict[str, Constexpr] = {
            "H": self.heads,
            "ROWS": self.rows,
            "ROW_BLOCK": self.row_block,
            "REST_BLOCK": self.rest_block,
            "HEAD_BLOCK": self.head_block,
        }
        if not self.wgmma:
            found["SPLIT"] = min(self.row_block, max(1, self.warps // 4))
        return {**found, "STAGES": self.stages, "PTX": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How a request's keys are grouped, each group with its largest score.

    Fields
        programs  of decode_scores, of a request: each leaves maxima of 64 groups
        columns   programs that have groups of their own; those so many apart share theirs
        shares    as many as a filter is compiled for
    """

    programs: int
    columns: int
    shares: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where keys are: in pages, whose table each call may pass, or contiguous (no page_stride).

    Fields
        dtype         of the keys, "fp8e4nv", "bf16" or "fp16"; only the first has scales
        page_stride   bytes from page to page; None where keys are contiguous
        table_stride  of the page table
    """

    dtype: str
    page_stride: int | None = None
    table_stride: Argument = 0

    @property
    def given(self) -> Given:
        """Pointers to queries, values and scales, and strides."""
        has_scales = self.dtype == "fp8e4nv"
        if self.page_stride is None:
            return {
                "q_ptr": (f"*{self.dtype}", "q"),
                "values_ptr": (f"*{self.dtype}", "keys"),
                "scales_ptr": ("*fp32", "key_scales") if has_scales else (None, None),
                "page_table_ptr": (None, None),
                "stride_table": ("i64", 0),
                "page_stride": ("i64", 0),
            }
        return {
            "q_ptr": (f"*{self.dtype}", "q"),
            "values_ptr": (f"*{self.dtype}", "cache"),
            "scales_ptr": ("*fp32", "cache") if has_scales else (None, None),
            "page_table_ptr": ("*i32", "page_table"),
            "stride_table": ("i64", self.table_stride),
            "page_stride": ("i64", self.page_stride // 16),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Which keys rows of prefill see: of requests that they name, or of one, from a start."""

    row_request: bool = False
    k_start: bool = False

    @property
    def given(self) -> Given:
        """The pointers."""
        return {
            "row_request_ptr": ("*i32", "row_request") if self.row_request else (None, None),
            "k_start_ptr": ("*i32", "k_start") if self.k_start else (None, None),
            "k_end_ptr": ("*i32", "k_end"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is written of each row, `top_k` of each."""

    top_k: int
    slots: bool = False
    scores: bool = False

    def given(self, *, last: bool = True) -> Given:
        """The pointers; all absent where candidates are left for a later launch."""
        wanted = {"indices": last, "slots": last and self.slots}
        found: Given = {
            f"{name}_ptr": ("*i32", name) if is_wanted else (None, None)
            for name, is_wanted in wanted.items()
        }
        is_wanted = last and self.scores
        found["selected_scores_ptr"] = ("*fp32", "selected_scores") if is_wanted else (None, None)
        return found


def _launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    given: Given,
    constants: dict[str, Constexpr],
    *,
    warps: int,
    pdl: bool,
    max_registers: int = 0,
) -> Launch:
    types = {name: kind for name, (kind, _) in given.items()}
    arguments = {name: value for name, (_, value) in given.items() if value is not None}
    key = kernel.key(
        types,
        {**constants, "PDL": pdl},
        num_warps=warps,
        pdl=pdl,
        max_registers=max_registers,
    )
    return kernel.launch(key, grid, arguments)


def write_pages(
    *,
    dtype: str,
    cache_dtype: str,
    slots: str,
    page_stride: int,
    power_of_two: bool,
    num_tokens: int,
    block: int,
    pdl: bool,
) -> Launch:
    """Round and place so many keys, `block` a program; types are those of `DTYPES`."""
    has_scales = cache_dtype == "fp8e4nv"
    given: Given = {
        "keys_ptr": (f"*{dtype}", "keys"),
        "slots_ptr": (f"*{slots}", "slots"),
        "values_ptr": ("*u8" if has_scales else f"*{cache_dtype}", "cache"),
        "scales_ptr": ("*fp32", "cache") if has_scales else (None, None),
        "stride_keys": ("i64", Stride("keys")),
        "page_stride": ("i64", page_stride // 16),
        "M": ("i64", num_tokens),
    }
    constants: dict[str, Constexpr] = {"POWER_OF_TWO": power_of_two, "BLOCK_M": block}
    grid = (-(-num_tokens // block), 1, 1)
    return _launch(WRITE, grid, given, constants, warps=1, pdl=pdl)


def decode_scores(
    keys: Keys,
    tile: Tile,
    *,
    first: int,
    requests: int,
    programs: int,
    width: int,
    has_maxima: bool,
    pdl: bool,
) -> Launch:
    """Scores of every row of so many requests, by so many programs each; maxima for a filter.

    `first` is the first request of a call that they are of.
    """
    given: Given = {
        **keys.given,
        "w_ptr": ("*fp32", "w"),
        "seq_lens_ptr": ("*i32", "seq_lens"),
        "scores_ptr": ("*fp32", "scores"),
        "maxima_ptr": ("*fp32", "maxima") if has_maxima else (None, None),
        "arrived_ptr": ("*i32", "arrived") if has_maxima else (None, None),
        "width": ("i64", width),
        "stride_scores": ("i64", width),
        "first_request": ("i64", first),
    }
    grid = (requests, programs, 1)
    options: dict[str, Any] = {"warps": tile.warps, "max_registers": tile.registers}
    kernel = HOPPER[0] if tile.wgmma else DECODE_SCORES
    return _launch(kernel, grid, given, tile.constants, pdl=pdl, **options)


def select(
    outputs: Outputs,
    *,
    first: int,
    num_rows: int,
    rows: int,
    spans: int,
    span: int,
    before: int,
    level: int,
    source: str,
    stride: int,
    to: str | None,
    width: int,
    table_stride: Argument,
    warps: int,
    pdl: bool,
) -> Launch:
    """The best of each span of `source`, whose rows are `stride` pages or spans' candidates apart.

    They go to candidates in region `to`, or, as the last launch, to the outputs. `first` is the
    first row of a call that they are of; spans of the levels before had `before` keys.
    """
    is_last = to is None
    has_table = is_last and outputs.slots
    given: Given = {
        "scores_ptr": (None, None) if level else ("*fp32", source),
        "from_ptr": ("*i32", source) if level else (None, None),
        "page_table_ptr": ("*i32", "page_table") if has_table else (None, None),
        "seq_lens_ptr": ("*i32", "seq_lens"),
        "to_ptr": (None, None) if to is None else ("*i32", to),
        **outputs.given(last=is_last),
        "stride": ("i64", stride),
        "stride_table": ("i64", table_stride if has_table else 0),
        "width": ("i64", width),
        "first_row": ("i64", first),
        "R": ("i64", num_rows),
    }
    constants: dict[str, Constexpr] = {"ROWS": rows, "TOP_K": outputs.top_k}
    constants |= {
        "SPAN": span,
        "BEFORE": before,
        "LEVEL": level,
        "IS_ONE": level == 0 and spans == 1,
    }
    constants |= {"WARPS": warps, "PTX": True}
    return _launch(SELECT, (num_rows, spans, 1), given, constants, warps=warps, pdl=pdl)


def filter_scores(
    outputs: Outputs,
    groups: Groups,
    *,
    first: int,
    num_rows: int,
    rows: int,
    parts: int,
    max_parts: int,
    final: int,
    chunk: int,
    width: int,
    table_stride: Argument,
    warps: int,
    registers: int,
    pdl: bool,
) -> Launch:
    """The best scores of each row, by `parts` programs a row; max_parts are compiled for.

    `first` is the first row of a call that they are of.
    """
    given: Given = {
        "scores_ptr": ("*fp32", "scores"),
        "maxima_ptr": ("*fp32", "maxima"),
        "kept_ptr": ("*i64", "candidates"),
        "counts_ptr": ("*i32", "counts"),
        "arrived_ptr": ("*i32", "arrived"),
        "page_table_ptr": ("*i32", "page_table") if outputs.slots else (None, None),
        "seq_lens_ptr": ("*i32", "seq_lens"),
        **outputs.given(),
        "stride_scores": ("i64", width),
        "stride_table": ("i64", table_stride if outputs.slots else 0),
        "width": ("i64", width),
        "programs": ("i64", groups.programs),
        "first_row": ("i64", first),
        "R": ("i64", num_rows),
    }
    constants: dict[str, Constexpr] = {"ROWS": rows, "TOP_K": outputs.top_k}
    constants |= {"SHARES": groups.shares, "GROUPS": 64 * groups.columns}
    constants |= {
        "MAX_PARTS": max_parts,
        "FINAL": final,
        "CHUNK": chunk,
        "WARPS": warps,
        "PTX": True,
    }
    options: dict[str, Any] = {"warps": warps, "max_registers": registers}
    return _launch(FILTER, (num_rows, parts, 1), given, constants, pdl=pdl, **options)


def range_scores(
    keys: Keys,
    ranges: Ranges,
    tile: Tile,
    *,
    first: int,
    num_rows: int,
    rows: int,
    capacity: int,
    stride: int,
    span: int,
    group: int,
    groups: int,
    pdl: bool,
) -> Launch:
    """Scores of the rows from `first` on, so many of a call's num_rows, in spans of their keys.

    Rows of scores are `stride` pages apart. Of each `group` keys 64 maxima are left; a row has
    `groups`.
    """
    given: Given = {
        **keys.given,
        "w_ptr": ("*fp32", "w"),
        **ranges.given,
        "scores_ptr": ("*fp32", "scores"),
        "maxima_ptr": ("*fp32", "maxima"),
        "capacity": ("i64", capacity),
        "stride_scores": ("i64", stride),
        "span": ("i64", span),
        "group": ("i64", group),
        "first_row": ("i64", first),
        "R": ("i64", num_rows),
    }
    # Hopper's own have the rows of both products.
    left_out = ("ROWS", "REST_BLOCK") if tile.wgmma else ("REST_BLOCK",)
    constants = {n: value for n, value in tile.constants.items() if n not in left_out}
    constants["GROUPS"] = groups
    grid = (-(-capacity // span), -(-rows // tile.rows), 1)
    options: dict[str, Any] = {"warps": tile.warps, "max_registers": tile.registers}
    kernel = HOPPER[1] if tile.wgmma else RANGE_SCORES
    return _launch(kernel, grid, given, constants, pdl=pdl, **options)


def range_select(
    keys: Keys,
    ranges: Ranges,
    outputs: Outputs,
    *,
    first: int,
    num_rows: int,
    rows: int,
    capacity: int,
    stride: int,
    group: int,
    groups: int,
    size: int,
    chunk: int,
    warps: int,
    registers: int,
    pdl: bool,
) -> Launch:
    """The best of the rows from `first` on, so many of a call's num_rows, by a program each."""
    has_table = outputs.slots
    given: Given = {
        "scores_ptr": ("*fp32", "scores"),
        "maxima_ptr": ("*fp32", "maxima"),
        "lists_ptr": ("*i64", "candidates"),
        **ranges.given,
        **outputs.given(),
        "page_table_ptr": ("*i32", "page_table") if has_table else (None, None),
        "capacity": ("i64", capacity),
        "stride_scores": ("i64", stride),
        "group": ("i64", group),
        "stride_table": ("i64", keys.table_stride if has_table else 0),
        "first_row": ("i64", first),
        "R": ("i64", num_rows),
    }
    constants: dict[str, Constexpr] = {"TOP_K": outputs.top_k, "GROUPS": groups, "SIZE": size}
    constants |= {"CHUNK": chunk, "WARPS": warps, "PTX": True}
    options: dict[str, Any] = {"warps": warps, "max_registers": registers}
    return _launch(RANGE_SELECT, (rows, 1, 1), given, constants, pdl=pdl, **options)
