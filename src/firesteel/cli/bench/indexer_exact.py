"""Whether the indexer's selections are right, on the spec and the shape that are timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.cli.bench.indexer_cases import Case
from firesteel.cli.bench.indexer_checks import (
    bound_fault,
    difference,
    layout_fault,
    score_bound,
    score_fault,
)
from firesteel.cli.bench.indexer_inputs import Inputs, exact_inputs
from firesteel.cli.bench.indexer_operation import Call, Operation
from firesteel.cli.bench.indexer_torch import blocks, exact_selection
from firesteel.cli.bench.timing import captured
from firesteel.indexer.spec import DecodeSpec, PrefillSpec

__all__ = ["Found", "verify"]

Ready = Callable[[DecodeSpec | PrefillSpec, int], Operation]
"""Makes a spec ready for so many requests or rows."""


@dataclass
class Found:
    """What the checks of a case saw.

    Fields
        differs         the first fault, in words; None where all is right
        rows_exact      rows whose exact selection was compared, of both kinds of exact inputs
        rows_bounded    rows of the timed inputs whose selection was compared with float64
        tied_rows       rows of exact inputs of whose k-th score there were more keys than wanted
        score_error     of selected scores, the largest distance from float64 as a part of the sum
                        of the magnitudes; None where the checks ended before
        baseline_fault  what is wrong with torch's selection by the same bound
    """

    differs: str | None = None
    rows_exact: int = 0
    rows_bounded: int = 0
    tied_rows: int = 0
    score_error: float | None = None
    baseline_fault: str | None = None


def verify(
    case: Case,
    operation: Operation,
    ready: Ready,
    inputs: Sequence[Inputs],
    *,
    baseline: Tensor | None = None,
) -> Found:
    """All checks, until one fails.

    Args:
        operation: the one that is timed.
        inputs: of the calls that are timed; two at least.
        baseline: what torch selects of the first call, `[R, k]` in any order.
    """
    found, device = Found(), inputs[0]["q"].device
    for faults in (
        _exact(case, operation, device, found),
        _repeated(case, operation, ready, inputs),
        _bounded(case, operation, ready, inputs[0], baseline, found),
    ):
        for fault in faults:
            if fault is not None:
                found.differs = fault
                return found
    return found


def _rows(output: Tensor) -> Tensor:
    """`[R, k]` of a decode's `[B, n, k]` too."""
    return output.flatten(0, -2)


def _run(call: Call) -> Tensor:
    """The indices of a call, over what it wrote before."""
    for tensor in call.outputs.values():
        tensor.fill_(-77)
    call.run()
    return call.outputs["indices"].clone()


def _exact(
    case: Case, operation: Operation, device: torch.device, found: Found
) -> Iterator[str | None]:
    """Scores that nothing rounds: set, order, ties and tail must be the oracle's."""
    for is_ragged in (False, True):
        inputs = exact_inputs(case, device, is_ragged=is_ragged)
        indices = _rows(_run(operation.call(inputs)))
        kind = "ragged exact inputs" if is_ragged else "exact inputs"
        for block in blocks(inputs, is_exact=True):
            scores = block.scores(is_exact=True).scores
            wanted = exact_selection(scores, block.starts, case.top_k)
            found.tied_rows += _tied_rows(scores, case.top_k)
            found.rows_exact += len(block.rows)
            yield _named(kind, difference(indices[block.rows], wanted, block.rows))


def _tied_rows(scores: Tensor, top_k: int) -> int:
    """Rows of which more than top_k keys reach the k-th score."""
    if scores.shape[1] <= top_k:
        return 0
    least = scores.topk(top_k).values[:, -1:]
    reach = (scores >= least) & (scores > -math.inf)
    return int((reach.sum(dim=1) > top_k).sum())


def _repeated(
    case: Case, operation: Operation, ready: Ready, inputs: Sequence[Inputs]
) -> Iterator[str | None]:
    """Another run, a replay of a graph, and another batch give the same bits."""
    call = operation.call(inputs[0])
    first = _rows(_run(call))
    yield _named("a second run", difference(_rows(_run(call)), first))
    graph = captured([call.run])
    call.outputs["indices"].fill_(-77)
    graph.replay()
    yield _named("the replay of a graph", difference(_rows(call.outputs["indices"]), first))
    count, other, mine, same = _other_batch(case, inputs)
    indices = _rows(_run(ready(case.spec(), count).call(other)))
    what = "a call of another number of requests or rows"
    yield _named(what, difference(indices[mine], first[same]))


def _other_batch(case: Case, inputs: Sequence[Inputs]) -> tuple[int, Inputs, slice, slice]:
    """A call of another count: count, inputs, which of its rows, and which rows these were."""
    one = inputs[0]
    if case.mode == "prefill":
        # A third, so that programs have other rows, and as a rule share the keys of a row.
        count = max(1, case.rows // 3)
        part = {"q", "w", "k_start", "k_end"}
        if case.rows == 1:
            twice = {name: torch.cat((one[name], one[name])) for name in part}
            return 2, {**one, **twice}, slice(0, 1), slice(None)
        last = slice(case.rows - count, case.rows)
        return count, {**one, **{name: one[name][last] for name in part}}, slice(None), last
    part = {"q", "w", "page_table", "seq_lens"}
    if case.requests == 1:
        both = {name: torch.cat((one[name], inputs[1][name])) for name in part}
        return 2, {**one, **both}, slice(0, case.rows), slice(None)
    last = slice((case.requests - 1) * case.rows, None)
    return 1, {**one, **{name: one[name][-1:] for name in part}}, slice(None), last


def _bounded(
    case: Case,
    operation: Operation,
    ready: Ready,
    inputs: Inputs,
    baseline: Tensor | None,
    found: Found,
) -> Iterator[str | None]:
    """Scores that round: the selection is one of scores that lie within the bound of float64."""
    indices = _rows(_run(operation.call(inputs)))
    scored = ready(case.spec(has_scores=True), case.count).call(inputs)
    yield _named("with scores beside", difference(_rows(_run(scored)), indices))
    selected = _rows(scored.outputs["selected_scores"])
    found.score_error = 0.0
    for block in blocks(inputs):
        mine = indices[block.rows]
        found.rows_bounded += len(block.rows)
        yield layout_fault(mine, block.ends - block.starts, block.rows)
        of_rows = block.scores(has_magnitudes=True)
        scores, magnitudes = of_rows.scores, of_rows.magnitudes
        assert magnitudes is not None
        bound = score_bound(magnitudes, case.heads, case.cache_dtype)
        yield bound_fault(mine, scores, bound, block.starts, block.rows)
        fault, error = score_fault(
            *(selected[block.rows], mine, scores, magnitudes, block.starts),
            num_heads=case.heads,
            cache_dtype=case.cache_dtype,
            rows=block.rows,
        )
        found.score_error = max(found.score_error, error)
        yield fault
        if baseline is not None and found.baseline_fault is None:
            theirs = _padded(baseline[block.rows], case.top_k)
            found.baseline_fault = bound_fault(theirs, scores, bound, block.starts, block.rows)


def _padded(positions: Tensor, top_k: int) -> Tensor:
    """`[r, top_k]` with -1 where there are fewer."""
    missing = top_k - positions.shape[1]
    return torch.nn.functional.pad(positions, (0, missing), value=-1)


def _named(what: str, fault: str | None) -> str | None:
    return None if fault is None else f"{what}: {fault}"
