"""The product with trellises against its oracle, and the laws of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.trellis import Codebook, TrellisCode, decode_tiles
from firesteel.moe.trellis.product import trellis_stream_kernel
from firesteel.moe.trellis.reference import (
    in_operand_order,
    numbers_reference,
    product_reference,
)
from tests.moe.kernels import ROUNDING, Routing, routings
from tests.moe.trellis.launches import (
    BITS,
    bits_of,
    dense_routing,
    generators,
    half_bound,
    has_expert,
    in_memory,
    is_untouched,
    kernel_words,
    launch,
    launch_on_nothing,
    poisoned,
    random_tiles,
    tables_of,
)
from tests.strategies import CODEBOOKS

# K, N, rows of a program in 128s, spans of K.
CUTS = (
    *((128, 128, 1, 1), (256, 128, 1, 1), (256, 128, 1, 2), (384, 128, 1, 3), (128, 256, 1, 1)),
    *((128, 256, 2, 1), (256, 256, 2, 1), (384, 256, 1, 1), (128, 384, 3, 1), (512, 128, 1, 2)),
)


@dataclass(frozen=True)
class Case:
    """One call, and how it is cut."""

    x: Tensor = field(repr=False)
    matrices: tuple[tuple[Tensor, ...], ...] = field(repr=False)
    codebook: Codebook
    routing: Routing
    mode: str
    more_rates: int = 0
    block_m: int = 8
    span: int = 1
    split_k: int = 1
    stages: int = 3
    warps: int = 4
    lands_early: bool = False

    def run(self, *, is_partial: bool) -> Tensor:
        """`[SPLIT_K, R, P, N]` fp32, or `[R, P, N]` fp16; a tile more than there is work."""
        routes, num_parts, k = self.x.shape
        n = 16 * self.matrices[0][0].shape[1]
        rates = {tiles.shape[2] // 16 for parts in self.matrices for tiles in parts}
        given: dict[str, object] = {}
        num_tiles = routes + 1
        if self.mode == "packed":
            given = dict(tables_of(self.routing, self.block_m))
            num_tiles = len(given["block_row_ptr"])
        elif self.mode == "direct":
            ids = {"topk_ids_ptr": self.routing.topk_ids, "expert_map_ptr": self.routing.expert_map}
            given = dict(ids)
        else:
            num_tiles = -(-routes // self.block_m) + 1
        name = "partials_ptr" if is_partial else "y_ptr"
        out = poisoned(routes, num_parts, n, dtype=torch.float16)
        if is_partial:
            out = poisoned(self.split_k, routes, num_parts, n, dtype=torch.float32)
        launch(
            trellis_stream_kernel,
            (num_parts * n // (128 * self.span), num_tiles, self.split_k),
            name,
            lands_early=self.lands_early,
            x_ptr=self.x,
            R=routes,
            **{**in_memory(self.matrices), **given, name: out, **self.routing.constexprs},
            **{"K": k, "N": n, "PARTS": num_parts, "CODEBOOK": self.codebook},
            **{"RATES": self.more_rates | sum(1 << rate for rate in rates)},
            **{"BLOCK_M": self.block_m, "SPAN": self.span, "SPLIT_K": self.split_k},
            **{"STAGES": self.stages, "WARPS": self.warps},
        )
        return out

    def check(self, out: Tensor, x: Tensor) -> None:
        """Of x in any columns, in fp16 or fp32; rows of no expert must be as they were.

        No number is above 4, and a sum is rounded once a product of 16 of them.
        """
        is_held = has_expert(self.routing)
        assert is_untouched(out[~is_held])
        wanted = product_reference(
            x, self.matrices, self.codebook, self.routing.topk_ids,
            expert_map=self.routing.expert_map,
        )[is_held]  # fmt: skip
        turns = x.shape[2] // (16 if self.codebook == "mul1" else 8)
        sums = 4 * x[is_held].double().abs().sum(-1, keepdim=True)
        bound = (turns * ROUNDING * sums).expand_as(wanted)
        if out.dtype == torch.float16:
            bound = half_bound(wanted, bound)
        assert ((out[is_held].double() - wanted).abs() <= bound).all()


@st.composite
def cases(draw: st.DrawFn, mode: str | None = None, num_splits: int | None = None) -> Case:
    generator = draw(generators())
    mode = mode or draw(st.sampled_from(("direct", "packed", "dense")))
    cuts = [cut for cut in CUTS if num_splits is None or cut[3] == num_splits]
    k, n, span, split_k = draw(st.sampled_from(cuts))
    num_parts = draw(st.sampled_from((1, 2)))
    if mode == "dense":
        routing = dense_routing(draw(st.integers(0, 18)))
    else:
        tokens = 12 if mode == "packed" else 3
        routing = draw(routings(max_tokens=tokens, max_experts=3, max_slots=2))
    rates = draw(st.lists(st.sampled_from(BITS), min_size=1, max_size=3))
    matrices = tuple(
        tuple(
            random_tiles(k, n, rates[(expert + 2 * part) % len(rates)], generator)
            for part in range(num_parts)
        )
        for expert in range(routing.num_experts)
    )
    x = torch.randn(routing.num_routes, num_parts, k, generator=generator).half()
    # No kernel may read these.
    x[~has_expert(routing)] = torch.nan
    return Case(
        x=x,
        matrices=matrices,
        codebook=draw(st.sampled_from(CODEBOOKS)),
        routing=routing,
        mode=mode,
        more_rates=draw(st.sampled_from((0, 1 << 3, 0b111111110))),
        block_m=draw(st.sampled_from((8, 16))),
        span=span,
        split_k=split_k,
        stages=draw(st.integers(2, 4)),
        warps=draw(st.sampled_from((1, 2, 4, 8))),
        lands_early=draw(st.booleans()),
    )


@given(case=cases(num_splits=1))
@settings(max_examples=50)
def test_rows_are_the_oracle_s(case: Case) -> None:
    case.check(case.run(is_partial=False), case.x)


@given(case=cases())
@settings(max_examples=50)
def test_each_span_of_k_is_the_oracle_s(case: Case) -> None:
    _check_spans(case)


def _check_spans(case: Case) -> None:
    for span, part in enumerate(case.run(is_partial=True)):
        size = case.x.shape[2] // case.split_k
        x = torch.zeros_like(case.x)
        here = slice(span * size, (span + 1) * size)
        x[..., here] = case.x[..., here]
        case.check(part, x)


@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("mode", ["direct", "packed", "dense"])
def test_many_rows_of_matrices_of_many_rates(mode: str, codebook: Codebook, block_m: int) -> None:
    generator = torch.Generator().manual_seed(CODEBOOKS.index(codebook) + block_m)
    k, n, span, split_k = CUTS[(len(mode) + CODEBOOKS.index(codebook) * 3 + block_m) % len(CUTS)]
    num_parts = 1 if mode == "dense" else 2
    routing = dense_routing(21)
    if mode != "dense":
        # Most rows to expert 0, so that it has more than a tile of them.
        shape = (3 if mode == "direct" else 16, 2)
        ids = torch.randint(-1, 4, shape, generator=generator).remainder(3)
        ids[torch.rand(shape, generator=generator) < 0.2] = -1
        routing = Routing(ids, 3)
    matrices = tuple(
        tuple(
            random_tiles(k, n, int(torch.randint(1, 9, (1,), generator=generator)), generator)
            for _ in range(num_parts)
        )
        for _ in range(routing.num_experts)
    )
    x = torch.randn(routing.num_routes, num_parts, k, generator=generator).half()
    case = Case(
        *(x, matrices, codebook, routing, mode),
        **{"block_m": block_m, "span": span, "split_k": split_k, "lands_early": block_m == 16},
    )
    _check_spans(case)
    if split_k == 1:
        case.check(case.run(is_partial=False), case.x)


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", BITS)
def test_a_unit_row_picks_out_numbers_exactly(bits: int, codebook: Codebook) -> None:
    tiles = random_tiles(128, 128, bits, torch.Generator().manual_seed(bits))
    x = in_operand_order(torch.eye(128, dtype=torch.float16)).unsqueeze(1)
    case = Case(x, ((tiles,),), codebook, dense_routing(128), "dense", block_m=16)
    sums = case.run(is_partial=True)[0, :, 0]
    assert torch.equal(sums.double(), numbers_reference(tiles, codebook))


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_what_is_stored_is_rounded_once(codebook: Codebook) -> None:
    tiles = random_tiles(128, 128, 3, torch.Generator().manual_seed(3))
    x = in_operand_order(torch.eye(128, dtype=torch.float16)).unsqueeze(1)
    case = Case(x, ((tiles,),), codebook, dense_routing(128), "dense")
    rows = case.run(is_partial=False)[:, 0]
    assert torch.equal(rows, decode_tiles(tiles, TrellisCode(3, codebook)))


@given(case=cases("packed"))
@settings(max_examples=15)
def test_a_row_s_bits_do_not_depend_on_other_rows(case: Case) -> None:
    case = replace(case, split_k=1)
    together = bits_of(case.run(is_partial=False))
    other = replace(case, block_m=24 - case.block_m, lands_early=not case.lands_early)
    assert torch.equal(together, bits_of(other.run(is_partial=False)))
    alone = replace(case, mode="direct", stages=2, span=1)
    assert torch.equal(together, bits_of(alone.run(is_partial=False)))


@pytest.mark.parametrize("mode", ["direct", "packed", "dense"])
@pytest.mark.parametrize("is_partial", [False, True])
def test_no_rows(mode: str, is_partial: bool) -> None:
    routing = dense_routing(1)
    given: dict[str, Tensor] = {}
    if mode == "packed":
        given = tables_of(routing, 8)
    elif mode == "direct":
        given = {"topk_ids_ptr": routing.topk_ids}
    tiles = random_tiles(128, 128, 2, torch.Generator())
    name = "partials_ptr" if is_partial else "y_ptr"
    dtype = torch.float32 if is_partial else torch.float16
    launch_on_nothing(
        trellis_stream_kernel,
        name,
        x_ptr=torch.ones(1, 1, 128, dtype=torch.float16),
        R=0,
        **{**in_memory(((tiles,),)), **given, name: torch.ones(1, 1, 128, dtype=dtype)},
        **{"K": 128, "N": 128, "PARTS": 1, "RATES": 0b100, "CODEBOOK": "mcg"},
        **{"BLOCK_M": 8, "SPAN": 1, "SPLIT_K": 1, "STAGES": 3, "WARPS": 4},
        **routing.constexprs,
    )


def test_numbers_of_the_oracle_are_those_that_the_format_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    for codebook in CODEBOOKS:
        for bits in BITS:
            tiles = random_tiles(32, 48, bits, generator)
            rounded = decode_tiles(tiles, TrellisCode(bits, codebook))
            numbers = numbers_reference(tiles, codebook)
            assert torch.equal(numbers.half(), rounded)
            # What the bound of a sum takes for granted.
            assert numbers.abs().max() < 4


def test_words_go_where_the_kernel_reads_them() -> None:
    # K 256, N 256, 2 bits; of tile (k 9, n 11) word 1 of the lanes of group 5.
    tiles = torch.zeros(16, 16, 32, dtype=torch.int16)
    tiles[9, 11].view(torch.int32)[5 * 2 + 1] = 7
    # Block n 1, block k 1, word 1, half 0, tile 3, group 5, tile t 1 of four.
    place = ((((1 * 2 + 1) * 2 + 1) * 2 + 0) * 8 + 3) * 32 + 5 * 4 + 1
    assert kernel_words(tiles).nonzero().tolist() == [[place]]
