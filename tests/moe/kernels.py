"""How tests launch the MoE kernels: guarded memory, int4 weights, routings, one call a kernel.

These run in Triton's interpreter, which must be on before Triton is imported; `launch` raises
where it is not, so that no test passes by running nothing.
"""

import mmap
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from firesteel.formats.packed import pack_codes
from firesteel.moe.activation import Activation
from firesteel.moe.combine import combine_kernel
from firesteel.moe.down import down_kernel
from firesteel.moe.gate_up import gate_up_kernel
from firesteel.moe.route import count_kernel, place_kernel

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
            before, after = (part.contiguous().view(torch.uint8) for part in (tensor, held))
            assert torch.equal(before, after)


def sparse_memory(num_bytes: int) -> mmap.mmap:
    """Zeros of which only touched pages take memory, so that offsets may pass 2**31."""
    no_reserve = 0x4000
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


def at(memory: mmap.mmap, num_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements at a byte offset; a kernel given the tensor may reach further."""
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=num_bytes)


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
        return (
            self.route_ids,
            self.expert_offsets,
            self.block_expert,
            self.block_row,
            self.num_blocks,
        )

    def by_route(self, hidden: Tensor) -> Tensor:
        """Rows that lie by place, put where their routes are; the rest NaN."""
        num_placed = int(self.expert_offsets[-1])
        out = torch.full_like(hidden, float("nan"))
        out[self.route_ids[:num_placed].long()] = hidden[:num_placed]
        return out


@dataclass(frozen=True)
class Int4Stack:
    """codes [E, n, k] uint8 below 16, scales [E, n, g], zero_points [E, n, g] uint8 or None."""

    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None
    group_size: int

    @property
    def words(self) -> Tensor:
        return pack_codes(self.codes, 4).view(torch.int16)

    @property
    def dense(self) -> Tensor:
        """The matrices in float64."""
        zero_points = torch.full_like(self.scales, 8) if self.zero_points is None else None
        zero_points = self.zero_points if zero_points is None else zero_points
        widened = zero_points.double().repeat_interleave(self.group_size, dim=-1)
        scales = self.scales.double().repeat_interleave(self.group_size, dim=-1)
        return (self.codes.double() - widened) * scales


def run_count(routing: Routing, *, block_r: int = 16) -> Tensor:
    memory = Memory()
    counts = memory.poisoned(routing.num_experts, dtype=torch.int32)
    launch(
        *(count_kernel, (routing.num_experts,), *memory.routing(routing), counts),
        routing.num_routes,
        **routing.constexprs,
        BLOCK_R=block_r,
    )
    memory.check()
    return counts


def run_place(
    routing: Routing, *, block_m: int = 16, counts: Tensor | None = None, block_r: int = 16
) -> Placed:
    memory = Memory()
    e, num_routes = routing.num_experts, routing.num_routes
    num_tiles = -(-num_routes // block_m) + e
    sizes = (num_routes, e + 1, num_tiles, num_tiles, 1)
    placed = Placed(*(memory.poisoned(size, dtype=torch.int32) for size in sizes))
    launch(
        *(place_kernel, (e,), *memory.routing(routing), memory.holding(counts), *placed.tensors),
        num_routes,
        **routing.constexprs,
        E_BLOCK=1 << (e - 1).bit_length(),
        BLOCK_M=block_m,
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
    block_n: int = 16,
) -> Tensor:
    """hidden `[R, N]`: by place, or by route in direct mode (`placed` is None)."""
    memory = Memory()
    rows, k = stack.codes.shape[1:]
    n = rows // (2 if activation.is_gated else 1)
    hidden = memory.poisoned(routing.num_routes, n, dtype=x.dtype)
    held = memory.holding(x, padding=padding)
    launch(
        *(gate_up_kernel, (-(-n // block_n), _num_tiles(routing, placed)), held),
        *(memory.holding(tensor) for tensor in (stack.words, stack.scales, stack.zero_points)),
        memory.holding(bias),
        *memory.routing(routing),
        memory.holding(topk_weights),
        *((None,) * 5 if placed is None else map(memory.holding, placed.tensors)),
        *(hidden, k + padding, routing.num_routes),
        **(routing.constexprs | activation_constexprs(activation)),
        **{"K": k, "N": n, "TOP_K": routing.top_k, "GROUP_SIZE": stack.group_size},
        **{"BLOCK_M": block_m, "BLOCK_N": block_n},
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
    block_n: int = 16,
) -> Tensor:
    """y `[R, K]` by route."""
    memory = Memory()
    k, n = stack.codes.shape[1:]
    y = memory.poisoned(routing.num_routes, k, dtype=hidden.dtype)
    launch(
        *(down_kernel, (-(-k // block_n), _num_tiles(routing, placed)), memory.holding(hidden)),
        *(memory.holding(tensor) for tensor in (stack.words, stack.scales, stack.zero_points)),
        memory.holding(bias),
        *memory.routing(routing),
        *((None,) * 5 if placed is None else map(memory.holding, placed.tensors)),
        *(y, routing.num_routes),
        **routing.constexprs,
        **{"K": k, "N": n, "GROUP_SIZE": stack.group_size, "BLOCK_M": block_m},
        BLOCK_N=block_n,
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
    """out `[M, K]`, its rows `padding` elements apart; what lies between them is checked."""
    memory = Memory()
    k = y.shape[1]
    wide = memory.poisoned(routing.num_tokens, k + padding, dtype=y.dtype)
    launch(
        *(combine_kernel, (routing.num_tokens, -(-k // block_k)), memory.holding(y)),
        *memory.routing(routing),
        *(memory.holding(topk_weights), wide, k + padding, routing.num_tokens),
        **routing.constexprs,
        **{"K": k, "TOP_K": routing.top_k, "BLOCK_K": block_k},
    )
    memory.check()
    assert wide[:, k:].isnan().all()
    return wide[:, :k]


def run_on_nothing(kernel: object, *, num_pointers: int, absent: set[int], **constexprs) -> None:
    """Launch on empty work: one program, integers 0, pointers at zeros that guards surround."""
    memory = Memory()
    zeros = memory.poisoned(EMPTY_BYTES, dtype=torch.uint8).fill_(0)
    # What a pointer points to is told by its type, so each of the kernel's gets one of its own.
    dtypes = constexprs.pop("dtypes")
    pointers = [
        None if i in absent else zeros.view(dtypes.get(i, torch.int32)) for i in range(num_pointers)
    ]
    num_integers = constexprs.pop("num_integers")
    launch(kernel, (1, 1, 1), *pointers, *[0] * num_integers, **constexprs)
    memory.check()


def activation_constexprs(activation: Activation) -> dict[str, str | float | None]:
    return {
        "ACTIVATION": activation.name,
        "LIMIT": activation.clamp_limit,
        "ALPHA": activation.alpha,
        "BETA": activation.beta,
    }


def _num_tiles(routing: Routing, placed: Placed | None) -> int:
    """One tile more than there is work, for programs past the end."""
    return (routing.num_routes if placed is None else int(placed.num_blocks)) + 1


@st.composite
def routings(draw: st.DrawFn, *, max_tokens: int = 9, max_experts: int = 6) -> Routing:
    """No tokens, one, some; experts with none or all; ids out of range; maps; both id types."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    num_experts, top_k = draw(st.integers(1, max_experts)), draw(st.integers(1, 8))
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
    )
