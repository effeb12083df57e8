"""What plans launch, run in the interpreter: every argument, stride, level and region as planned.

`select` needs functions that can be compiled, so another process makes the launches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.indexer.filter import filter_kernel
from firesteel.indexer.range_scores import range_scores_kernel
from firesteel.indexer.range_select import range_select_kernel
from firesteel.indexer.reference import (
    decode_scores_reference,
    range_scores_reference,
    top_k_reference,
)
from firesteel.indexer.score import decode_scores_kernel
from firesteel.indexer.select import select_kernel
from firesteel.launch.key import DTYPES
from tests.indexer.kernels import decode_case, e4m3, key_scales, weights
from tests.moe.kernels import Memory

pytestmark = pytest.mark.interpret

KERNELS = {
    "decode_scores_kernel": decode_scores_kernel,
    "filter_kernel": filter_kernel,
    "range_scores_kernel": range_scores_kernel,
    "range_select_kernel": range_select_kernel,
    "select_kernel": select_kernel,
}
PLANNING = """
import json, sys
from firesteel.indexer import launches, plan, spec
from firesteel.launch.kernel import Stride
# Small, so that few keys fill more than one.
plan.SPAN, plan.MULTIPROCESSORS, plan.FILTER_PARTS = 1024, 3, 2
plan.RANGE_GROUPS, plan.SLICE_BYTES = 1024, 1 << 18
plan._groups = lambda *_: launches.Groups(programs=13, columns=8, shares=4)
value = lambda each: {"stride": each.tensor} if isinstance(each, Stride) else each
found = {}
whole = plan.decode_slice
for title, (name, fields, count) in json.loads(sys.argv[1]).items():
    plan.decode_slice = (lambda _: 1) if title == "sliced" else whole
    made = getattr(spec, name)(**fields, pdl=False, wgmma=False)
    made_launches = [
        [
            launch.key.name,
            launch.grid,
            [[*pair, value(each)] for pair, each in zip(launch.key.arguments, launch.arguments)],
            {**dict(launch.key.constexprs), "PTX": False},
        ]
        for launch in made.select(count, ())
    ]
    operands = [[each.name, each.dtype, each.shape, each.is_written] for each in made.operands(())]
    regions = [[region.name, region.num_bytes] for region in made.workspace(count)]
    found[title] = [count, made_launches, operands, regions]
print(json.dumps(found))
"""
COMMON = {"num_heads": 32, "top_k": 512}
DECODE = {**COMMON, "num_heads": 8, "rows": 2, "width": 36, "page_stride": 8464}
DECODE |= {"has_slots": True, "has_scores": True}
PAGED = {**COMMON, "width": 10, "num_requests": 2, "has_slots": True}
ASKED = {
    "tiled": ("DecodeSpec", DECODE, 2),
    "filtered": ("DecodeSpec", {**DECODE, "is_filtered": True}, 2),
    "sliced": ("DecodeSpec", {**DECODE, "is_filtered": True}, 2),
    "contiguous": ("PrefillSpec", {**COMMON, "num_keys": 1500}, 9),
    "paged": ("PrefillSpec", PAGED, 4),
}


@cache
def planned() -> dict[str, Any]:
    """Of each call asked its count, launches, operands and regions."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PLANNING, json.dumps(ASKED)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def run(title: str, given: dict[str, Tensor]) -> tuple[list[str], dict[str, Tensor]]:
    """The kernels launched, and what is written."""
    count, launches, operands, regions = planned()[title]
    memory = Memory()
    tensors = {each: memory.holding(tensor, padding=0) for each, tensor in given.items()}
    tensors["page_table"] = memory.holding(given.get("page_table"), padding=5 * (title != "paged"))
    for operand, dtype, shape, is_written in operands:
        if is_written:
            sizes = [count if size == "M" else size for size in shape]
            tensors[operand] = memory.poisoned(*sizes, dtype=DTYPES[dtype])
    outputs = {each: tensor for each, tensor in tensors.items() if each not in given}
    for region, num_bytes in regions:
        tensors[region] = memory.poisoned(num_bytes, dtype=torch.uint8)
    for kernel, grid, arguments, constants in launches:
        passed = {}
        for parameter, kind, value in arguments:
            if kind.startswith("*"):
                element = DTYPES[kind[1:].partition("@")[0]]
                value = tensors[value]
                value = value.view(element) if value.dtype == torch.uint8 else value
                assert value.dtype == element
            elif isinstance(value, dict):
                value = tensors[value["stride"]].stride(0)
            passed[parameter] = value
        function = KERNELS[kernel]
        known = {each: value for each, value in constants.items() if each in function.arg_names}
        function[tuple(grid)](**passed, **known)
    memory.check()
    return [kernel.removesuffix("_kernel") for kernel, *_ in launches], outputs


