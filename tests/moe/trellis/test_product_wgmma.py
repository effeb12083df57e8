"""The product with trellises that only Hopper runs, against its oracle: weights rounded to fp16."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.trellis import Codebook, TrellisCode, decode_tiles
from firesteel.moe.trellis.product_wgmma import trellis_wgmma_kernel
from firesteel.moe.trellis.reference import in_operand_order
from tests.moe.gluon_emulator import Block
from tests.moe.kernels import ROUNDING, Routing
from tests.moe.trellis.launches import (
    BITS,
    bits_of,
    dense_routing,
    generators,
    half_bound,
    has_expert,
    in_memory,
    is_untouched,
    launch,
    launch_on_nothing,
    poisoned,
    random_tiles,
    tables_of,
)
from tests.strategies import CODEBOOKS

ALL_RATES = 0b111111110
# Of experts, so that full tiles and tiles of every size and its ends are multiplied.
COUNTS = {32: (1, 33, 70), 64: (32, 33, 64, 97), 128: (20, 64, 65, 96, 97, 131)}


@dataclass(frozen=True)
class Case:
    """One call, and how it is cut. `x` is `[R, P, K]`, its columns as W has them."""

    x: Tensor = field(repr=False)
    matrices: tuple[tuple[Tensor, ...], ...] = field(repr=False)
    codebook: Codebook
    routing: Routing
    is_packed: bool
    more_rates: int = 0
    block_m: int = 64
    span: int = 1
    stages: int = 4
    warps: int = 4
    lands_early: bool = False

    def run(self) -> Tensor:
        """`[R, P, N]` fp16; a tile more than there is work."""
        routes, num_parts, k = self.x.shape
        n = 16 * self.matrices[0][0].shape[1]
        rates = {tiles.shape[2] // 16 for parts in self.matrices for tiles in parts}
        given, num_tiles = {}, -(-routes // self.block_m) + 1
        if self.is_packed:
            given = tables_of(self.routing, self.block_m)
            num_tiles = len(given["block_row_ptr"])
        out = poisoned(routes, num_parts, n, dtype=torch.float16)
        launch(
            trellis_wgmma_kernel,
            (num_parts * n // (128 * self.span), num_tiles, 1),
            "y_ptr",
            lands_early=self.lands_early,
            x_ptr=in_operand_order(self.x),
            y_ptr=out,
            R=Block(torch.tensor(routes)),
            **{**in_memory(self.matrices), **given},
            **{"K": k, "N": n, "PARTS": num_parts, "CODEBOOK": self.codebook},
            **{"RATES": self.more_rates | sum(1 << rate for rate in rates)},
            **{"BLOCK_M": self.block_m, "SPAN": self.span, "STAGES": self.stages},
            **{"WARPS": self.warps},
        )
        return out

    def check(self) -> None:
        """Rows of no expert must be as they were.

        No number is above 4, and the emulator rounds a sum once a product of 32 columns.
        """
        out = self.run()
        assert is_untouched(out[~has_expert(self.routing)])
        for expert, parts in enumerate(self.matrices):
            routes = [at for at, owner in enumerate(self.routing.experts) if owner == expert]
            for part, tiles in enumerate(parts):
                x = self.x[routes, part].double()
                code = TrellisCode(tiles.shape[2] / 16, self.codebook)
                wanted = x @ decode_tiles(tiles, code).double()
                sums = 4 * x.abs().sum(-1, keepdim=True)
                bound = half_bound(wanted, x.shape[1] // 32 * ROUNDING * sums)
                assert ((out[routes, part].double() - wanted).abs() <= bound).all()


def case_of(
    counts: tuple[int, ...] | int,
    generator: torch.Generator,
    *,
    size: tuple[int, int, int],
    rates: tuple[int, ...],
    num_parts: int = 1,
    codebook: Codebook = "mcg",
) -> Case:
    """Of so many rows of each expert, in no order, and some of none; or of so many of one matrix.

    Args:
        size: K, N and row blocks of a program.
        rates: of matrices in turn, parts of one apart.
    """
    k, n, span = size
    is_packed = not isinstance(counts, int)
    routing = dense_routing(0 if is_packed else counts)
    if is_packed:
        ids = [-1, -1, *(expert for expert, count in enumerate(counts) for _ in range(count))]
        order = torch.randperm(len(ids), generator=generator)
        routing = Routing(torch.tensor(ids, dtype=torch.int32)[order, None], len(counts))
    matrices = tuple(
        tuple(
            random_tiles(k, n, rates[(expert + part) % len(rates)], generator)
            for part in range(num_parts)
        )
        for expert in range(routing.num_experts)
    )
    x = torch.randn(routing.num_routes, num_parts, k, generator=generator).half()
    # No kernel may read these.
    x[~has_expert(routing)] = torch.nan
    return Case(x, matrices, codebook, routing, is_packed, span=span)


@pytest.mark.parametrize("lands_early", [False, True])
@pytest.mark.parametrize("block_m", COUNTS)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dense"])
def test_tiles_of_every_size(is_packed: bool, block_m: int, lands_early: bool) -> None:
    counts = COUNTS[block_m]
    generator = torch.Generator().manual_seed(block_m)
    # As many stages as there are half blocks, fewer and more, and a block that follows another.
    size = {32: (128, 128, 1), 64: (256, 256, 2), 128: (384, 128, 1)}[block_m]
    codebook = CODEBOOKS[block_m // 32 % 3]
    for rows in [counts] if is_packed else [block_m + counts[-2], 2 * block_m, counts[0]]:
        case = case_of(rows, generator, size=size, rates=(2, 3, 4), codebook=codebook)
        # What the plan launches.
        replace(case, block_m=block_m, warps=8 if block_m == 128 else 4,
                lands_early=lands_early).check()  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = draw(generators())
    is_packed = draw(st.booleans())
    counts = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
    sizes = ((128, 128, 1), (128, 256, 1), (128, 256, 2), (256, 128, 1), (192 * 2, 384, 3))
    case = case_of(
        draw(counts if is_packed else st.integers(0, 70)),
        generator,
        size=draw(st.sampled_from(sizes)),
        rates=tuple(draw(st.lists(st.sampled_from(BITS), min_size=1, max_size=3))),
        num_parts=draw(st.sampled_from((1, 2))),
        codebook=draw(st.sampled_from(CODEBOOKS)),
    )
    return replace(
        case,
        more_rates=draw(st.sampled_from((0, 1 << 3, ALL_RATES))),
        block_m=draw(st.sampled_from((32, 64, 128))),
        stages=draw(st.sampled_from((3, 4, 5))),
        warps=draw(st.sampled_from((4, 8))),
        lands_early=draw(st.booleans()),
    )


@given(case=cases())
@settings(max_examples=25)
def test_rows_are_the_oracle_s(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_a_unit_row_picks_out_numbers_rounded_once(bits: int, codebook: Codebook) -> None:
    tiles = random_tiles(128, 128, bits, torch.Generator().manual_seed(bits))
    x = torch.eye(128, dtype=torch.float16).unsqueeze(1)
    case = Case(x, ((tiles,),), codebook, dense_routing(128), False, block_m=128)
    assert torch.equal(case.run()[:, 0], decode_tiles(tiles, TrellisCode(bits, codebook)))


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_row_s_bits_do_not_depend_on_other_rows(codebook: Codebook) -> None:
    """In tiles of 32, 64, 96 and 128 rows, of two row blocks or one, sorted or alone."""
    generator = torch.Generator().manual_seed(7)
    rates = (3, 4)
    case = case_of((131, 90), generator, size=(256, 256, 2), rates=rates, codebook=codebook)
    together = bits_of(replace(case, block_m=128, warps=8).run())
    parted = replace(case, block_m=32, span=1, stages=3, lands_early=True).run()
    assert torch.equal(together, bits_of(parted))
    for expert in range(2):
        rows = [at for at, owner in enumerate(case.routing.experts) if owner == expert][-5:]
        alone = replace(
            case,
            x=case.x[rows],
            matrices=(case.matrices[expert],),
            routing=dense_routing(5),
            is_packed=False,
        )
        assert torch.equal(together[rows], bits_of(alone.run()))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dense"])
def test_no_rows(is_packed: bool) -> None:
    case = case_of((0, 0) if is_packed else 0, torch.Generator(), size=(128, 128, 1), rates=(3,))
    assert is_untouched(case.run())
    given = tables_of(dense_routing(1), 64) if is_packed else {}
    tiles = random_tiles(128, 128, 3, torch.Generator())
    launch_on_nothing(
        trellis_wgmma_kernel,
        "y_ptr",
        x_ptr=torch.empty(1, 128).half(),
        y_ptr=torch.empty(1, 1, 128).half(),
        R=Block(torch.tensor(0)),
        **{**in_memory([[tiles]]), **given},
        **{"K": 128, "N": 128, "PARTS": 1, "RATES": 1 << 3, "CODEBOOK": "mcg"},
        **{"BLOCK_M": 64, "SPAN": 1, "STAGES": 4, "WARPS": 4},
    )
