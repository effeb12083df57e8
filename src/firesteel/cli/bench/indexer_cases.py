"""The cases of `firesteel bench indexer`: how many rows, which keys they see, and their floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from firesteel.cli.bench.moe import BANDWIDTH
from firesteel.errors import InvalidArgumentError
from firesteel.indexer.pages import CACHE_DTYPES, HEAD_SIZE, PAGE_TOKENS
from firesteel.indexer.spec import DecodeSpec, PrefillSpec

__all__ = ["CASES", "MODES", "Case", "chosen_cases"]

MODES = ("decode", "prefill")
ROUTES = {"auto": None, "filtered": True, "tiled": False}
"""To `DecodeSpec.is_filtered`."""
# By the type of the cache's keys: bytes of a key with its scale, and operations a second that
# products of that type reach on an H200.
KEY_BYTES = {"e4m3": HEAD_SIZE + 4, "bf16": 2 * HEAD_SIZE, "fp16": 2 * HEAD_SIZE}
MATRIX_RATE = {"e4m3": 1500e12, "bf16": 750e12, "fp16": 750e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One shape of a call, with every request at the same context.

    Row j of the n rows of a request sees its first `context - (n - 1 - j)` keys: a decode's drafts,
    and the rows of a prefill, which are the context's last.

    Fields
        name         as in CASES; of one's own, its numbers
        mode         "decode" (keys in pages), or "prefill" (one request, keys contiguous)
        requests     of a call
        rows         of each request
        heads        H
        context      keys of each request
        top_k        keys selected of each row
        cache_dtype  of keys
        route        key of ROUTES: of a decode whose scores fit the workspace
    """

    name: str
    mode: str = "decode"
    requests: int = 8
    rows: int = 6
    heads: int = 32
    context: int = 131072
    top_k: int = 2048
    cache_dtype: str = "e4m3"
    route: str = "auto"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("--mode", self.mode, MODES),
            ("--cache-dtype", self.cache_dtype, tuple(KEY_BYTES)),
            ("--route", self.route, tuple(ROUTES)),
        ):
            if value not in allowed:
                raise InvalidArgumentError(
                    f"{option}: got {value!r}, must be one of {', '.join(allowed)}"
                )
        for option, value in (
            ("--requests", self.requests),
            ("--rows", self.rows),
            ("--context", self.context),
        ):
            if value < 1:
                raise InvalidArgumentError(f"{option}: got {value}, must be 1 or more")
        if self.mode == "prefill" and self.requests != 1:
            raise InvalidArgumentError(
                f"--requests: got {self.requests}, must be 1 with --mode prefill"
            )
        if self.rows > self.context:
            raise InvalidArgumentError(
                f"--rows: got {self.rows}, must be at most --context, {self.context}"
            )

    @property
    def count(self) -> int:
        """What a plan counts: requests of a decode, rows of a prefill."""
        return self.requests if self.mode == "decode" else self.rows

    @property
    def width(self) -> int:
        """Pages of a request."""
        return -(-self.context // PAGE_TOKENS)

    def spec(self, *, has_scores: bool = False) -> DecodeSpec | PrefillSpec:
        """What is planned.

        Raises
            InvalidArgumentError, UnsupportedError: no kernel takes it.
        """
        if self.mode == "prefill":
            return PrefillSpec(
                num_heads=self.heads,
                top_k=self.top_k,
                num_keys=self.context,
                cache_dtype=self.cache_dtype,
                has_scores=has_scores,
            )
        return DecodeSpec(
            num_heads=self.heads,
            top_k=self.top_k,
            width=self.width,
            rows=self.rows,
            cache_dtype=self.cache_dtype,
            has_scores=has_scores,
            is_filtered=ROUTES[self.route],
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of q and keys."""
        return CACHE_DTYPES[self.cache_dtype]

    @property
    def key_bytes(self) -> int:
        """Of all requests' keys, read once."""
        return self.requests * self.context * KEY_BYTES[self.cache_dtype]

    @property
    def operations(self) -> int:
        """Of the products of rows with the keys that they see: no padding, no masked key."""
        pairs = self.rows * self.context - self.rows * (self.rows - 1) // 2
        return 2 * HEAD_SIZE * self.heads * self.requests * pairs

    def floor(self) -> tuple[float, str]:
        """Microseconds in which no version can run, and what takes them."""
        rate = MATRIX_RATE[self.cache_dtype]
        return max(
            (self.key_bytes / BANDWIDTH * 1e6, f"keys read once at {BANDWIDTH / 1e12:g} TB/s"),
            (self.operations / rate * 1e6, f"products at {rate / 1e12:g} TFLOP/s"),
        )


_CONTEXTS = {"8k": 8192, "32k": 32768, "131k": 131072, "524k": 524288, "1m": 1048576}


def _cases(
    kind: str, contexts: str, *, mode: str, requests: int, rows: int, heads: int
) -> list[Case]:
    return [
        Case(
            name=f"{kind}-{context}",
            mode=mode,
            requests=requests,
            rows=rows,
            heads=heads,
            context=_CONTEXTS[context],
        )
        for context in contexts.split()
    ]


CASES = {
    case.name: case
    for case in (
        *_cases("turnkey", "8k 32k 131k 524k 1m", mode="decode", requests=8, rows=6, heads=32),
        *_cases("one", "8k 131k", mode="decode", requests=1, rows=1, heads=64),
        *_cases("batch", "8k 131k", mode="decode", requests=48, rows=1, heads=64),
        *_cases("prefill", "32k 131k 1m", mode="prefill", requests=1, rows=3072, heads=32),
    )
}
"""By name. turnkey: GLM-5.2's 32 heads, 8 requests of a token and 5 drafts; the others as named."""


def chosen_cases(
    names: str | None, own: Mapping[str, str | int | None], every: Mapping[str, str]
) -> tuple[Case, ...]:
    """What is measured: cases by name, one of one's own, or, where neither is given, all.

    Args:
        names: with commas between.
        own: fields of a case by name; None of those that were not given.
        every: fields that all cases take.

    Raises
        InvalidArgumentError: there is no such case, or both kinds are given.
    """
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    shared: dict[str, Any] = dict(every)
    if not given:
        found = tuple(CASES.values()) if names is None else _named(names)
        return tuple(replace(case, **shared) for case in found)
    if names is not None:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidArgumentError(f"--case: got {names!r}, must not be given with {options}")
    if given.get("mode") == "prefill":
        given = {"requests": 1, "rows": 3072, **given}
    case = Case(name="", **given, **shared)
    name = f"{case.mode}-{case.requests}x{case.rows}-h{case.heads}-k{case.top_k}-{case.context}"
    return (replace(case, name=name),)


def _named(names: str) -> tuple[Case, ...]:
    found: list[Case] = []
    for name in names.split(","):
        if name.strip() not in CASES:
            raise InvalidArgumentError(f"--case: got {name!r}, must be one of {', '.join(CASES)}")
        found.append(CASES[name.strip()])
    return tuple(found)
