"""An `Operation` of `firesteel bench indexer` that selects on a CPU by the library's oracles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from firesteel.cli.bench.indexer_inputs import Inputs, poisoned_outputs
from firesteel.cli.bench.indexer_operation import Call
from firesteel.indexer.pages import PAGE_BYTES, page_views
from firesteel.indexer.reference import (
    decode_scores_reference,
    range_scores_reference,
    top_k_reference,
)
from firesteel.indexer.spec import DecodeSpec, PrefillSpec

CPU = torch.device("cpu")
Spoil = Callable[["FakeOperation", int, Inputs, Mapping[str, Tensor]], None]


def oracle_scores(inputs: Inputs) -> list[Tensor]:
    """Each row's scores in float64, of its own keys."""
    if "keys" in inputs:
        ranges = list(zip(inputs["k_start"].tolist(), inputs["k_end"].tolist(), strict=True))
        names = ("q", "w", "keys", "key_scales")
        return range_scores_reference(*(inputs.get(name) for name in names), ranges)
    cache, dtype = inputs["cache"], inputs["q"].dtype
    if dtype == torch.float8_e4m3fn:
        pages = page_views(cache, PAGE_BYTES)
    else:
        pages = (cache.view(dtype).view(-1, 64, 128), None)
    rest = (inputs["page_table"], inputs["seq_lens"])
    found = decode_scores_reference(inputs["q"], inputs["w"], *pages, *rest)
    return [scores for of_request in found for scores in of_request]


class FakeOperation:
    """Scores in fp32, selected by plain loops; `spoil` changes what the runs of a call give.

    It is called with the operation, the number of the run, and the call's inputs and outputs.
    """

    def __init__(
        self,
        spec: DecodeSpec | PrefillSpec,
        count: int,
        device: torch.device = CPU,
        *,
        spoil: Spoil | None = None,
    ) -> None:
        self.spec = spec
        self.count = count
        self.workspace_bytes = 1234
        self.runs = 0
        self._spoil = spoil
        assert device == CPU

    def call(self, inputs: Inputs) -> Call:
        count = len(inputs["w"])
        assert count <= self.count
        outputs = poisoned_outputs(self.spec, count, CPU)

        def run() -> None:
            self._run(inputs, outputs)
            if self._spoil is not None:
                self._spoil(self, self.runs, inputs, outputs)
            self.runs += 1

        return Call(run, outputs)

    def _run(self, inputs: Inputs, outputs: Mapping[str, Tensor]) -> None:
        top_k = self.spec.top_k
        indices = outputs["indices"].view(-1, top_k)
        for row, scores in enumerate(oracle_scores(inputs)):
            rounded = scores.float()
            best = torch.tensor(top_k_reference(rounded.tolist(), top_k))
            indices[row] = best
            if "selected_scores" in outputs:
                tail = torch.cat((rounded, torch.tensor([-math.inf])))
                outputs["selected_scores"].view(-1, top_k)[row] = tail[best]

    def launches(self) -> list[tuple[dict[str, object], FakeOperation]]:
        names = ("decode_scores", "select")
        return [({"kernel": name, "grid": [1, 1, 1]}, self) for name in names]
