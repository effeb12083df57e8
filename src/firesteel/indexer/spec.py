"""The indexer's operations as values that plan: write pages, decode, prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.indexer.pages import (
    CACHE_DTYPES,
    HEAD_SIZE,
    PAGE_TOKENS,
    check_cache_dtype,
    check_page_stride,
    page_bytes,
)
from firesteel.launch import ANY_SIZE, NUM_TOKENS, Flags, Launch, Operand, Region
from firesteel.launch.binary import (
    check_wgmma,
    has_gluon,
    supports_dependent_launch,
    supports_wgmma,
)
from firesteel.launch.key import DTYPES

__all__ = ["TOP_KS", "DecodeSpec", "PageWriterSpec", "PrefillSpec"]

TOP_KS = (512, 1024, 2048)
MAX_HEADS = 64
MAX_ROWS = 8
"""Rows a request: one token and up to seven drafts."""
MAX_KEYS = 1 << 22
"""Keys of a request: scores of a block of rows fit the workspace."""
KEY_DTYPES = ("bf16", "fp16", "fp32")
SLOT_DTYPES = ("i32", "i64")


def _check_range(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgumentError(
            f"{name}: got {value!r}, must be an integer from {least} to {most}"
        )


def _check_flags(spec: PageWriterSpec | DecodeSpec | PrefillSpec, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name}: got {value!r}, must be True or False")


def _check_heads(num_heads: int, top_k: object) -> None:
    _check_range("num_heads", num_heads, 8, MAX_HEADS)
    if not isinstance(top_k, int) or top_k not in TOP_KS:
        allowed = ", ".join(map(str, TOP_KS))
        raise UnsupportedError(f"top_k: got {top_k!r}, must be one of {allowed}")


def _set_pages(spec: PageWriterSpec | DecodeSpec | PrefillSpec) -> None:
    """Check the type of the keys; a page_stride of 0 becomes the bytes of a page."""
    check_cache_dtype(spec.cache_dtype)
    if spec.page_stride == 0 and type(spec.page_stride) is int:
        object.__setattr__(spec, "page_stride", page_bytes(spec.cache_dtype))
    check_page_stride(spec.page_stride, spec.cache_dtype)


def _element(cache_dtype: str) -> str:
    """The type's name among `DTYPES`."""
    return next(name for name, each in DTYPES.items() if each == CACHE_DTYPES[cache_dtype])


def _fields_of(spec: PageWriterSpec | DecodeSpec | PrefillSpec) -> dict[str, Any]:
    return {each.name: getattr(spec, each.name) for each in fields(spec)}