def check(found: dict[str, Tensor], wanted: list[Tensor]) -> None:
    indices = found["indices"].flatten(0, -2)
    for row, scores in enumerate(wanted):
        assert indices[row].tolist() == top_k_reference(scores.tolist(), indices.shape[1])


def test_decode_by_each_route() -> None:
    """More keys than two spans hold, so that candidates are folded twice."""
    kind = {"width": 36, "page_stride": 8464, "missing": 0.1, "is_exact": True}
    case = decode_case([2300, 40], rows=2, **kind)
    names = ("q", "w", "cache", "page_table", "seq_lens")
    given = {name: getattr(case, name) for name in names}
    tiled, found = run("tiled", given)
    assert tiled == ["decode_scores", "select", "select", "select"]
    scores = decode_scores_reference(case.q, case.w, *case.pages, case.page_table, case.seq_lens)
    check(found, [row for request in scores for row in request])
    assert set(found) == {"indices", "slots", "selected_scores"}
    for title, kernels in (
        ("filtered", ["decode_scores", "filter"]),
        ("sliced", ["decode_scores", "filter"] * 2),
    ):
        launched, again = run(title, given)
        assert launched == kernels
        for name, tensor in found.items():
            assert torch.equal(tensor.view(torch.int32), again[name].view(torch.int32)), name


def test_prefill_of_contiguous_keys() -> None:
    generator = torch.Generator().manual_seed(7)
    kind = {"generator": generator, "is_exact": True}
    num_rows, num_keys = 9, 1500
    ends = torch.tensor([0, 1, 1499, 1500, 2**31 - 1, 700, 511, 512, 1100], dtype=torch.int32)
    starts = torch.tensor([0, 0, 300, 1400, -9, 100, 0, 0, 1], dtype=torch.int32)
    given = {
        "keys": e4m3(num_keys, 128, **kind),
        "key_scales": key_scales(num_keys, **kind),
        "q": e4m3(num_rows, 32, 128, **kind),
        "w": weights(num_rows, 32, **kind),
        "k_start": starts,
        "k_end": ends,
    }
    names, found = run("contiguous", given)
    assert names == ["range_scores", "range_select"] * 2
    ranges = list(zip(starts.tolist(), ends.tolist(), strict=True))
    keys = (given[name] for name in ("q", "w", "keys", "key_scales"))
    check(found, range_scores_reference(*keys, ranges))


def test_prefill_of_pages() -> None:
    pages = decode_case([640, 640], width=10, missing=0.1, is_exact=True, seed=3)
    generator = torch.Generator().manual_seed(8)
    kind = {"generator": generator, "is_exact": True}
    requests = torch.tensor([0, 1, 1, -1], dtype=torch.int32)
    ends = torch.tensor([640, 2, 600, 640], dtype=torch.int32)
    given = {
        "cache": pages.cache,
        "page_table": pages.page_table,
        "q": e4m3(4, 32, 128, **kind),
        "w": weights(4, 32, **kind),
        "row_request": requests,
        "k_end": ends,
    }
    names, found = run("paged", given)
    assert names == ["range_scores", "range_select"]
    wanted = []
    for row, end in enumerate(ends.tolist()):
        table = pages.page_table[max(int(requests[row]), 0)][None]
        length = torch.tensor([end if requests[row] >= 0 else 0])
        q, w = given["q"][row].view(1, 1, 32, 128), given["w"][row].view(1, 1, 32)
        wanted.append(decode_scores_reference(q, w, *pages.pages, table, length)[0][0])
    check(found, wanted)
