"""The launches that the indexer's operations are made of."""

from __future__ import annotations

from dataclasses import dataclass

from firesteel.indexer.filter import filter_kernel
from firesteel.indexer.score import decode_scores_kernel
from firesteel.indexer.select import select_kernel
from firesteel.indexer.stream import stream_kernel
from firesteel.indexer.write import write_pages_kernel
from firesteel.launch.kernel import Argument, Kernel, Launch, Stride
from firesteel.launch.key import Constexpr

__all__ = [
    "KERNELS",
    "Groups",
    "Keys",
    "Outputs",
    "Ranges",
    "Tile",
    "decode_scores",
    "filter_scores",
    "select",
    "stream",
    "write_pages",
]

WRITE = Kernel(write_pages_kernel)
DECODE_SCORES = Kernel(decode_scores_kernel)
FILTER = Kernel(filter_kernel)
SELECT = Kernel(select_kernel)
STREAM = Kernel(stream_kernel)
KERNELS = (WRITE, DECODE_SCORES, FILTER, SELECT, STREAM)

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
    """

    heads: int
    rows: int
    row_block: int
    rest_block: int
    head_block: int
    warps: int
    stages: int = 3

    @property
    def block(self) -> int:
        """Rows of both products."""
        return self.row_block + self.rest_block

    @property
    def constants(self) -> dict[str, Constexpr]:
        """As kernels name them."""
        return {
            "H": self.heads,
            "ROWS": self.rows,
            "ROW_BLOCK": self.row_block,
            "REST_BLOCK": self.rest_block,
            "HEAD_BLOCK": self.head_block,
            "STAGES": self.stages,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """How a request's keys are grouped, each group with its largest score.

    Fields
        columns     programs of decode_scores that have groups of their own, 64 each
        shares      programs that share a group, and each leave a maximum of it
        max_shares  as many as a filter is compiled for
    """

    columns: int
    shares: int
    max_shares: int

    @property
    def programs(self) -> int:
        """Of decode_scores, of a request."""
        return self.columns * self.shares


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
    """Which keys rows see: by the lengths of requests, or by ranges of their own."""

    seq_lens: bool = False
    row_request: bool = False
    k_start: bool = False
    k_end: bool = False

    def given(self, *names: str) -> Given:
        """The pointers of these names."""
        return {
            f"{name}_ptr": ("*i32", name) if getattr(self, name) else (None, None) for name in names
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
) -> Launch:
    types = {name: kind for name, (kind, _) in given.items()}
    arguments = {name: value for name, (_, value) in given.items() if value is not None}
    key = kernel.key(types, {**constants, "PDL": pdl}, num_warps=warps, pdl=pdl)
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
    requests: int,
    programs: int,
    width: int,
    has_maxima: bool,
    pdl: bool,
) -> Launch:
    """Scores of every row of so many requests, by so many programs each; maxima for a filter."""
    given: Given = {
        **keys.given,
        "w_ptr": ("*fp32", "w"),
        "seq_lens_ptr": ("*i32", "seq_lens"),
        "scores_ptr": ("*fp32", "scores"),
        "maxima_ptr": ("*fp32", "maxima") if has_maxima else (None, None),
        "arrived_ptr": ("*i32", "arrived") if has_maxima else (None, None),
        "width": ("i64", width),
        "stride_scores": ("i64", width),
    }
    grid = (requests, programs, 1)
    return _launch(DECODE_SCORES, grid, given, tile.constants, warps=tile.warps, pdl=pdl)


def select(
    ranges: Ranges,
    outputs: Outputs,
    *,
    num_rows: int,
    rows: int,
    spans: int,
    span: int,
    level: int,
    source: str,
    stride: int,
    to: str | None,
    width: int,
    table_stride: Argument | None,
    warps: int,
    pdl: bool,
) -> Launch:
    """The best of each span of `source`, whose rows are `stride` pages or spans' candidates apart.

    They go to candidates in region `to`, or, as the last launch, to the outputs.
    """
    is_last = to is None
    has_table = is_last and outputs.slots
    given: Given = {
        "scores_ptr": (None, None) if level else ("*fp32", source),
        "from_ptr": ("*i64", source) if level else (None, None),
        "page_table_ptr": ("*i32", "page_table") if has_table else (None, None),
        **ranges.given("seq_lens"),
        **(ranges if has_table else Ranges()).given("row_request"),
        "to_ptr": (None, None) if to is None else ("*i64", to),
        **outputs.given(last=is_last),
        "stride": ("i64", stride),
        "stride_table": ("i64", (table_stride or 0) if has_table else 0),
        "width": ("i64", width),
        "R": ("i64", num_rows),
    }
    constants: dict[str, Constexpr] = {"ROWS": rows, "TOP_K": outputs.top_k}
    constants |= {"SPAN": span, "LEVEL": level, "IS_ONE": level == 0 and spans == 1}
    return _launch(SELECT, (num_rows, spans, 1), given, constants, warps=warps, pdl=pdl)


def filter_scores(
    outputs: Outputs,
    groups: Groups,
    *,
    num_rows: int,
    rows: int,
    parts: int,
    max_parts: int,
    final: int,
    chunk: int,
    width: int,
    table_stride: Argument,
    warps: int,
    pdl: bool,
) -> Launch:
    """The best scores of each row, by `parts` programs a row; max_parts are compiled for."""
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
        "R": ("i64", num_rows),
    }
    constants: dict[str, Constexpr] = {"ROWS": rows, "TOP_K": outputs.top_k}
    constants |= {"SHARES": groups.max_shares, "GROUPS": 64 * groups.columns}
    constants |= {"MAX_PARTS": max_parts, "FINAL": final, "CHUNK": chunk}
    return _launch(FILTER, (num_rows, parts, 1), given, constants, warps=warps, pdl=pdl)


def stream(
    keys: Keys,
    ranges: Ranges,
    outputs: Outputs,
    tile: Tile,
    *,
    num_rows: int,
    blocks: int,
    parts: int,
    programs: int,
    capacity: int,
    chunk: int,
    pdl: bool,
) -> Launch:
    """Scores and selection of so many rows in blocks, by so many programs."""
    given: Given = {
        **keys.given,
        "w_ptr": ("*fp32", "w"),
        **ranges.given("seq_lens", "row_request", "k_start", "k_end"),
        "scratch_ptr": ("*fp32", "scores"),
        "kept_ptr": ("*i64", "candidates"),
        **outputs.given(),
        "capacity": ("i64", capacity),
        "R": ("i64", num_rows),
        "blocks": ("i64", blocks),
        "parts": ("i64", parts),
    }
    constants = {**tile.constants, "TOP_K": outputs.top_k, "CHUNK": chunk}
    return _launch(STREAM, (programs, 1, 1), given, constants, warps=tile.warps, pdl=pdl)
