"""How tests launch the MoE kernels: guarded memory, int4 weights, routings, one call a kernel.

These run in Triton's interpreter, which must be on before Triton is imported; `launch` raises
where it is not, so that no test passes by running nothing.
"""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from triton.runtime.interpreter import InterpretedFunction

from firesteel.formats.packed import TILE_ROWS, pack_codes, tile_rows
from firesteel.moe.activate import activate_kernel
from firesteel.moe.activation import Activation
from firesteel.moe.combine import combine_kernel
from firesteel.moe.down import down_kernel
from firesteel.moe.gate_up import gate_up_kernel
from firesteel.moe.route import count_kernel, place_kernel, scatter_kernel

# Bytes of 0xFF around every tensor: NaN in every float type, -1 in every integer.
GUARD_BYTES = 272
# The interpreter computes bf16 on its raw bits, so these two stand for all.
DTYPES = (torch.float16, torch.float32)
SENTINELS = (-1, -(2**31), 2**31 - 1)
# Half the distance from 1 to the next fp32.
ROUNDING = 2.0**-24
EMPTY_BYTES = 2**20


class Memory:
    """Tensors inside guards; `check` finds a write outside one, or into an input."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []
        self._inputs: list[tuple[Tensor, Tensor]] = []

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of 0xFF bytes."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((num_bytes + 2 * GUARD_BYTES,), 255, dtype=torch.uint8)
        self._buffers.append((buffer, num_bytes))
        return buffer[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(shape)

    def holding(self, tensor: Tensor | None, *, padding: int = 0) -> Tensor | None:
        """A copy of an input, its rows `padding` elements of 0xFF bytes apart."""
        if tensor is None:
            return None
        width = tensor.shape[-1]
        wide = self.poisoned(*tensor.shape[:-1], width + padding, dtype=tensor.dtype)
        held = wide[..., :width]
        held.copy_(tensor)
        self._inputs.append((held, tensor))
        return held

    def routing(self, routing: "Routing") -> tuple[Tensor | None, Tensor | None]:
        """Its ids and its map. Around the map are zeros, so that a read past it finds an expert."""
        expert_map = routing.expert_map
        if expert_map is not None:
            beside = torch.zeros(4, dtype=torch.int32)
            expert_map = self.holding(torch.cat([beside, expert_map, beside]))[4:-4]
        return self.holding(routing.topk_ids), expert_map

    def check(self) -> None:
        for buffer, num_bytes in self._buffers:
            assert (buffer[:GUARD_BYTES] == 255).all()
            assert (buffer[GUARD_BYTES + num_bytes :] == 255).all()
        for held, tensor in self._inputs:
            # As bytes: an input may hold NaN.
            before, after = (part.reshape(-1).view(torch.uint8) for part in (tensor, held))
            assert torch.equal(before, after)


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, **constexprs: object) -> None:
    """Run a kernel, or raise where Triton would compile it."""
    if not isinstance(kernel, InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET: must be 1 before Triton is imported in these tests")
    if 0 not in grid:
        kernel[grid](*arguments, **constexprs, PDL=False)


@dataclass(frozen=True)
class Routing:
    """topk_ids [M, top_k]; expert_map [num_global_experts] int32 or None; E."""

    topk_ids: Tensor
    num_experts: int
    expert_map: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def num_routes(self) -> int:
        return self.topk_ids.numel()

    @property
    def constexprs(self) -> dict[str, int]:
        num_global = self.num_experts if self.expert_map is None else len(self.expert_map)
        return {"E": self.num_experts, "NUM_GLOBAL": num_global}

    @property
    def experts(self) -> list[int]:
        """Of each route; -1 where it has none."""
        local = []
        for expert in self.topk_ids.flatten().tolist():
            if self.expert_map is not None:
                in_map = 0 <= expert < len(self.expert_map)
                expert = int(self.expert_map[expert]) if in_map else -1
            local.append(expert if 0 <= expert < self.num_experts else -1)
        return local

    def at_tokens(self, order: Tensor) -> "Routing":
        return replace(self, topk_ids=self.topk_ids[order])


@dataclass(frozen=True)
class Placed:
    """What place_kernel writes."""

    route_ids: Tensor
    expert_offsets: Tensor
    block_expert: Tensor
    block_row: Tensor
    num_blocks: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tables = (self.route_ids, self.expert_offsets, self.block_expert, self.block_row)
        return (*tables, self.num_blocks)

    def by_route(self, hidden: Tensor) -> Tensor:
        """Rows that lie by place, put where their routes are; the rest NaN."""
        num_placed = int(self.expert_offsets[-1])
        out = torch.full_like(hidden, float("nan"))
        out[self.route_ids[:num_placed].long()] = hidden[:num_placed]
        return out


@dataclass(frozen=True)
class Int4Stack:
    """codes [E, n, k] uint8 below 16, scales [E, n, g], zero_points [E, n, g] uint8 or None.

    `padding` is the code past the last row and column, where the packed form has 0: no kernel may
    depend on it.
    """

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    group_size: int
    padding: int = 0

    def words(self, num_parts: int = 1) -> Tensor:
        """`[E, P, T, B, 64, 32]` int16."""
        codes = self.codes.unflatten(1, (num_parts, -1))
        n, k = codes.shape[2:]
        missing = (0, -k % 128, 0, -n % TILE_ROWS)
        codes = functional.pad(codes, missing, value=self.padding)
        return tile_rows(pack_codes(codes, "int4")).contiguous().view(torch.int16)

    def in_memory(self, memory: Memory, num_parts: int = 1) -> tuple[Tensor | None, ...]:
        """Words, scales and zero points `[E, g, n]`, no matrix-wide scale, as kernels take them."""
        zero_points = None if self.zero_points is None else self.zero_points.transpose(1, 2)
        tensors = (self.words(num_parts), self.scales.transpose(1, 2), zero_points, None)
        return tuple(memory.holding(tensor) for tensor in tensors)

    @property
    def constexprs(self) -> dict[str, object]:
        return {"ELEMENT": "int4", "GROUP_SIZE": self.group_size, "DIVIDES": None}

    @property
    def dense(self) -> Tensor:
        """The matrices in float64."""
        zero_points = torch.full_like(self.scales, 8) if self.zero_points is None else None
        zero_points = self.zero_points if zero_points is None else zero_points
        widened = zero_points.double().repeat_interleave(self.group_size, dim=-1)
        scales = self.scales.double().repeat_interleave(self.group_size, dim=-1)
        return (self.codes.double() - widened) * scales


def run_count(routing: Routing, *, block_r: int = 16) -> Tensor:
    """Counts `[chunks, E]` of chunks of `block_r` routes."""
    memory = Memory()
    e, num_routes = routing.num_experts, routing.num_routes
    chunks = -(-num_routes // block_r)
    counts = memory.poisoned(chunks, e, dtype=torch.int32)
    launch(
        *(count_kernel, (chunks,), *memory.routing(routing), counts, num_routes),
        **routing.constexprs,
        E_BLOCK=1 << (e - 1).bit_length(),
        BLOCK_R=block_r,
    )
    memory.check()
    return counts


def run_place(
    routing: Routing, *, rows: int = 16, counts: Tensor | None = None, block_r: int = 16
) -> Placed:
    """Sorted routes, in tiles of `rows`; with counts of chunks, by a program a chunk."""
    memory = Memory()
    e, num_routes = routing.num_experts, routing.num_routes
    num_tiles = -(-num_routes // max(rows, 1)) + e
    sizes = (num_routes, e + 1, num_tiles, num_tiles, 1)
    placed = Placed(*(memory.poisoned(size, dtype=torch.int32) for size in sizes))
    kernel, programs, given = place_kernel, e, ()
    if counts is not None:
        kernel, programs, given = scatter_kernel, len(counts), (memory.holding(counts),)
    launch(
        *(kernel, (programs,), *memory.routing(routing), *given, *placed.tensors),
        *(num_routes, rows),
        **routing.constexprs,
        E_BLOCK=1 << (e - 1).bit_length(),
        BLOCK_R=block_r,
    )
    memory.check()
    return placed


def run_gate_up(
    x: Tensor,
    stack: Int4Stack,
    routing: Routing,
    placed: Placed | None,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    topk_weights: Tensor | None = None,
    padding: int = 0,
    block_m: int = 16,
    block_n: int = 64,
    is_joint: bool = False,
) -> Tensor:
    """hidden `[R, N]`: by place, or by route in direct mode (`placed` is None)."""
    memory = Memory()
    num_parts = 2 if activation.is_gated else 1
    k, n = stack.codes.shape[2], stack.codes.shape[1] // num_parts
    hidden = memory.poisoned(routing.num_routes, n, dtype=x.dtype)
    launch(
        *(gate_up_kernel, (-(-n // block_n), _num_tiles(routing, placed), 1)),
        memory.holding(x, padding=padding),
        *stack.in_memory(memory, num_parts),
        memory.holding(bias),
        *memory.routing(routing),
        memory.holding(topk_weights),
        *((None,) * 5 if placed is None else map(memory.holding, placed.tensors)),
        *(hidden, None, (k + padding) // unit_of(x.dtype), routing.num_routes),
        **(routing.constexprs | activation_constexprs(activation)),
        **{"K": k, "N": n, "TOP_K": routing.top_k, **stack.constexprs},
        **{"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT_K": 1},
        **{"JOINT": is_joint, "PAIRS": False},
    )
    memory.check()
    return hidden


def run_partials(
    x: Tensor,
    stack: Int4Stack,
    routing: Routing,
    *,
    split_k: int,
    is_gated: bool = True,
    padding: int = 0,
    block_m: int = 16,
    block_n: int = 64,
    is_joint: bool = False,
) -> Tensor:
    """The products of each span of K by themselves, `[split_k, R, P * N]` fp32 by route."""
    memory = Memory()
    num_parts = 2 if is_gated else 1
    rows, k = stack.codes.shape[1:]
    n = rows // num_parts
    partials = memory.poisoned(split_k, routing.num_routes, rows, dtype=torch.float32)
    launch(
        *(gate_up_kernel, (-(-n // block_n), _num_tiles(routing, None), split_k)),
        memory.holding(x, padding=padding),
        *(*stack.in_memory(memory, num_parts), None, *memory.routing(routing), None),
        *(*(None,) * 6, partials, (k + padding) // unit_of(x.dtype), routing.num_routes),
        **routing.constexprs,
        **{"ACTIVATION": None if is_gated else "relu2", "LIMIT": None, "ALPHA": None, "BETA": None},
        **{"K": k, "N": n, "TOP_K": routing.top_k, **stack.constexprs},
        **{"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLIT_K": split_k},
        **{"JOINT": is_joint, "PAIRS": False},
    )
    memory.check()
    return partials


def run_activate(
    partials: Tensor,
    routing: Routing,
    *,
    activation: Activation,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    topk_weights: Tensor | None = None,
    block_n: int = 64,
) -> Tensor:
    """hidden `[R, N]` by route; one program more than there are routes."""
    memory = Memory()
    n = partials.shape[2] // (2 if activation.is_gated else 1)
    hidden = memory.poisoned(routing.num_routes, n, dtype=dtype)
    launch(
        *(activate_kernel, (routing.num_routes + 1, -(-n // block_n)), memory.holding(partials)),
        *(memory.holding(bias), *memory.routing(routing), memory.holding(topk_weights)),
        *(hidden, routing.num_routes),
        **(routing.constexprs | activation_constexprs(activation)),
        **{"N": n, "SPLIT_K": len(partials), "BLOCK_N": block_n},
    )
    memory.check()
    return hidden


def run_down(
    hidden: Tensor,
    stack: Int4Stack,
    routing: Routing,
    placed: Placed | None,
    *,
    bias: Tensor | None = None,
    block_m: int = 16,
    block_n: int = 64,
    span: int = 1,
) -> Tensor:
    """y `[R, K]` by route."""
    memory = Memory()
    k, n = stack.codes.shape[1:]
    y = memory.poisoned(routing.num_routes, k, dtype=hidden.dtype)
    launch(
        *(down_kernel, (-(-k // (block_n * span)), _num_tiles(routing, placed))),
        *(memory.holding(hidden), *stack.in_memory(memory), memory.holding(bias)),
        *memory.routing(routing),
        *((None,) * 5 if placed is None else map(memory.holding, placed.tensors)),
        *(y, routing.num_routes),
        **routing.constexprs,
        **{"K": k, "N": n, "BLOCK_M": block_m, **stack.constexprs},
        **{"BLOCK_N": block_n, "SPAN": span, "PAIRS": False},
    )
    memory.check()
    return y


def run_combine(
    y: Tensor,
    routing: Routing,
    topk_weights: Tensor | None,
    *,
    padding: int = 0,
    block_k: int = 16,
) -> Tensor:
    """out `[M, K]`, its rows at least `padding` elements apart; what lies between is checked."""
    memory = Memory()
    k, unit = y.shape[1], unit_of(y.dtype)
    stride = -(-(k + padding) // unit)
    wide = memory.poisoned(routing.num_tokens, stride * unit, dtype=y.dtype)
    launch(
        *(combine_kernel, (routing.num_tokens, -(-k // block_k)), memory.holding(y)),
        *memory.routing(routing),
        *(memory.holding(topk_weights), wide, stride, routing.num_tokens),
        **routing.constexprs,
        **{"K": k, "TOP_K": routing.top_k, "BLOCK_K": block_k},
    )
    memory.check()
    assert wide[:, k:].isnan().all()
    return wide[:, :k]


def run_on_nothing(kernel: object, *, num_pointers: int, absent: set[int], **constexprs) -> None:
    """Launch on empty work: one program, integers 0, pointers at zeros that guards surround.

    `integers` are those that are never 0, by their places.
    """
    memory = Memory()
    zeros = memory.poisoned(EMPTY_BYTES, dtype=torch.uint8).fill_(0)
    # What a pointer points to is told by its type, so each of the kernel's gets one of its own.
    dtypes = constexprs.pop("dtypes")
    pointers = [
        None if i in absent else zeros.view(dtypes.get(i, torch.int32)) for i in range(num_pointers)
    ]
    num_integers, others = constexprs.pop("num_integers"), constexprs.pop("integers", {})
    integers = [others.get(i, 0) for i in range(num_integers)]
    launch(kernel, (1, 1, 1), *pointers, *integers, **constexprs)
    memory.check()


def unit_of(dtype: torch.dtype) -> int:
    """Elements of 16 bytes, in which kernels count how far apart rows of x and out lie."""
    return 16 // dtype.itemsize


def activation_constexprs(activation: Activation) -> dict[str, str | float | None]:
    return {
        "ACTIVATION": activation.name,
        "LIMIT": activation.clamp_limit,
        "ALPHA": activation.alpha,
        "BETA": activation.beta,
    }


def activation_bound(
    activation: Activation, sums: Tensor, error: Tensor, wanted: Tensor, dtype: torch.dtype
) -> Tensor:
    """How far an activation's result may lie from the oracle's.

    sums `[R, P * N]` are the magnitudes of gate and up, S_g and S_u, and error is how far rounding
    carried them, e_g and e_u. With f(gate, up) = a(gate) * b(up): |a| <= |gate| and |a'| <= 2,
    |b| <= |up| + |beta| and |b'| <= 1 hold for every gated activation (1.1 bounds a' but for
    situ's two factors), so f moves by at most 2 e_g (S_u + |beta| + e_u) + S_g e_u. relu2 moves by
    at most 2 S_g e_g + e_g**2. The activation itself takes at most 16 operations and an
    exponential, whose argument z is rounded by ROUNDING * |z| <= 2 * ROUNDING * S_g: another
    (32 + 4 S_g) * ROUNDING of the magnitude. The last rounding is half an eps of the result, or of
    the smallest normal number.
    """
    beta = abs(activation.beta)
    if activation.is_gated:
        (gate, up), (gate_error, up_error) = sums.chunk(2, dim=1), error.chunk(2, dim=1)
        moved = 2 * gate_error * (up + beta + up_error) + gate * up_error
        size = gate * (up + beta)
    else:
        gate, moved, size = sums, 2 * sums * error + error**2, sums**2
    finfo = torch.finfo(dtype)
    last = finfo.eps / 2 * (wanted.abs() + finfo.smallest_normal)
    return moved + (32 + 4 * gate) * ROUNDING * size + last


def _num_tiles(routing: Routing, placed: Placed | None) -> int:
    """One tile more than there is work, for programs past the end."""
    return (routing.num_routes if placed is None else int(placed.num_blocks)) + 1


@st.composite
def routings(
    draw: st.DrawFn, *, max_tokens: int = 9, max_experts: int = 6, max_slots: int = 8
) -> Routing:
    """No tokens, one, some; experts with none or all; ids out of range; maps; both id types."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    num_experts, top_k = draw(st.integers(1, max_experts)), draw(st.integers(1, max_slots))
    num_tokens = draw(st.integers(0, max_tokens))
    expert_map, num_ids = None, num_experts
    if draw(st.booleans()):
        # Experts held here in any order among ids of experts held elsewhere.
        num_ids = num_experts + draw(st.integers(0, 4))
        order = torch.randperm(num_ids, generator=generator)
        elsewhere = draw(st.sampled_from((-1, num_experts)))
        expert_map = torch.where(order < num_experts, order, elsewhere).int()
    kind = draw(st.sampled_from(("spread", "one expert", "with sentinels", "sentinels only")))
    # With replacement, so that a token may name an expert twice.
    ids = torch.randint(0, num_ids, (num_tokens, top_k), generator=generator)
    outside = torch.tensor([*SENTINELS, num_ids, num_ids + 1])
    chosen = outside[torch.randint(0, len(outside), ids.shape, generator=generator)]
    if kind == "one expert":
        ids.fill_(num_ids - 1)
    elif kind == "sentinels only":
        ids = chosen
    elif kind == "with sentinels":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, chosen, ids)
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    return Routing(ids.to(dtype), num_experts, expert_map)


@st.composite
def stacks(
    draw: st.DrawFn,
    num_experts: int,
    num_rows: int,
    shape: tuple[int, int],
    *,
    scale_dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Int4Stack:
    """Weights of about 1 / sqrt(k), so that products of ordinary rows are of about 1.

    Args:
        shape: k and the group size.
    """
    k, group_size = shape
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def integers(*size: int) -> Tensor:
        return torch.randint(0, 16, size, dtype=torch.uint8, generator=generator)

    groups = (num_experts, num_rows, k // group_size)
    scales = (0.1 + torch.rand(groups, generator=generator)) / (4 * k**0.5)
    return Int4Stack(
        codes=integers(num_experts, num_rows, k),
        scales=scales.to(draw(st.sampled_from(scale_dtypes))),
        zero_points=integers(*groups) if draw(st.booleans()) else None,
        group_size=group_size,
        padding=draw(st.sampled_from((0, 15))),
    )
