"""Selection against its oracle, exactly, on the inputs on which others fail."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.indexer.filter import filter_kernel
from firesteel.indexer.reference import top_k_reference
from firesteel.indexer.select import select_kernel
from tests.indexer.kernels import Selection
from tests.moe.kernels import run_on_nothing

pytestmark = pytest.mark.interpret

KINDS = (
    *("plain", "narrow", "mostly zero", "all equal", "ascending", "descending", "holes"),
    *("signed zeros", "bits", "huge"),
)


def scores_of(kind: str, count: int, generator: torch.Generator) -> Tensor:
    found = torch.randn(count, generator=generator)
    drawn = torch.rand(count, generator=generator)
    if kind == "narrow":
        return 1 + 1e-5 * found
    if kind == "mostly zero":
        return torch.where(drawn < 0.9, 0.0, found)
    if kind == "all equal":
        return torch.full((count,), 0.25)
    if kind in ("ascending", "descending"):
        return found.sort(descending=kind == "descending").values
    if kind == "holes":
        holes = torch.tensor([math.nan, -math.inf, -torch.finfo(torch.float32).max, math.inf])
        chosen = holes[torch.randint(0, 4, (count,), generator=generator)]
        return torch.where(drawn < 0.7, chosen, found)
    if kind == "signed zeros":
        return torch.where(drawn < 0.5, 0.0, -0.0)
    if kind == "bits":
        # Any 32 bits: subnormals, NaN of either sign.
        words = torch.randint(-(2**31), 2**31, (count,), generator=generator)
        return words.int().view(torch.float32)
    return found * 1e38 if kind == "huge" else found


def check(selection: Selection, lengths: list[int], **filtered: int) -> None:
    """By select; with the sizes of a filter by that."""
    found = selection.run_filter(**filtered) if filtered else selection.run()
    for row, length in enumerate(lengths):
        scores = selection.scores[row, :length]
        wanted = top_k_reference(scores.tolist(), selection.top_k)
        assert found.indices[row].tolist() == wanted
        there = [t for t in wanted if t >= 0]
        table = selection.page_table[row // selection.rows].tolist()
        slots = [64 * table[t // 64] + t % 64 for t in there]
        assert found.slots[row].tolist() == slots + [-1] * (len(wanted) - len(there))
        # -0 is 0, by its bits too.
        selected = [float(scores[t]) + 0.0 for t in there]
        holes = [-math.inf] * (len(wanted) - len(there))
        assert found.scores[row].tolist() == selected + holes


@given(
    kind=st.sampled_from(KINDS),
    pages=st.integers(1, 6),
    span=st.sampled_from((64, 128, 512)),
    rows=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=16)
def test_selection_is_the_oracle_s(kind: str, pages: int, span: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    capacity = 64 * pages
    scores = torch.stack([scores_of(kind, capacity, generator) for _ in range(rows)])
    last = int(torch.randint(0, capacity + 4, (1,), generator=generator))
    lengths = [min(max(last - (rows - 1 - row), 0), capacity) for row in range(rows)]
    seq_lens = torch.tensor([last], dtype=torch.int32)
    check(Selection(scores, seq_lens, rows=rows, span=span), lengths)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 191, 192])
@pytest.mark.parametrize("kind", ["all equal"])
def test_each_length_around_a_boundary(length: int, kind: str) -> None:
    scores = scores_of(kind, 192, torch.Generator().manual_seed(length))[None]
    # Past the row's length stands what would be selected first.
    scores[:, length:] = math.inf
    check(Selection(scores, torch.tensor([length], dtype=torch.int32)), [length])
    if length <= 16:
        found = Selection(scores, torch.tensor([length], dtype=torch.int32)).run()
        assert found.indices[0].tolist() == [*range(length), *[-1] * (16 - length)]


@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1])
def test_lengths_are_clamped(length: int) -> None:
    scores = torch.randn(2, 128, generator=torch.Generator().manual_seed(2))
    lengths = [min(max(length - 1, 0), 128), min(max(length, 0), 128)]
    check(Selection(scores, torch.tensor([length], dtype=torch.int32), rows=2), lengths)


@given(
    kind=st.sampled_from(KINDS),
    pages=st.integers(1, 8),
    sizes=st.sampled_from(((1, 1, 1, 64), (2, 1, 2, 64), (2, 2, 4, 128), (4, 1, 3, 256))),
    rows=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12)
def test_filter_is_the_oracle_s(
    kind: str, pages: int, sizes: tuple[int, ...], rows: int, seed: int
) -> None:
    """Where few pass the bound, and where more do than are held: narrow, equal, mostly zero."""
    generator = torch.Generator().manual_seed(seed)
    capacity = 64 * pages
    scores = torch.stack([scores_of(kind, capacity, generator) for _ in range(rows)])
    last = int(torch.randint(-1, capacity + 4, (1,), generator=generator))
    lengths = [min(max(last - (rows - 1 - row), 0), capacity) for row in range(rows)]
    selection = Selection(scores, torch.tensor([last], dtype=torch.int32), rows=rows)
    names = ("columns", "shares", "parts", "chunk")
    check(selection, lengths, **dict(zip(names, sizes, strict=True)))


@pytest.mark.parametrize("kind", ["plain", "all equal"])
@pytest.mark.parametrize("length", [0, 16, 17, 65])
def test_filter_at_each_length_around_a_boundary(kind: str, length: int) -> None:
    scores = scores_of(kind, 128, torch.Generator().manual_seed(length))[None]
    scores[:, length:] = math.inf
    check(Selection(scores, torch.tensor([length], dtype=torch.int32)), [length], parts=2)


def test_filter_drops_what_is_below_its_bound() -> None:
    """Of 16 pages of random scores so few are left that all fit; a run through all would too."""
    generator = torch.Generator().manual_seed(11)
    selection = Selection(torch.randn(1, 1024, generator=generator), torch.tensor([1024]).int())
    selection.run_filter(columns=4, parts=4, final=64)
    assert 16 <= selection.num_kept <= 32


def test_the_example_of_the_kernel() -> None:
    scores = torch.tensor([[5, 1, 7, 7, 9, math.nan] + [0.0] * 58])
    found = Selection(scores, torch.tensor([6], dtype=torch.int32), top_k=2, span=4).run()
    assert found.indices.tolist() == [[2, 4]]


@pytest.mark.parametrize("top_k", [512, 1024, 2048])
def test_the_sizes_that_ship(top_k: int) -> None:
    """One span of 16384, and two of them folded; any 32 bits, and every score one of few."""
    generator = torch.Generator().manual_seed(top_k)
    bits, few = (scores_of("bits", 16448, generator) for _ in range(2))
    scores = torch.stack([bits, (few.nan_to_num(0) > 1).float()])
    lens = torch.tensor([16448, 16384], dtype=torch.int32)
    check(Selection(scores, lens, top_k=top_k, span=16384), lens.tolist())


def test_empty_work_ends() -> None:
    sizes = {"SHARES": 1, "GROUPS": 64, "MAX_PARTS": 2, "FINAL": 64, "CHUNK": 64}
    sizes |= {"WARPS": 1, "PTX": False}
    run_on_nothing(
        *(filter_kernel,),
        **{"num_pointers": 10, "num_integers": 6, "dtypes": {2: torch.int64}, "absent": set()},
        **{"ROWS": 3, "TOP_K": 16, **sizes},
    )
    constants = {"ROWS": 3, "TOP_K": 16, "SPAN": 64, "BEFORE": 64, "LEVEL": 0, "IS_ONE": True}
    constants |= {"WARPS": 1, "PTX": False}
    run_on_nothing(
        select_kernel, num_pointers=8, num_integers=5, dtypes={}, absent=set(), **constants
    )
