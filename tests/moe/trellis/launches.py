"""How tests launch the EXL3 kernels, in the Gluon emulator: memory, weights, bounds of rotations.

Every tensor ends where its memory ends, so that the emulator sees an access outside one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_weights import words_of_tiles
from firesteel.launch import Launch, Region, Stride
from firesteel.launch.key import DTYPES
from firesteel.moe.activation import Activation
from firesteel.moe.reference import place_reference
from firesteel.moe.spec import ROW_UNIT
from firesteel.moe.trellis.launches import TRELLIS_KERNELS
from tests.moe.gluon_emulator import Block, run
from tests.moe.kernels import ROUNDING, Routing, routings
from tests.strategies import random_bits

WARPS = (1, 2, 4, 8)
BITS = tuple(range(1, 9))
DTYPES_OF_ROWS = (torch.bfloat16, torch.float16, torch.float32)
# 8 blocks and less, a few blocks and a part, one in part, and more than one program of one warp.
COLUMNS = (40, 128, 192, 576, 1024, 1100)
# Limits that values of about 1 reach.
ACTIVATIONS = (
    *(Activation(), Activation(limit=0.5), Activation(name="relu2"), Activation(name="situ")),
    *(Activation(name="swigluoai", limit=0.75), Activation(name="swigluoai")),
)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
UNIT_WORDS = 512
"""Words of 2048 bytes, in which matrices are placed."""


def padded(size: int) -> int:
    return -(-size // 128) * 128


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.itemsize])


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of 0xFF bytes: NaN of bits that no kernel computes."""
    return torch.full(shape, -1, dtype=_BITS[dtype.itemsize]).view(dtype)


def is_untouched(tensor: Tensor) -> bool:
    return bool((bits_of(tensor) == -1).all())


