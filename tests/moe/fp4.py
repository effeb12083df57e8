"""FP4 weights as tests give them to the MoE kernels, and the numbers they stand for."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from firesteel.formats.packed import TILE_ROWS, pack_codes, tile_rows
from tests.moe.kernels import Memory

ELEMENTS = ("mxfp4", "nvfp4")
GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}
# Of E4M3 every byte but the two that are NaN.
E4M3_BYTES = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64)


@dataclass(frozen=True)
class Fp4Stack:
    """codes [E, n, k] uint8 below 16, scales [E, n, g] bytes, global_scale [E, P] fp32 or None.

    `padding` is the code past the last row and column, where the packed form has 0: no kernel may
    depend on it.
    """

    element: str
    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None = None
    divides: bool = False
    padding: int = 0

    def words(self, num_parts: int = 1) -> Tensor:
        """`[E, P, T, B, 64, 32]` int16."""
        codes = self.codes.unflatten(1, (num_parts, -1))
        n, k = codes.shape[2:]
        missing = (0, -k % 128, 0, -n % TILE_ROWS)
        codes = functional.pad(codes, missing, value=self.padding)
        return tile_rows(pack_codes(codes, "e2m1")).contiguous().view(torch.int16)

    def in_memory(self, memory: Memory, num_parts: int = 1) -> tuple[Tensor | None, ...]:
        """Words, scales `[E, g, n]`, no zero points, matrix-wide scales, as kernels take them."""
        tensors = (self.words(num_parts), self.scales.transpose(1, 2), None, self.global_scale)
        return tuple(memory.holding(tensor) for tensor in tensors)

    @property
    def constexprs(self) -> dict[str, object]:
        divides = None if self.global_scale is None else self.divides
        return {
            "ELEMENT": self.element,
            "GROUP_SIZE": GROUP_SIZES[self.element],
            "DIVIDES": divides,
        }

    @property
    def dense(self) -> Tensor:
        """The matrices in float64."""
        if self.element == "mxfp4":
            scales = torch.exp2(self.scales.double() - 127)
        else:
            scales = self.scales.view(torch.float8_e4m3fn).double()
        dense = _E2M1[self.codes.long()]
        dense = dense * scales.repeat_interleave(GROUP_SIZES[self.element], dim=-1)
        if self.global_scale is not None:
            rows = dense.shape[1] // self.global_scale.shape[1]
            wide = self.global_scale.double().repeat_interleave(rows, dim=1).unsqueeze(-1)
            dense = dense / wide if self.divides else dense * wide
        return dense


@st.composite
def fp4_stacks(
    draw: st.DrawFn,
    element: str,
    shape: tuple[int, int, int],
    *,
    num_parts: int = 1,
    size: float | None = None,
) -> Fp4Stack:
    """Weights of about `size`, by default 1 / sqrt(k); mxfp4's scales are of 32 octaves.

    Args:
        shape: E, rows and k of the stack.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    num_experts, num_rows, k = shape
    size = k**-0.5 if size is None else size
    groups = (num_experts, num_rows, k // GROUP_SIZES[element])
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    padding = draw(st.sampled_from((0, 15)))
    exponent = 127 - 3 + round(torch.tensor(size).double().log2().item())
    if element == "mxfp4":
        below = torch.randint(0, 5, groups, generator=generator)
        return Fp4Stack(element, codes, (exponent - below).to(torch.uint8), padding=padding)
    chosen = torch.randint(0, len(E4M3_BYTES), groups, generator=generator)
    divides = draw(st.booleans())
    # The largest weight of a matrix without its scale is 6 * 448.
    factor = size / 2688 * (0.5 + torch.rand(num_experts, num_parts, generator=generator))
    return Fp4Stack(
        element,
        codes,
        E4M3_BYTES[chosen],
        global_scale=(1 / factor if divides else factor).float(),
        divides=divides,
        padding=padding,
    )
