# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The page writer: new keys rounded to e4m3 with a scale a token, and put at their slots."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["write_pages_kernel"]


@triton.jit
def e4m3_bits(values):
    """uint8 e4m3 of fp32 values within +-448, rounded to nearest even; NaN is 0x7F.

    In integers, and so the same in Triton's interpreter, whose own conversion rounds otherwise.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of mantissa stay; a carry moves into the exponent, whose bias is 7 and not 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 values are multiples of 2^-9, to which adding 2^14 rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(magnitude < 0x3C800000, small, normal)
    found = tl.where(magnitude > 0x7F800000, 0x7F, found)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit(
    do_not_specialize=["stride_keys", "page_stride", "M"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def write_pages_kernel(
    keys_ptr,
    slots_ptr,
    values_ptr,
    scales_ptr,
    stride_keys: tl.int64,
    page_stride: tl.int64,
    M: tl.int64,
    POWER_OF_TWO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """scale[t] = max |keys[t]| / 448; value[t] = e4m3(keys[t] / scale[t]), both at slots[t]

    name    shape     dtype        layout            traffic
    keys    [M, 128]  fp           unit last stride  read once
    slots   [M]       int32/int64  contiguous        read once; negative: the token is skipped
    values  [bytes]   uint8        the cache         128 bytes a token written
    scales  [bytes]   fp32         the cache again   4 bytes a token written

    Rows of keys lie stride_keys times 16 bytes apart, pages page_stride times 16 bytes.

    Grid      (ceil(M / BLOCK_M),); a program has BLOCK_M tokens.
    Key       dtypes, POWER_OF_TWO, BLOCK_M.
    Numerics  both divisions rounded to nearest, the value clamped to +-448 and rounded to nearest
              even: the oracle's bits. POWER_OF_TWO rounds the scale up to a power of two. A scale
              is at least 2^-126, and 1 of a token that is all zeros. A NaN stays one.
    Bytes     M * (2 * 128 + 4) read, M * 132 written
    Range     slots * page_stride may pass 2**31, so offsets are int64. Two tokens of one slot: one
              of them, unknown which.
    Oracle    quantize_reference
    """
    if PDL:
        gdc_wait()
    UNIT: tl.constexpr = 128 // keys_ptr.dtype.element_ty.primitive_bitwidth
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, 128)
    is_token = token < M
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    is_token = is_token & (slot >= 0)
    at = token[:, None] * stride_keys * UNIT + d[None, :]
    keys = tl.load(keys_ptr + at, mask=is_token[:, None], other=0.0).to(tl.float32)
    magnitude = tl.abs(keys)
    # A NaN is not equal to itself.
    amax = tl.max(tl.where(keys == keys, magnitude, 0.0), axis=1)
    scale = tl.maximum(tl.div_rn(amax, tl.zeros_like(amax) + 448.0), 2.0**-126)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        # Any mantissa carries into the exponent.
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    value = tl.div_rn(keys, tl.broadcast_to(scale[:, None], keys.shape))
    # Comparisons let a NaN through, where min and max would drop it.
    value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    page, offset = slot // 64, slot % 64
    start = page * page_stride * 16
    values_ptrs = values_ptr + (start + offset * 128)[:, None] + d[None, :]
    tl.store(values_ptrs, e4m3_bits(value), mask=is_token[:, None])
    tl.store(scales_ptr + page * page_stride * 4 + 2048 + offset, scale, mask=is_token)
