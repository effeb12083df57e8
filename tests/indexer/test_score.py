"""Scores against float64, within a derived bound; what is missing; what lies far."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from firesteel.indexer.reference import decode_scores_reference, score_bound_reference
from firesteel.indexer.score import decode_scores_kernel
from tests.indexer.kernels import Decode, Selection, decode_case, run_scores, views
from tests.moe.kernels import launch, run_on_nothing
from tests.moe.sparse import at, sparse_memory

pytestmark = pytest.mark.interpret


def check_scores(case: Decode, scores: Tensor) -> None:
    """Each live score, holes included; what no page reaches is as it was."""
    values, scales = case.pages
    wanted = decode_scores_reference(case.q, case.w, values, scales, case.page_table, case.seq_lens)
    for row, length in enumerate(case.lengths()):
        b, j = divmod(row, case.rows)
        expected, found = wanted[b][j], scores[row, :length].double()
        assert len(expected) == length
        assert torch.equal(expected.isnan(), found.isnan())
        assert torch.equal(expected.isneginf(), found.isneginf())
        for start in range(0, length, 64):
            page = int(case.page_table[b, start // 64])
            if page < 0:
                continue
            here = slice(start, min(start + 64, length))
            page_scales = None if scales is None else scales[page]
            bound = score_bound_reference(case.q[b, j], case.w[b, j], values[page], page_scales)
            error = (found[here] - expected[here]).abs()
            is_number = ~expected[here].isnan()
            assert (error <= bound[: len(error)])[is_number].all()
        live = -(-max(case.lengths()[b * case.rows : (b + 1) * case.rows]) // 64) * 64
        assert (scores[row, live:].view(torch.int32) == -1).all()


@pytest.mark.parametrize("rows", range(1, 9))
def test_scores_lie_within_their_bound(rows: int) -> None:
    heads = (8, 64, 16, 24, 32, 8, 9, 16)[rows - 1]
    lens = [150, 0, rows, 64, 2**31 - 1]
    check_scores(case := decode_case(lens, rows=rows, heads=heads, missing=0.2), run_scores(case))


@pytest.mark.parametrize(("rows", "heads"), [(1, 9), (6, 8)])
def test_scores_of_16_bit_keys(rows: int, heads: int) -> None:
    kind = {"cache_dtype": "fp16", "page_stride": 16400, "missing": 0.2}
    case = decode_case([150, 0, 192], rows=rows, heads=heads, **kind)
    check_scores(case, run_scores(case))


def test_a_nan_key_is_its_score_whatever_heads_and_weights_are() -> None:
    """Of a head whose product is negative, which relu drops, and of weights that are 0."""
    case = decode_case([64], heads=9, cache_dtype="fp16", is_exact=True)
    case.q.fill_(-1)
    case.pages[0].fill_(1)
    case.pages[0][:, ::2, 5] = math.nan
    case.w.zero_()
    assert run_scores(case)[0, :64].isnan().tolist() == [True, False] * 32


def test_lengths_that_are_negative_are_none() -> None:
    case = decode_case([-1, -(2**31), 5], rows=8)
    scores = run_scores(case)
    check_scores(case, scores)
    assert (scores[:16].view(torch.int32) == -1).all()


def test_any_split_and_batch_has_the_same_bits() -> None:
    case = decode_case([190, 40, 129], rows=3, missing=0.1)
    whole = run_scores(case, programs=1).view(torch.int32)
    for programs in (2, 3, 7):
        assert torch.equal(run_scores(case, programs=programs).view(torch.int32), whole)
    for b in range(3):
        one = replace(
            case,
            q=case.q[b : b + 1],
            w=case.w[b : b + 1],
            page_table=case.page_table[b : b + 1],
            seq_lens=case.seq_lens[b : b + 1],
        )
        assert torch.equal(run_scores(one).view(torch.int32), whole[3 * b : 3 * b + 3])


@pytest.mark.parametrize(("rows", "heads", "programs"), [(1, 16, 2), (6, 8, 4)])
def test_maxima_are_those_of_each_row_s_keys(rows: int, heads: int, programs: int) -> None:
    """Of every program's pages, holes and keys past a row's length left out."""
    case = decode_case([150, 0, 320, 3], rows=rows, heads=heads, width=5, missing=0.2)
    found = run_scores(case, programs=programs, with_maxima=True)
    scores, maxima = found[:, :320], found[:, 320:]
    wanted = Selection(scores, case.seq_lens, rows=rows).maxima(programs).flatten(1)
    assert torch.equal(maxima.view(torch.int32), wanted.view(torch.int32))
    alone = run_scores(case, programs=1)
    assert torch.equal(scores.view(torch.int32), alone.view(torch.int32))


def test_pages_past_2_31_bytes() -> None:
    """As serving lays them out: stride 1,077,120 and page ids of 2000 and more."""
    page_stride, pages = 1_077_120, [2047, 2100, 3]
    memory = sparse_memory(2101 * page_stride)
    near = decode_case([192], rows=2)
    values, scales = near.pages
    for place, page in enumerate(pages):
        start = page * page_stride
        at(memory, start, 8192, torch.float8_e4m3fn).copy_(values[place].flatten())
        at(memory, start + 8192, 64, torch.float32).copy_(scales[place])
    cache = at(memory, 0, 8448, torch.uint8)
    far = replace(
        near,
        cache=cache,
        page_table=torch.tensor([pages], dtype=torch.int32),
        page_stride=page_stride,
    )
    near = replace(near, page_table=torch.tensor([[0, 1, 2]], dtype=torch.int32))
    # The cache is not copied into guards: it only seems large.
    found = _run_in_place(far)
    assert torch.equal(found.view(torch.int32), run_scores(near).view(torch.int32))


def _run_in_place(case: Decode) -> Tensor:
    scores = torch.empty(case.num_rows, case.width * 64)
    launch(
        *(decode_scores_kernel, (1, 2), case.q, case.w, *views(case.cache)),
        *(case.page_table, case.seq_lens, scores, None, None, case.width, case.page_stride // 16),
        *(case.width, scores.stride(0) // 64, 0),
        **case.tile,
    )
    return scores


def test_scores_past_the_range_of_fp16() -> None:
    case = decode_case([64], heads=64)
    case = replace(case, w=case.w.abs() * 1e30)
    scores = run_scores(case)
    check_scores(case, scores)
    assert scores[:, :64].nan_to_num(0).abs().max() > 1e30
    assert math.isfinite(scores[:, :64].nan_to_num(0).abs().max())


def test_empty_work_ends() -> None:
    constants = {"H": 8, "ROWS": 1, "ROW_BLOCK": 2, "REST_BLOCK": 0, "HEAD_BLOCK": 8, "STAGES": 2}
    constants |= {"SPLIT": 1, "PTX": False}
    run_on_nothing(
        decode_scores_kernel, num_pointers=9, num_integers=5, dtypes={}, absent=set(), **constants
    )
