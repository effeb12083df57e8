"""Every FP4 weight, as the compiled kernels see it: bf16 and fp16, codes taken in pairs."""

import pytest
import torch

from firesteel.moe.down import down_kernel
from tests.moe.fp4 import E4M3_BYTES, GROUP_SIZES, Fp4Stack

pytestmark = pytest.mark.gpu


def weights_seen(stack: Fp4Stack, dtype: torch.dtype, block_m: int) -> torch.Tensor:
    """The matrix `[k, n]` of the one expert, from products with the columns of the identity.

    In direct mode, a route a tile; the last tile is past the end.
    """
    _, k, n = stack.codes.shape
    words, scales = stack.words().cuda(), stack.scales.transpose(1, 2).contiguous().cuda()
    scale = None if stack.global_scale is None else stack.global_scale.cuda()
    y = torch.full((n, k), torch.nan, dtype=dtype, device="cuda")
    down_kernel[(-(-k // 64), n + 1)](
        *(torch.eye(n, dtype=dtype, device="cuda"), words, scales, None, scale, None),
        *(torch.zeros(n, dtype=torch.int32, device="cuda"), None, *(None,) * 5, y, n),
        **stack.constexprs,
        **{"K": k, "N": n, "E": 1, "NUM_GLOBAL": None, "BLOCK_M": block_m, "BLOCK_N": 64},
        **{"SPAN": 1, "PAIRS": True, "PDL": False},
    )
    return y.T.cpu()


def every_scale(element: str, scales: torch.Tensor) -> Fp4Stack:
    """A row a scale, with every code in every plane."""
    groups = 128 // GROUP_SIZES[element]
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, len(scales), 8)
    return Fp4Stack(element, codes, scales.view(1, -1, 1).repeat(1, 1, groups))


@pytest.mark.parametrize("block_m", [8, 16, 64])
@pytest.mark.parametrize(
    ("dtype", "lowest", "highest"), [(torch.bfloat16, 27, 160), (torch.float16, 104, 128)]
)
def test_every_mxfp4_weight_is_exact(
    dtype: torch.dtype, lowest: int, highest: int, block_m: int
) -> None:
    stack = every_scale("mxfp4", torch.arange(lowest, highest + 1, dtype=torch.uint8))
    assert torch.equal(weights_seen(stack, dtype, block_m).double(), stack.dense[0])


@pytest.mark.parametrize("block_m", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divides", [True, False])
def test_every_nvfp4_weight_is_exact(dtype: torch.dtype, block_m: int, divides: bool) -> None:
    plain = every_scale("nvfp4", E4M3_BYTES)
    scale = torch.tensor([[0.25 if divides else 4.0]])
    stack = Fp4Stack("nvfp4", plain.codes, plain.scales, global_scale=scale, divides=divides)
    assert torch.equal(weights_seen(stack, dtype, block_m).double(), stack.dense[0])


@pytest.mark.parametrize("element", ["mxfp4", "nvfp4"])
def test_each_group_has_its_own_scale(element: str) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = 256 // GROUP_SIZES[element]
    codes = torch.randint(0, 16, (1, 130, 256), dtype=torch.uint8, generator=generator)
    lowest = 110 if element == "mxfp4" else 0x20
    scales = torch.randint(lowest, lowest + 32, (1, 130, groups), generator=generator).byte()
    scale = None if element == "mxfp4" else torch.ones(1, 1)
    stack = Fp4Stack(element, codes, scales, global_scale=scale)
    assert torch.equal(weights_seen(stack, torch.bfloat16, 8).double(), stack.dense[0])
