"""A sweep of small calls on a GPU, for tools that watch every access.

    compute-sanitizer --tool memcheck python -m tests.indexer.sweep
    compute-sanitizer --tool racecheck python -m tests.indexer.sweep filtered sliced

Each route runs on ragged lengths with missing pages, and what it selects is compared with the
float64 oracle.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from firesteel.device import device_target
from firesteel.indexer import plan as chooser
from firesteel.indexer.pages import page_bytes
from firesteel.indexer.reference import (
    decode_scores_reference,
    range_scores_reference,
    top_k_reference,
)
from firesteel.indexer.spec import PageWriterSpec, PrefillSpec
from firesteel.launch import plan, prewarm
from tests.indexer.gpu import decode, run, spec_of
from tests.indexer.kernels import decode_case, key_scales, numbers, weights

LENS = [0, 1, -3, 511, 513, 1500, 2**31 - 1]
WIDTH = 33


def decoded(cache_dtype: str, rows: int, heads: int, *, is_filtered: bool = False) -> bool:
    """Whether a decode selects what the oracle does."""
    kind = {"width": WIDTH, "missing": 0.1, "cache_dtype": cache_dtype}
    case = decode_case(LENS, rows=rows, heads=heads, is_exact=True, **kind)
    scores = decode_scores_reference(case.q, case.w, *case.pages, case.page_table, case.seq_lens)
    spec = spec_of(case, 512, is_filtered=is_filtered)
    target = device_target(torch.device("cuda", 0))
    # A plan of its own, since `sliced` changes what is chosen.
    ready = prewarm(plan(spec.for_target(target), len(LENS)))
    found = decode(case, spec, ready=ready)["indices"].flatten(0, 1)
    wanted = [row for request in scores for row in request]
    return _are_selected(found, wanted)


def sliced() -> bool:
    """Whether a decode does whose scores fit the workspace a request at a time."""
    with patch.object(chooser, "decode_slice", lambda _: 1):
        return decoded("e4m3", 3, 16, is_filtered=True)


def prefilled(cache_dtype: str) -> bool:
    """Whether a prefill of contiguous keys does."""
    generator = torch.Generator().manual_seed(3)
    types = {"generator": generator, "is_exact": True, "cache_dtype": cache_dtype}
    start = torch.randint(-5, 1500, (21,), generator=generator).int()
    given = {
        "keys": numbers(1501, 128, **types),
        "q": numbers(21, 32, 128, **types),
        "w": weights(21, 32, generator=generator, is_exact=True),
        "k_start": start,
        "k_end": start + torch.randint(-3, 1500, (21,), generator=generator).int(),
    }
    if cache_dtype == "e4m3":
        given["key_scales"] = key_scales(1501, generator=generator, is_exact=True)
    spec = PrefillSpec(num_heads=32, top_k=512, num_keys=1501, cache_dtype=cache_dtype)
    found = run(spec, 21, given)["indices"]
    ranges = list(zip(start.tolist(), given["k_end"].tolist(), strict=True))
    keys = (given["q"], given["w"], given["keys"], given.get("key_scales"))
    return _are_selected(found, range_scores_reference(*keys, ranges))


def written(cache_dtype: str) -> bool:
    """Whether writing keys changes their slots, and no other byte."""
    size = page_bytes(cache_dtype)
    given = {
        "keys": torch.ones(9, 128),
        "slots": torch.tensor([0, 63, 64, -1, 127, 5, 70, 65, 66]),
        "cache": torch.full((2 * size,), 0x7F, dtype=torch.uint8),
    }
    spec = PageWriterSpec(dtype="fp32", cache_dtype=cache_dtype)
    found = run(spec, 9, given, slots="i64")["cache"]
    return 0 < int((found != 0x7F).sum()) <= 8 * (size // 64)


def _are_selected(found: Tensor, wanted: Sequence[Tensor]) -> bool:
    return all(
        found[row].tolist() == top_k_reference(scores.tolist(), found.shape[1])
        for row, scores in enumerate(wanted)
    )


SWEEPS = {
    "tiled": lambda: decoded("e4m3", 6, 32),
    "tiled-bf16": lambda: decoded("bf16", 1, 9),
    "filtered": lambda: decoded("e4m3", 6, 32, is_filtered=True),
    "filtered-bf16": lambda: decoded("bf16", 2, 64, is_filtered=True),
    "sliced": sliced,
    "prefill": lambda: prefilled("e4m3"),
    "prefill-fp16": lambda: prefilled("fp16"),
    "write": lambda: written("e4m3"),
    "write-bf16": lambda: written("bf16"),
}


def main(names: Sequence[str]) -> int:
    """Run as a command, on the sweeps that are named, or on all."""
    failed = [name for name in names or SWEEPS if not SWEEPS[name]()]
    sys.stdout.write(f"{len(names or SWEEPS)} sweeps, wrong: {', '.join(failed) or 'none'}\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
