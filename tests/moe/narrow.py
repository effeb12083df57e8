"""3-bit weights as tests give them to the MoE kernels, and the numbers they stand for."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from firesteel.formats.packed import pack_codes, tile_rows
from tests.moe.kernels import DTYPES, Memory

# Of E5M3 what NF3 has: 0, and 2**-10 to 30.
E5M3_BYTES = torch.tensor([0, *range(8, 128)], dtype=torch.uint8)
_MAGNITUDES = (0.1279296875, 0.35546875, 0.60546875, 1.0)
NF3 = torch.tensor(
    [*(-value for value in reversed(_MAGNITUDES)), *_MAGNITUDES], dtype=torch.float64
)


@dataclass(frozen=True)
class NarrowStack:
    """codes [E, n, k] uint8 below 8, scales [E, n, g]: of nf3 bytes, of int3 numbers, which may
    have zero_points [E, n, g] uint8.

    `padding` is the code past the last row and column, where the packed form has 0: no kernel may
    depend on it.
    """

    element: str
    codes: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    group_size: int = 32
    padding: int = 0

    def words(self, num_parts: int = 1) -> Tensor:
        """`[E, P, T, B, 3, 64, 8]` int16."""
        codes = self.codes.unflatten(1, (num_parts, -1))
        n, k = codes.shape[2:]
        codes = functional.pad(codes, (0, -k % 128, 0, -n % 64), value=self.padding)
        return tile_rows(pack_codes(codes, self.element)).contiguous().view(torch.int16)

    def in_memory(self, memory: Memory, num_parts: int = 1) -> tuple[Tensor | None, ...]:
        """Words, scales and zero points `[E, g, n]`, no matrix-wide scale, as kernels take them."""
        zero_points = None if self.zero_points is None else self.zero_points.transpose(1, 2)
        tensors = (self.words(num_parts), self.scales.transpose(1, 2), zero_points, None)
        return tuple(memory.holding(tensor) for tensor in tensors)

    @property
    def constexprs(self) -> dict[str, object]:
        return {"ELEMENT": self.element, "GROUP_SIZE": self.group_size, "DIVIDES": None}

    @property
    def dense(self) -> Tensor:
        """The matrices in float64, nf3's not rounded to bf16."""
        if self.element == "nf3":
            numbers, scales = NF3[self.codes.long()], e5m3(self.scales)
        else:
            numbers, scales = self.codes.double(), self.scales.double()
            zero_points = 4.0
            if self.zero_points is not None:
                zero_points = self.zero_points.double().repeat_interleave(self.group_size, dim=-1)
            numbers = numbers - zero_points
        return numbers * scales.repeat_interleave(self.group_size, dim=-1)


def e5m3(scales: Tensor) -> Tensor:
    """The scales of bytes in float64: (8 + m) * 2**(e - 14), and 0 is 0."""
    exponent, mantissa = (scales >> 3).double(), (scales & 7).double()
    return torch.where(scales == 0, 0.0, (8 + mantissa) * torch.exp2(exponent - 14))


@st.composite
def narrow_stacks(
    draw: st.DrawFn, element: str, shape: tuple[int, int, int], *, group_size: int = 32
) -> NarrowStack:
    """Any codes; nf3's scales are 2**-6 to 2**-4 and a few others, int3's of about 1 / sqrt(k).

    Args:
        shape: E, rows and k of the stack.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    num_experts, num_rows, k = shape
    groups = (num_experts, num_rows, k // group_size)
    codes = torch.randint(0, 8, shape, dtype=torch.uint8, generator=generator)
    padding = draw(st.sampled_from((0, 7)))
    if element == "nf3":
        scales = torch.randint(40, 56, groups, dtype=torch.uint8, generator=generator)
        others = E5M3_BYTES[torch.randint(0, 80, groups, generator=generator)]
        scales = torch.where(torch.rand(groups, generator=generator) < 0.2, others, scales)
        return NarrowStack(element, codes, scales, padding=padding)
    scales = (0.1 + torch.rand(groups, generator=generator)) / (2 * k**0.5)
    zero_points = torch.randint(0, 8, groups, dtype=torch.uint8, generator=generator)
    return NarrowStack(
        element,
        codes,
        scales.to(draw(st.sampled_from(DTYPES))),
        zero_points if draw(st.booleans()) else None,
        group_size,
        padding,
    )
