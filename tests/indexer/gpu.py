"""How tests run the indexer's plans on a GPU: poisoned memory inside guards, calls repeated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from firesteel.device import device_target
from firesteel.indexer.pages import page_bytes, page_views
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import Arena, Ready, plan, prewarm
from firesteel.launch.key import DTYPES
from tests.indexer.kernels import Decode

GUARD_BYTES = 512
FILLS = (0xFF, 0x00, 0x5A)
"""Bytes that the workspace starts with: a call needs nothing of an earlier one."""


class Guarded:
    """Memory on the GPU with 0xFF bytes before and behind it."""

    def __init__(self, num_bytes: int) -> None:
        size = num_bytes + 3 * GUARD_BYTES
        self._whole = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        # At a multiple of 512, as an arena's storage must be of 256.
        self._start = GUARD_BYTES - self._whole.data_ptr() % GUARD_BYTES
        self._end = self._start + num_bytes
        self.memory = self._whole[self._start : self._end]

    def view(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.memory.view(dtype).view(shape)

    def check(self) -> None:
        assert (self._whole[: self._start] == 255).all()
        assert (self._whole[self._end :] == 255).all()


@cache
def ready_of(spec: DecodeSpec | PageWriterSpec | PrefillSpec, num_tokens: int) -> Ready:
    target = device_target(torch.device("cuda", 0))
    return prewarm(plan(spec.for_target(target), num_tokens), device="cuda")


def run(
    spec: DecodeSpec | PageWriterSpec | PrefillSpec,
    num_tokens: int,
    given: Mapping[str, Tensor],
    *,
    ready: Ready | None = None,
    **flags: str,
) -> dict[str, Tensor]:
    """What a call writes, by name; of several calls and a graph, which must not differ."""
    ready = ready or ready_of(spec, num_tokens)
    operands = spec.operands(tuple(flags.items()))
    tensors = {name: tensor.cuda() for name, tensor in given.items()}
    outputs: dict[str, Guarded] = {}
    for operand in operands:
        if operand.name not in tensors:
            shape, dtype = operand.shape_for(num_tokens), DTYPES[operand.dtype]
            guarded = Guarded(torch.Size(shape).numel() * dtype.itemsize)
            outputs[operand.name] = guarded
            tensors[operand.name] = guarded.view(*shape, dtype=dtype)
    workspace = Guarded(ready.plan.workspace.num_bytes)
    arena = Arena(workspace.memory) if len(workspace.memory) else ready.arena()
    fixed = {each.name: tensors[each.name] for each in operands if not each.is_per_call}
    passed = [tensors[each.name] for each in operands if each.is_per_call]
    bound = ready.bind(fixed, arena, **flags)
    before: dict[str, Tensor] | None = None
    graph: torch.cuda.CUDAGraph | None = None
    for fill in FILLS:
        workspace.memory.fill_(fill)
        for guarded in outputs.values():
            guarded.memory.fill_(0x4D)
        if fill == FILLS[-1]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                bound.run(*passed)
            graph.replay()
        else:
            bound.run(*passed)
        now = {name: tensors[name].cpu() for name in outputs}
        for name, tensor in now.items():
            same = before is None or torch.equal(_bits(tensor), _bits(before[name]))
            assert same, name
        before = now
    for guarded in (workspace, *outputs.values()):
        guarded.check()
    assert not ready.audit.misses
    if isinstance(spec, PageWriterSpec):
        now["cache"] = tensors["cache"].cpu()
    return now


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def spec_of(case: Decode, top_k: int, **changes: bool | None) -> DecodeSpec:
    return DecodeSpec(
        num_heads=case.heads,
        rows=case.rows,
        width=case.width,
        top_k=top_k,
        cache_dtype=case.cache_dtype,
        page_stride=case.page_stride,
        has_slots=True,
        has_scores=True,
        **changes,
    )


def decode(case: Decode, spec: DecodeSpec, *, ready: Ready | None = None) -> dict[str, Tensor]:
    given = {name: getattr(case, name) for name in ("q", "w", "cache", "page_table", "seq_lens")}
    return run(spec, len(case.seq_lens), given, ready=ready)


def fed(scores: Tensor, lens: list[int], *, rows: int, heads: int = 16) -> Decode:
    """Requests whose keys score exactly what is asked, `[B, C]` of any fp32.

    Every product is 1 in one column, the weights of the heads add up to 1, and scores are scales.
    """
    requests, capacity = scores.shape
    width = capacity // 64
    cache = torch.zeros(requests * width * page_bytes("e4m3"), dtype=torch.uint8, device="cuda")
    values, scales = page_views(cache, page_bytes("e4m3"))
    one = torch.ones((), device="cuda").to(values.dtype).view(torch.uint8)
    values.view(torch.uint8)[:, :, 0] = one
    table = torch.randperm(requests * width, generator=torch.Generator().manual_seed(1))
    scales[table.cuda()] = scores.cuda().view(-1, 64)
    q = torch.zeros(requests, rows, heads, 128, dtype=torch.uint8)
    q[..., 0] = one.cpu()
    return Decode(
        q=q.view(values.dtype),
        w=torch.full((requests, rows, heads), 1 / heads),
        cache=cache,
        page_table=table.view(requests, width).int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
    )
