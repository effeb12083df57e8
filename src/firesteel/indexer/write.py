# pyright: basic
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
# ruff: noqa: ANN001, ANN201, ANN202
"""The page writer: new keys rounded to e4m3 with a scale a token, or to 16 bits; put at slots."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@triton.jit
def half_bits(values, IS_BF16: tl.constexpr):
    """int16 of fp32 values as bf16 or fp16, rounded to nearest even; NaN stays one.

    In integers, as e4m3_bits.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if IS_BF16:
        found = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        found = tl.where(magnitude > 0x7F800000, 0x7FC0, found)
    else:
        normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10)
        # Below 2^-14 values are multiples of 2^-24, to which adding a half rounds.
        least = tl.minimum(magnitude, 0x38800000)
        shifted = least.to(tl.float32, bitcast=True) + 0.5
        small = shifted.to(tl.int32, bitcast=True) - 0x3F000000
        found = tl.where(magnitude < 0x38800000, small, tl.minimum(normal, 0x7C00))
        found = tl.where(magnitude > 0x7F800000, 0x7E00, found)
    return (found | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def quantized(keys, POWER_OF_TWO: tl.constexpr):
    """(values [T, 128] as uint8 e4m3, scales [T]) of fp32 keys [T, 128]."""
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
    return e4m3_bits(value), scale


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
    values  [bytes]   uint8 or as the keys of a 16-bit cache; 128 numbers a token written
    scales  [bytes]   fp32         the cache again   4 bytes a token written; or None

    Without scales value[t] = keys[t], in the type that values has: bf16 or fp16.

    Rows of keys lie stride_keys times 16 bytes apart, pages page_stride times 16 bytes.

    Grid      (ceil(M / BLOCK_M),); a program has BLOCK_M tokens.
    Key       dtypes, POWER_OF_TWO, BLOCK_M.
    Numerics  both divisions rounded to nearest, the value clamped to +-448 and rounded to nearest
              even: the oracle's bits. POWER_OF_TWO rounds the scale up to a power of two. A scale
              is at least 2^-126, and 1 of a token that is all zeros. A NaN stays one. 16-bit
              values are rounded to nearest even; those that keys have already are copied.
    Bytes     M * (2 * 128 + 4) read, M * 132 or M * 256 written
    Range     slots * page_stride may pass 2**31, so offsets are int64. Two tokens of one slot: one
              of them, unknown which.
    Oracle    quantize_reference, round_reference
    """
    if PDL:
        # The next launch may take its place now: it waits for the end of this one.
        gdc_launch_dependents()
        gdc_wait()
    UNIT: tl.constexpr = 128 // keys_ptr.dtype.element_ty.primitive_bitwidth
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, 128)
    is_token = token < M
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int64)
    is_token = is_token & (slot >= 0)
    at = token[:, None] * stride_keys * UNIT + d[None, :]
    keys = tl.load(keys_ptr + at, mask=is_token[:, None], other=0.0)
    page, offset = slot // 64, slot % 64
    if scales_ptr is None:
        start = page * page_stride * 8
        element: tl.constexpr = values_ptr.dtype.element_ty
        if keys.dtype != element:
            bits = half_bits(keys.to(tl.float32), element == tl.bfloat16)
            keys = bits.to(element, bitcast=True)
    else:
        start = page * page_stride * 16
        keys, scale = quantized(keys.to(tl.float32), POWER_OF_TWO)
        tl.store(scales_ptr + page * page_stride * 4 + 2048 + offset, scale, mask=is_token)
    values_ptrs = values_ptr + (start + offset * 128)[:, None] + d[None, :]
    tl.store(values_ptrs, keys, mask=is_token[:, None])
