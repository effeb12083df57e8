"""Every 3-bit weight, as the compiled kernels see it: bf16 and fp16, looked up by PTX."""

import pytest
import torch

from firesteel.moe.down import down_kernel
from tests.moe.narrow import E5M3_BYTES, NarrowStack

pytestmark = pytest.mark.gpu


def weights_seen(stack: NarrowStack, dtype: torch.dtype, block_m: int) -> torch.Tensor:
    """The matrix `[k, n]` of the one expert, from products with the columns of the identity.

    In direct mode, a route a tile; the last tile is past the end.
    """
    _, k, n = stack.codes.shape
    words, scales = stack.words().cuda(), stack.scales.transpose(1, 2).contiguous().cuda()
    zeros = stack.zero_points
    zeros = None if zeros is None else zeros.transpose(1, 2).contiguous().cuda()
    y = torch.full((n, k), torch.nan, dtype=dtype, device="cuda")
    down_kernel[(-(-k // 64), n + 1)](
        *(torch.eye(n, dtype=dtype, device="cuda"), words, scales, zeros, None, None),
        *(torch.zeros(n, dtype=torch.int32, device="cuda"), None, *(None,) * 5, y, n),
        **stack.constexprs,
        **{"K": k, "N": n, "E": 1, "NUM_GLOBAL": None, "BLOCK_M": block_m, "BLOCK_N": 64},
        **{"SPAN": 1, "PAIRS": True, "PDL": False},
    )
    return y.T.cpu()


@pytest.mark.parametrize("block_m", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_nf3_weight_is_rounded_once(dtype: torch.dtype, block_m: int) -> None:
    """A row a scale, with every code in every plane: y is a weight rounded to its type."""
    codes = torch.arange(8, dtype=torch.uint8).repeat(1, len(E5M3_BYTES), 16)
    stack = NarrowStack("nf3", codes, E5M3_BYTES.view(1, -1, 1).repeat(1, 1, 4))
    assert torch.equal(weights_seen(stack, dtype, block_m), stack.dense[0].to(dtype))


@pytest.mark.parametrize("block_m", [8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_zero_points", [True, False])
def test_every_int3_weight_is_exact(
    dtype: torch.dtype, block_m: int, has_zero_points: bool
) -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat(1, 9, 16)
    zeros = torch.arange(9, dtype=torch.uint8).view(1, 9, 1).repeat(1, 1, 4)
    scales = torch.ones(1, 9, 4, dtype=dtype)
    stack = NarrowStack("int3", codes, scales, zeros if has_zero_points else None)
    assert torch.equal(weights_seen(stack, dtype, block_m).double(), stack.dense[0])


@pytest.mark.parametrize("element", ["nf3", "int3"])
def test_each_group_has_its_own_scale(element: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 8, (1, 130, 256), dtype=torch.uint8, generator=generator)
    scales = torch.randint(8, 128, (1, 130, 8), generator=generator).byte()
    if element == "int3":
        scales = torch.exp2(scales.double() / 8 - 8).floor().bfloat16()
    stack = NarrowStack(element, codes, scales)
    seen = weights_seen(stack, torch.bfloat16, 8)
    assert torch.equal(seen, stack.dense[0].bfloat16())