def spread(tensor: Tensor, padding: int) -> Tensor:
    """The same rows further apart, by so many units of 16 bytes, NaN between; and none after."""
    unit = 16 // tensor.itemsize
    stride = (-(-tensor.shape[1] // unit) + padding) * unit
    wide = poisoned(len(tensor), stride, dtype=tensor.dtype)[:, : tensor.shape[1]]
    return wide.copy_(tensor)


def units(tensor: Tensor) -> int:
    """How far apart rows are, as kernels count it."""
    return tensor.stride(0) * tensor.itemsize // 16


def launch(
    kernel: Any, grid: tuple[int, int, int], output: str, *, lands_early: bool = False, **given: Any
) -> None:
    """Run a kernel, of whose arguments those that are not given are None. It writes one of them."""
    inputs = {
        name: (value, value.clone())
        for name, value in given.items()
        if isinstance(value, Tensor) and name != output
    }
    absent = dict.fromkeys(inspect.signature(kernel.fn).parameters)
    run(kernel, grid, {**absent, **given, "PDL": False}, lands_early=lands_early)
    for value, before in inputs.values():
        assert torch.equal(bits_of(value), bits_of(before))


def launch_on_nothing(kernel: Any, output: str, **given: Any) -> None:
    """As prewarm does: one program, every integer 0, memory of zeros, which stays as it is."""
    given = {
        name: torch.zeros_like(value) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    launch(kernel, (1, 1, 1), output, **given)
    assert not given[output].any()


def run_plan(
    launches: Sequence[Launch],
    regions: Sequence[Region],
    tensors: dict[str, Tensor],
    *,
    lands_early: bool,
) -> None:
    """Launches of a plan in order, in memory of 0xFF bytes; routes are sorted by the reference."""
    held = {each.name: poisoned(*each.shape, dtype=DTYPES[each.dtype]) for each in regions}
    held |= tensors
    for launch in launches:
        arguments: dict[str, Any] = dict.fromkeys(p.name for p in launch.kernel.parameters)
        arguments |= dict(launch.key.constexprs)
        for (name, _), value in zip(launch.key.arguments, launch.arguments, strict=True):
            if isinstance(value, str):
                arguments[name] = held[value]
            else:
                is_stride = isinstance(value, Stride)
                number = held[value.tensor].stride(0) // ROW_UNIT if is_stride else value
                arguments[name] = Block(torch.tensor(number))
        if launch.kernel in TRELLIS_KERNELS:
            arguments["PDL"] = False
            run(launch.kernel.function, launch.grid, arguments, lands_early=lands_early)
        elif "tile_rows" in arguments:
            routing = Routing(
                tensors["topk_ids"], len(tensors["w13.suh"]), tensors.get("expert_map")
            )
            for name, table in tables_of(routing, int(arguments["tile_rows"])).items():
                region = held[name.removesuffix("_ptr")]
                region[: len(table)] = table[: len(region)]


def tables_of(routing: Routing, rows: int) -> dict[str, Tensor]:
    """What place_kernel makes, and a tile more; what it leaves is -1."""
    placed = place_reference(
        routing.topk_ids, routing.num_experts, block_m=rows, expert_map=routing.expert_map
    )
    missing = routing.num_routes - len(placed.route_ids)
    tables = {
        "route_ids_ptr": [*placed.route_ids, *[-1] * missing],
        "expert_offsets_ptr": placed.expert_offsets,
        "block_expert_ptr": [*placed.block_expert, -1],
        "block_row_ptr": [*placed.block_row, -1],
        "num_blocks_ptr": [len(placed.block_expert)],
    }
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in tables.items()}


def has_expert(routing: Routing) -> Tensor:
    """Of each row whether it has a matrix, bool `[R]`."""
    return torch.tensor([expert >= 0 for expert in routing.experts], dtype=torch.bool)


def random_tiles(k: int, n: int, bits: int, generator: torch.Generator) -> Tensor:
    """A matrix as stored."""
    return random_bits((k // 16, n // 16, 16 * bits), torch.int16, generator)


def kernel_words(tiles: Tensor) -> Tensor:
    """Stored tiles int16 `[K / 16, N / 16, 16 * bits]` as a kernel reads them: int32 words."""
    return words_of_tiles(tiles, TrellisCode(tiles.shape[2] / 16, "mcg")).flatten()


def in_memory(matrices: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Words of matrices, the last one first, behind a unit of none; and where each one is."""
    words = [torch.full((UNIT_WORDS,), -1, dtype=torch.int32)]
    table = torch.empty(len(matrices), len(matrices[0]), 2, dtype=torch.int32)
    for expert in reversed(range(len(matrices))):
        for part, tiles in enumerate(matrices[expert]):
            begin = sum(map(len, words)) // UNIT_WORDS
            table[expert, part] = torch.tensor([begin, tiles.shape[2] // 16])
            words.append(kernel_words(tiles))
    return {"words_ptr": torch.cat(words), "matrices_ptr": table}


def dense_routing(num_rows: int, top_k: int = 1) -> Routing:
    """Of a layer that has no ids: every row has matrix 0."""
    return Routing(torch.zeros(num_rows, top_k, dtype=torch.int32), 1)


@st.composite
def few_routings(draw: st.DrawFn, *, max_slots: int = 4) -> tuple[Routing, bool]:
    """A routing of few rows, and whether it is that of a layer without ids."""
    if draw(st.integers(0, 3)) == 0:
        return dense_routing(draw(st.integers(0, 5)), draw(st.integers(1, max_slots))), True
    return draw(routings(max_tokens=4, max_experts=3, max_slots=max_slots)), False


def generators() -> st.SearchStrategy[torch.Generator]:
    return st.integers(0, 2**32 - 1).map(torch.Generator().manual_seed)


def scales(*shape: int, generator: torch.Generator) -> Tensor:
    """Of inputs or outputs: of either sign, near 1."""
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (signs * (0.5 + torch.rand(shape, generator=generator))).half()


@st.composite
def products(draw: st.DrawFn, routing: Routing, width: int, generator: torch.Generator) -> Tensor:
    """Of rows of so many columns, `[S, R, width]`: fp32 of spans of K, or one in fp16."""
    spans = draw(st.sampled_from((0, 1, 2, 5)))
    found = torch.randn(max(spans, 1), routing.num_routes, width, generator=generator)
    found = found.half() if spans == 0 else found / spans**0.5
    # No kernel may read these.
    found[:, ~has_expert(routing)] = torch.nan
    return found


def sums_of(given: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of products in float64, and how far it may lie off when it is fp16."""
    total = given.double().sum(0)
    if given.dtype == torch.float16:
        return total, torch.zeros_like(total)
    lost = (len(given) - 1) * ROUNDING * given.double().abs().sum(0)
    return total, half_bound(total, lost)


def rotated_bound(terms: Tensor, error: Tensor) -> Tensor:
    """How far rotated blocks may lie off, of terms of such magnitudes and errors.

    A sum of 16, three sums of two, a factor and its own rounding: six roundings, each of less than
    ROUNDING of the sum of the magnitudes.
    """
    lost = (error + 6 * ROUNDING * (terms.abs() + error)).unflatten(-1, (-1, 128))
    sums = lost.sum(-1, keepdim=True) / 128**0.5
    return sums.expand_as(lost).flatten(-2)


def half_bound(wanted: Tensor, error: Tensor) -> Tensor:
    """How far a number may lie off that had an error before it was rounded to fp16."""
    return error + 2.0**-11 * (wanted.abs() + error) + 2.0**-25
