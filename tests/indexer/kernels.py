"""How tests launch the indexer's kernels in Triton's interpreter, and the inputs they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from firesteel.indexer.filter import filter_kernel
from firesteel.indexer.launches import HOPPER
from firesteel.indexer.pages import CACHE_DTYPES, PAGE_BYTES, page_bytes, page_values, page_views
from firesteel.indexer.plan import decode_tile
from firesteel.indexer.score import decode_scores_kernel
from firesteel.indexer.select import select_kernel
from firesteel.indexer.spec import DecodeSpec
from firesteel.indexer.write import write_pages_kernel
from tests.moe.kernels import Memory, launch

E4M3 = torch.float8_e4m3fn


def power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def numbers(
    *shape: int, generator: torch.Generator, is_exact: bool, cache_dtype: str = "e4m3"
) -> Tensor:
    """Values as a cache has them; where exact small integers, so that scores have no rounding."""
    found = torch.randn(shape, generator=generator)
    if is_exact:
        found = torch.randint(-2, 3, shape, generator=generator).float()
    return found.to(CACHE_DTYPES[cache_dtype])


def e4m3(*shape: int, generator: torch.Generator, is_exact: bool) -> Tensor:
    """Values of e4m3."""
    return numbers(*shape, generator=generator, is_exact=is_exact)


def with_holes(keys: Tensor, generator: torch.Generator) -> Tensor:
    """Keys `[.., 128]` of which one in eight has a NaN: it must never be selected."""
    is_hole = torch.rand(keys.shape[:-1], generator=generator) < 1 / 8
    column = torch.randint(0, 128, keys.shape[:-1], generator=generator)
    at = is_hole[..., None] & (torch.arange(128) == column[..., None])
    return torch.where(at, torch.full_like(keys, math.nan), keys)


def weights(*shape: int, generator: torch.Generator, is_exact: bool) -> Tensor:
    """Of heads, of both signs."""
    if is_exact:
        return torch.randint(-2, 4, shape, generator=generator) / 2
    return torch.randn(shape, generator=generator)


def key_scales(*shape: int, generator: torch.Generator, is_exact: bool) -> Tensor:
    """One in eight is NaN: its key must never be selected."""
    found = 2.0 ** torch.randint(-2, 3, shape, generator=generator)
    if not is_exact:
        found = torch.rand(shape, generator=generator) + 0.1
    return torch.where(torch.rand(shape, generator=generator) < 1 / 8, math.nan, found)


STALE = 1e30
"""In memory that a kernel must not read: a score that would be selected."""


@dataclass(frozen=True)
class Outputs:
    """What a selection writes: `[R, top_k]` each."""

    indices: Tensor
    slots: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Decode:
    """q `[B, n, H, 128]`, w `[B, n, H]`, a cache of pages, page_table `[B, width]`, seq_lens."""

    q: Tensor
    w: Tensor
    cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    page_stride: int = PAGE_BYTES
    cache_dtype: str = "e4m3"

    @property
    def rows(self) -> int:
        return self.q.shape[1]

    @property
    def num_rows(self) -> int:
        return self.q.shape[0] * self.rows

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def width(self) -> int:
        return self.page_table.shape[1]

    @property
    def tile(self) -> dict[str, int]:
        return self.tile_of(wgmma=False)

    def tile_of(self, *, wgmma: bool) -> dict[str, int]:
        """Of Triton's kernel or of Hopper's own."""
        spec = DecodeSpec(num_heads=self.heads, rows=self.rows, top_k=512, width=1, wgmma=wgmma)
        return {**decode_tile(spec).constants, "PTX": False}

    @property
    def pages(self) -> tuple[Tensor, Tensor | None]:
        if self.cache_dtype == "e4m3":
            return page_views(self.cache, self.page_stride)
        return page_values(self.cache, self.page_stride, self.cache_dtype), None

    @property
    def views(self) -> tuple[Tensor, Tensor | None]:
        """The cache as kernels take it."""
        return views(self.cache, self.cache_dtype)

    def lengths(self) -> list[int]:
        """Of each row, as an independent few lines."""
        found = []
        for length in self.seq_lens.tolist():
            for row in range(self.rows):
                found.append(min(max(length - (self.rows - 1 - row), 0), 64 * self.width))
        return found


def decode_case(
    lens: list[int],
    *,
    rows: int = 1,
    heads: int = 8,
    width: int = 3,
    cache_dtype: str = "e4m3",
    page_stride: int = 0,
    missing: float = 0.0,
    is_exact: bool = False,
    seed: int = 0,
) -> Decode:
    """Requests of these lengths, whose pages lie in any order; some are missing."""
    generator = torch.Generator().manual_seed(seed)
    requests = len(lens)
    num_pages = requests * width
    page_stride = page_stride or page_bytes(cache_dtype)
    cache = torch.full((num_pages * page_stride,), 0x7E, dtype=torch.uint8)
    values = page_values(cache, page_stride, cache_dtype)
    kind = {"generator": generator, "is_exact": is_exact}
    values.copy_(numbers(*values.shape, **kind, cache_dtype=cache_dtype))
    if cache_dtype == "e4m3":
        page_views(cache, page_stride)[1].copy_(key_scales(*values.shape[:2], **kind))
    else:
        values.copy_(with_holes(values, generator))
    table = torch.randperm(num_pages, generator=generator).view(requests, width).int()
    is_missing = torch.rand(table.shape, generator=generator) < missing
    # Past the live pages anything may stand.
    live = -(-torch.tensor(lens).clamp(0, width * 64) // 64)
    is_past = torch.arange(width)[None] >= live[:, None]
    table = torch.where(is_missing, -1, table).masked_fill(is_past, 2**31 - 1)
    return Decode(
        q=numbers(requests, rows, heads, 128, **kind, cache_dtype=cache_dtype),
        w=weights(requests, rows, heads, **kind),
        cache=cache,
        cache_dtype=cache_dtype,
        page_table=table.int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        page_stride=page_stride,
    )


def views(cache: Tensor, cache_dtype: str = "e4m3") -> tuple[Tensor, Tensor | None]:
    """A cache as kernels take it: as e4m3 and as fp32, or as 16-bit numbers."""
    if cache_dtype != "e4m3":
        return cache[: cache.numel() // 2 * 2].view(CACHE_DTYPES[cache_dtype]), None
    return cache.view(E4M3), cache[: cache.numel() // 4 * 4].view(torch.float32)


def run_write(
    keys: Tensor,
    slots: Tensor,
    cache: Tensor,
    page_stride: int,
    *,
    power_of_two: bool = False,
    cache_dtype: str = "e4m3",
) -> None:
    """Write keys, whose rows lie 16 elements further apart than they are long, into a cache."""
    memory = Memory()
    held = memory.holding(keys, padding=16)
    unit = 16 // keys.itemsize
    taken, scales = views(cache, cache_dtype)
    taken = cache if cache_dtype == "e4m3" else taken
    launch(
        *(write_pages_kernel, (-(-len(keys) // 4),), held, memory.holding(slots)),
        *(taken, scales, held.stride(0) // unit, page_stride // 16, len(keys)),
        **{"POWER_OF_TWO": power_of_two, "BLOCK_M": 4},
    )
    memory.check()


def run_scores(
    case: Decode,
    *,
    programs: int = 2,
    with_maxima: bool = False,
    first: int = 0,
    emulate: Callable[..., None] | None = None,
) -> Tensor:
    """Scores `[B * n, width * 64]`; NaN of 0xFF bytes where none were written.

    Of the requests from `first` on. With maxima those of groups behind them, `[B * n, programs *
    64]`. Of Hopper's own kernel where there is something that runs it.
    """
    memory = Memory()
    requests = len(case.seq_lens) - first
    num_rows = requests * case.rows
    kernel = decode_scores_kernel if emulate is None else HOPPER[0].function
    start = launch if emulate is None else emulate
    maxima, arrived = None, None
    if with_maxima:
        maxima = memory.poisoned(num_rows, programs * 64, dtype=torch.float32)
        arrived = memory.poisoned(num_rows, dtype=torch.int32)
    capacity = case.width * 64
    scores = memory.poisoned(num_rows, capacity + 64, dtype=torch.float32)
    table = memory.holding(case.page_table, padding=1)
    start(
        *(kernel, (requests, programs)),
        *(memory.holding(case.q), memory.holding(case.w)),
        *views(memory.holding(case.cache), case.cache_dtype),
        *(table, memory.holding(case.seq_lens), scores, maxima, arrived),
        *(table.stride(0), case.page_stride // 16, case.width, scores.stride(0) // 64, first),
        **case.tile_of(wgmma=emulate is not None),
    )
    memory.check()
    if not with_maxima:
        return scores[:, :capacity]
    assert not arrived.any()
    return torch.cat([scores[:, :capacity], maxima], dim=1)


@dataclass
class Selection:
    """Scores `[R, C]` of rows, of requests of `rows` each; what their slots are asked of."""

    scores: Tensor
    seq_lens: Tensor
    rows: int = 1
    top_k: int = 16
    span: int = 64
    page_table: Tensor | None = None
    memory: Memory = field(default_factory=Memory)
    num_kept: int = 0

    def __post_init__(self) -> None:
        width = self.scores.shape[1] // 64
        if self.page_table is None:
            self.page_table = torch.arange(len(self.seq_lens) * width).flip(0).view(-1, width).int()

    def length(self, row: int) -> int:
        """Keys that a row sees."""
        request, own = divmod(row, self.rows)
        seen = int(self.seq_lens[request]) - (self.rows - 1 - own)
        return min(max(seen, 0), self.scores.shape[1])

    def whole(self, row: int) -> int:
        """Keys that the last row of a row's request sees."""
        return self.length(row // self.rows * self.rows + self.rows - 1)

    def maxima(self, programs: int) -> Tensor:
        """Of groups, `[R, programs, 64]`, 0xFF bytes where a program has no page."""
        num_rows = len(self.scores)
        found = torch.full((num_rows, programs, 64), -1, dtype=torch.int32).view(torch.float32)
        for row in range(num_rows):
            whole = self.whole(row)
            seen = self.scores[row].where(~self.scores[row].isnan(), -math.inf)
            seen[self.length(row) :] = -math.inf
            pages = seen.view(-1, 64)[: -(-whole // 64)]
            for program in range(min(programs, len(pages))):
                found[row, program] = pages[program::programs].amax(dim=0)
        return found

    def run_filter(
        self, *, columns: int = 2, shares: int = 1, parts: int = 2, final: int = 32, chunk: int = 64
    ) -> Outputs:
        """By one launch of filter, with maxima as decode_scores would leave them.

        num_kept is then how many scores reached the bound.
        """
        num_rows, capacity = self.scores.shape
        memory = self.memory
        scores = memory.poisoned(num_rows * (capacity + 64), dtype=torch.float32)
        held = scores.view(num_rows, -1)
        held.fill_(STALE)
        for row in range(num_rows):
            # As decode_scores leaves what is past a row's own length, in its request's pages.
            length, whole = self.length(row), self.whole(row)
            held[row, :length] = self.scores[row, :length]
            held[row, length : -(-whole // 64) * 64] = -math.inf
        maxima = self.maxima(columns * shares)
        maxima = maxima.where(maxima.view(torch.int32) != -1, STALE)
        kept = memory.poisoned(num_rows, parts, final, dtype=torch.int64)
        counts = memory.poisoned(num_rows, parts, dtype=torch.int32)
        outputs = outputs_of(memory, num_rows, self.top_k)
        table = memory.holding(self.page_table)
        arrived = torch.zeros(num_rows, dtype=torch.int32)
        launch(
            *(filter_kernel, (num_rows, parts), scores),
            *(memory.holding(maxima), kept, counts, arrived),
            *(table, memory.holding(self.seq_lens), *vars(outputs).values()),
            *(capacity // 64 + 1, table.stride(0), table.shape[1], columns * shares, 0, num_rows),
            **{"ROWS": self.rows, "TOP_K": self.top_k, "SHARES": 2},
            **{
                "GROUPS": 64 * columns,
                "MAX_PARTS": 4,
                "FINAL": final,
                "CHUNK": chunk,
                "WARPS": 1,
                "PTX": False,
            },
        )
        memory.check()
        assert (arrived == parts).all()
        self.num_kept = int(counts.sum())
        return outputs

    def run(self) -> Outputs:
        """Level by level, as the plan does."""
        num_rows, capacity = self.scores.shape
        width = capacity // 64
        source, stride, level = self.memory.holding(self.scores, padding=64), width + 1, 0
        spans = -(-capacity // self.span)
        while spans > 1:
            to = self.memory.poisoned(num_rows, 2, spans, self.top_k, dtype=torch.int32)
            self._launch(source, stride, level, spans, to)
            source, stride, level = to, spans, level + 1
            spans = -(-spans * self.top_k // self.span)
        found = self._launch(source, stride, level, 1, None)
        self.memory.check()
        return found

    def _launch(
        self, source: Tensor, stride: int, level: int, spans: int, to: Tensor | None
    ) -> Outputs | None:
        num_rows = len(self.scores)
        outputs = None if to is not None else outputs_of(self.memory, num_rows, self.top_k)
        table = self.memory.holding(self.page_table)
        launch(
            *(select_kernel, (num_rows, spans)),
            *((source, None) if level == 0 else (None, source)),
            *(table, self.memory.holding(self.seq_lens), to),
            *((None,) * 3 if outputs is None else vars(outputs).values()),
            *(stride, table.stride(0), table.shape[1], 0, num_rows),
            **{"ROWS": self.rows, "TOP_K": self.top_k, "SPAN": self.span, "LEVEL": level},
            **{"BEFORE": self.span, "IS_ONE": level == 0 and spans == 1, "WARPS": 1, "PTX": False},
        )
        return outputs


def outputs_of(memory: Memory, num_rows: int, top_k: int) -> Outputs:
    dtypes = (torch.int32, torch.int32, torch.float32)
    return Outputs(*(memory.poisoned(num_rows, top_k, dtype=dtype) for dtype in dtypes))


def with_lens(case: Decode, lens: list[int]) -> Decode:
    return replace(case, seq_lens=torch.tensor(lens, dtype=torch.int32))