def _outputs(shape: tuple[int | str, ...], *, slots: bool, scores: bool) -> list[Operand]:
    """`indices`, and where asked for `slots` and `selected_scores`."""
    found = [Operand("indices", "i32", shape, is_written=True)]
    if slots:
        found.append(Operand("slots", "i32", shape, is_written=True))
    if scores:
        found.append(Operand("selected_scores", "fp32", shape, is_written=True))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWriterSpec:
    """New keys `[M, 128]` put at their slots of a cache: as e4m3 with a scale each, or in 16 bits.

    Fields
        dtype         of the keys: bf16, fp16 or fp32
        cache_dtype   of the cache: e4m3, bf16 or fp16
        page_stride   bytes from page to page, a multiple of 16; 0 for those of a page alone
        power_of_two  scales are rounded up to powers of two (ue8m0); of e4m3
        pdl           programmatic dependent launch

    Raises
        InvalidArgumentError, UnsupportedError: a field that no kernel takes.
    """

    dtype: str = "bf16"
    cache_dtype: str = "e4m3"
    page_stride: int = 0
    power_of_two: bool = False
    pdl: bool = True

    def __post_init__(self) -> None:
        _set_pages(self)
        _check_flags(self, "power_of_two", "pdl")
        if self.power_of_two and self.cache_dtype != "e4m3":
            raise UnsupportedError(
                f"power_of_two: got True, must be False of {self.cache_dtype}, which has no scales"
            )
        if self.dtype not in KEY_DTYPES:
            raise UnsupportedError(
                f"dtype: got {self.dtype!r}, must be one of {', '.join(KEY_DTYPES)}"
            )

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        words = [f"index pages of {self.cache_dtype} from {self.dtype} stride={self.page_stride}"]
        words += ["power of two"] * self.power_of_two + ["no pdl"] * (not self.pdl)
        return " ".join(words)

    @property
    def element(self) -> str:
        """The type of the cache as launches name it."""
        return _element(self.cache_dtype)

    def for_target(self, target: str) -> PageWriterSpec:
        """The same with what kernels for a target ("sm_90") may use."""
        return replace(self, pdl=supports_dependent_launch(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers choose the type of the slots: int32 or int64."""
        return {"slots": SLOT_DTYPES}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The cache, then keys and slots of a call."""
        unit = 16 // DTYPES[self.dtype].itemsize
        return (
            Operand("cache", "u8", (ANY_SIZE,), is_written=True),
            Operand("keys", self.dtype, (NUM_TOKENS, HEAD_SIZE), has_stride=True, row_unit=unit),
            Operand("slots", dict(flags)["slots"], (NUM_TOKENS,), is_aligned=False),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """None is needed."""
        del num_tokens
        return ()

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.indexer.plan`."""
        from firesteel.indexer.plan import select_write

        return select_write(self, num_tokens, flags)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return _fields_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """The top_k keys of each of a request's rows, over pages. The count of a call is of requests.

    Fields
        num_heads    H, 8 to 64
        top_k        512, 1024 or 2048
        rows         rows a request: its token and its drafts, 1 to 8
        width        columns of the page table, which limits a request to width * 64 keys
        cache_dtype  of the cache and of q: e4m3, bf16 or fp16
        page_stride  bytes from page to page, a multiple of 16; 0 for those of a page alone
        has_slots    whether slots of the cache are wanted beside positions
        has_scores   whether the selected scores are
        is_filtered  whether scores too low to be selected are dropped first: faster of many keys,
                     and the same bits; None leaves it to the plan (`firesteel.indexer.plan`)
        pdl          programmatic dependent launch
        wgmma        kernels may be those that only sm_90 runs; needs Triton 3.6 or later

    Raises
        InvalidArgumentError, UnsupportedError: a field that no kernel takes.
    """

    num_heads: int
    top_k: int
    width: int
    rows: int = 1
    cache_dtype: str = "e4m3"
    page_stride: int = 0
    has_slots: bool = False
    has_scores: bool = False
    is_filtered: bool | None = None
    pdl: bool = True
    wgmma: bool = field(default_factory=has_gluon)

    def __post_init__(self) -> None:
        _check_heads(self.num_heads, self.top_k)
        _check_range("rows", self.rows, 1, MAX_ROWS)
        _check_range("width", self.width, 1, MAX_KEYS // PAGE_TOKENS)
        _check_flags(self, "has_slots", "has_scores", "pdl", "wgmma")
        check_wgmma(self.wgmma)
        chosen: Any = self.is_filtered
        if chosen is not None and not isinstance(chosen, bool):
            raise InvalidArgumentError(f"is_filtered: got {chosen!r}, must be None, True or False")
        _set_pages(self)

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        words = [
            f"indexer decode H={self.num_heads} top_k={self.top_k} rows={self.rows} "
            f"width={self.width} {self.cache_dtype} stride={self.page_stride}"
        ]
        if self.is_filtered is not None:
            words.append("filtered" if self.is_filtered else "not filtered")
        words += ["slots"] * self.has_slots + ["scores"] * self.has_scores
        words += ["no pdl"] * (not self.pdl) + ["no wgmma"] * (not self.wgmma)
        return " ".join(words)

    @property
    def capacity(self) -> int:
        """Most keys of a request."""
        return self.width * PAGE_TOKENS

    @property
    def element(self) -> str:
        """The type of the cache as launches name it."""
        return _element(self.cache_dtype)

    def for_target(self, target: str) -> DecodeSpec:
        """The same with what kernels for a target ("sm_90") may use.

        Raises
            UnsupportedError: 16-bit queries of a request that an sm_120 has no shared memory for.
        """
        is_wide = self.cache_dtype != "e4m3" and self.num_heads > 32 and self.rows > 4
        if is_wide and target == "sm_120":
            raise UnsupportedError(
                f"rows: got {self.rows} of {self.num_heads} heads in {self.cache_dtype}, must be "
                "at most 4 on sm_120: their queries do not fit its shared memory"
            )
        return replace(self, pdl=supports_dependent_launch(target), wgmma=supports_wgmma(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers vary nothing but the number of requests."""
        return {}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The cache, then q, w, page_table, seq_lens of a call, and its outputs."""
        del flags
        n, h = self.rows, self.num_heads
        return (
            Operand("cache", "u8", (ANY_SIZE,)),
            Operand("q", self.element, (NUM_TOKENS, n, h, HEAD_SIZE)),
            Operand("w", "fp32", (NUM_TOKENS, n, h), is_aligned=False),
            Operand(
                "page_table", "i32", (NUM_TOKENS, self.width), has_stride=True, is_aligned=False
            ),
            Operand("seq_lens", "i32", (NUM_TOKENS,), is_aligned=False),
            *_outputs((NUM_TOKENS, n, self.top_k), slots=self.has_slots, scores=self.has_scores),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """What the launches of a call leave to each other: at most `MAX_WORKSPACE` bytes."""
        from firesteel.indexer.plan import decode_workspace

        return decode_workspace(self, num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.indexer.plan`."""
        del flags
        from firesteel.indexer.plan import select_decode

        return select_decode(self, num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return _fields_of(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """The top_k keys of each row, of the row's own range. The count of a call is of rows.

    Keys are contiguous: `keys [num_keys, 128]`, of e4m3 `key_scales [num_keys]`, rows from
    `k_start` to `k_end`. Or, with a width, they are in pages: row r has keys 0 to `k_end` of
    request `row_request[r]`, and those of one request stand together.

    Fields
        num_heads, top_k, has_scores, pdl, wgmma  as `DecodeSpec`'s
        num_keys      of contiguous keys; None where they are in pages
        width         columns of the page table; None where keys are contiguous
        num_requests  rows of the page table, whose values may change in place; with a width
        cache_dtype   of the keys and of q: e4m3, bf16 or fp16
        page_stride   bytes from page to page, a multiple of 16; 0 for those of a page alone, and
                      without a width
        has_slots     as `DecodeSpec`'s; with a width

    Raises
        InvalidArgumentError, UnsupportedError: a field that no kernel takes.
    """

    num_heads: int
    top_k: int
    num_keys: int | None = None
    width: int | None = None
    num_requests: int = 1
    cache_dtype: str = "e4m3"
    page_stride: int = 0
    has_slots: bool = False
    has_scores: bool = False
    pdl: bool = True
    wgmma: bool = field(default_factory=has_gluon)

    def __post_init__(self) -> None:
        _check_heads(self.num_heads, self.top_k)
        if (self.num_keys is None) == (self.width is None):
            raise InvalidArgumentError(
                f"num_keys, width: got {self.num_keys} and {self.width}, must be one of them"
            )
        _check_flags(self, "has_slots", "has_scores", "pdl", "wgmma")
        check_wgmma(self.wgmma)
        _check_range("num_requests", self.num_requests, 1, 1 << 24)
        _set_pages(self)
        if self.num_keys is None:
            _check_range("width", self.width, 1, MAX_KEYS // PAGE_TOKENS)
            return
        _check_range("num_keys", self.num_keys, 1, MAX_KEYS)
        if self.has_slots:
            raise UnsupportedError("has_slots: got True, must be False of contiguous keys")
        # What only pages have: another value would be passed over.
        for name, only in (("num_requests", 1), ("page_stride", page_bytes(self.cache_dtype))):
            value = getattr(self, name)
            if value != only:
                raise InvalidArgumentError(
                    f"{name}: got {value}, must be left out of contiguous keys"
                )

    @property
    def title(self) -> str:
        """One line for tables and logs."""
        where = f"width={self.width} requests={self.num_requests} {self.cache_dtype} "
        where += f"stride={self.page_stride}"
        if self.width is None:
            where = f"keys={self.num_keys} {self.cache_dtype}"
        words = [f"indexer prefill H={self.num_heads} top_k={self.top_k} {where}"]
        words += ["slots"] * self.has_slots + ["scores"] * self.has_scores
        words += ["no pdl"] * (not self.pdl) + ["no wgmma"] * (not self.wgmma)
        return " ".join(words)

    @property
    def capacity(self) -> int:
        """Where ranges end at the latest."""
        return self.num_keys or (self.width or 0) * PAGE_TOKENS

    @property
    def element(self) -> str:
        """The type of the cache as launches name it."""
        return _element(self.cache_dtype)

    def for_target(self, target: str) -> PrefillSpec:
        """The same with what kernels for a target ("sm_90") may use."""
        return replace(self, pdl=supports_dependent_launch(target), wgmma=supports_wgmma(target))

    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Callers vary nothing but the number of rows."""
        return {}

    def operands(self, flags: Flags) -> tuple[Operand, ...]:
        """The keys, then q, w and ranges of a call, and its outputs."""
        del flags
        rows, h = (NUM_TOKENS,), self.num_heads
        if self.width is None:
            assert self.num_keys is not None
            keys = [Operand("keys", self.element, (self.num_keys, HEAD_SIZE))]
            if self.cache_dtype == "e4m3":
                keys.append(Operand("key_scales", "fp32", (self.num_keys,)))
            start = Operand("k_start", "i32", rows, is_aligned=False)
        else:
            table = (self.num_requests, self.width)
            keys = [
                Operand("cache", "u8", (ANY_SIZE,)),
                Operand("page_table", "i32", table, is_aligned=False),
            ]
            start = Operand("row_request", "i32", rows, is_aligned=False)
        return (
            *keys,
            Operand("q", self.element, (NUM_TOKENS, h, HEAD_SIZE)),
            Operand("w", "fp32", (NUM_TOKENS, h), is_aligned=False),
            start,
            Operand("k_end", "i32", rows, is_aligned=False),
            *_outputs((NUM_TOKENS, self.top_k), slots=self.has_slots, scores=self.has_scores),
        )

    def workspace(self, num_tokens: int) -> tuple[Region, ...]:
        """Scores and candidates of a slice of rows."""
        from firesteel.indexer.plan import prefill_workspace

        return prefill_workspace(self, num_tokens)

    def select(self, num_tokens: int, flags: Flags) -> tuple[Launch, ...]:
        """The launches of a call; see `firesteel.indexer.plan`."""
        del flags
        from firesteel.indexer.plan import select_prefill

        return select_prefill(self, num_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return _fields_of(self)
