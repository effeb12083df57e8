"""Hypothesis strategies for what firesteel reads: schemes, matrices, stored tensors, tiles.

Shapes and choices are drawn, so they shrink; bulk numbers come from a drawn seed. Codes, zero
points and scale bits reach both ends of their range.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from firesteel.formats.base import (
    ELEMENTS,
    SCALE_DTYPES,
    Divisor,
    GlobalScale,
    Multiplier,
    QuantizedMatrix,
    ScaleType,
    Scheme,
    TensorHeader,
)
from firesteel.formats.nf3 import nf3_scheme
from firesteel.formats.registry import FORMATS, format_named
from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, padded, trellis_scheme

INT_BITS = (3, 4, 8)
GROUP_SIZES = (16, 32, 64, 128)
FLOAT_SCALES: tuple[ScaleType, ...] = ("bf16", "fp16", "fp32")
FORMAT_NAMES = tuple(entry.name for entry in FORMATS if entry.name != "exl3")
"""Formats of codes and scales."""
CODEBOOKS = ("mcg", "3inst", "mul1")
TRELLIS_RATES = tuple(half / 2 for half in range(2, 17))
TRELLIS_CODES = st.builds(TrellisCode, st.sampled_from(TRELLIS_RATES), st.sampled_from(CODEBOOKS))

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_GPTQ_LAYOUTS = ("v1", "v2", "v1-without-g_idx", "v2-without-g_idx")
_AUTO_ROUND_LAYOUTS = ("awq:", "gptq:v1-without-g_idx", "gptq:v2-without-g_idx", "gptq:v2")
_FP4: dict[str, tuple[int, ScaleType, Literal["none", "multiplier", "divisor"]]] = {
    "mxfp4": (32, "e8m0", "none"),
    "mxfp4-gpt-oss": (32, "e8m0", "none"),
    "nvfp4": (16, "e4m3", "divisor"),
    "nvfp4-modelopt": (16, "e4m3", "multiplier"),
}
# Scale bytes of NF3: 0, and 2**-10 to 30.
_NF3_SCALES = torch.tensor((0, *range(8, 128)), dtype=torch.uint8)


@st.composite
def schemes(
    draw: st.DrawFn,
    formats: Sequence[str] = FORMAT_NAMES,
    *,
    max_n: int = 48,
    max_groups: int = 4,
) -> Scheme:
    """A scheme that some file may have: every format, width, layout and group size."""
    name = draw(st.sampled_from(formats))
    if name in _FP4:
        group_size, scale, global_scale = _FP4[name]
        return Scheme(
            format=name,
            element="e2m1",
            n=draw(st.integers(1, max_n)),
            k=group_size * draw(st.integers(1, max_groups)),
            group_size=group_size,
            scale=scale,
            global_scale=global_scale,
        )
    if name == "nf3":
        num_blocks = draw(st.integers(1, max(1, max_n // 64)))
        tiles = [blocks for blocks in range(1, num_blocks + 1) if num_blocks % blocks == 0]
        k, tile = 32 * draw(st.integers(1, max_groups)), draw(st.sampled_from(tiles))
        return nf3_scheme(64 * num_blocks, k, 64 * tile)
    layout = draw(_layouts(name))
    is_awq = name == "awq" or layout == "awq:"
    bits = 3 if layout == "ten-a-word" else 4 if is_awq else draw(st.sampled_from(INT_BITS))
    is_channel = draw(st.booleans())
    group_size = draw(st.sampled_from(GROUP_SIZES))
    k = group_size * draw(st.integers(1, max_groups))
    n_step = k_step = 1
    if name != "compressed-tensors":
        n_step = 8 if is_awq else 32 // math.gcd(bits, 32)
        k_step = 1 if is_awq else n_step
    if is_channel:
        # A row of odd length cannot be told from its words; a group size says it.
        k_step = max(k_step, 32)
    k = -(-k // math.lcm(group_size, k_step)) * math.lcm(group_size, k_step)
    may_index = name == "compressed-tensors" or (name == "gptq" and "without" not in layout)
    return Scheme(
        format=name,
        element=f"int{bits}",
        n=n_step * draw(st.integers(1, max(1, max_n // n_step))),
        k=k,
        group_size=k if is_channel else group_size,
        scale=draw(st.sampled_from(FLOAT_SCALES)),
        has_zero_points=draw(st.booleans()),
        has_group_index=may_index and not is_channel and draw(st.booleans()),
        layout=layout,
    )


@st.composite
def stored_trellises(
    draw: st.DrawFn, *, max_size: int = 300
) -> tuple[TrellisScheme, dict[str, Tensor]]:
    """A scheme of EXL3 and tensors that a file may hold for it: any tiles, scales near 1."""
    scheme = trellis_scheme(
        draw(st.integers(1, max_size)),
        draw(st.integers(1, max_size)),
        draw(TRELLIS_CODES),
        layout=draw(st.sampled_from(["", "signs"])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return scheme, format_named("exl3").pack(scheme, random_trellis(scheme, generator))


@st.composite
def matrices(
    draw: st.DrawFn, scheme: Scheme, *, scales: Literal["any", "ordinary"] = "any"
) -> QuantizedMatrix:
    """Numbers of a scheme.

    `scales="any"` draws any finite bits: zeros of both signs, subnormal and negative numbers.
    `scales="ordinary"` draws what a trained model has: dequantised weights of about 1.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    zero_points = index = None
    if scheme.has_zero_points:
        zero_points = draw(_integers((scheme.n, scheme.num_groups), scheme.bits, generator))
    if scheme.has_group_index:
        order = torch.randperm(scheme.k, generator=generator)
        index = (torch.arange(scheme.k) // scheme.group_size).int()[order]
    is_ordinary = scales == "ordinary"
    shape = (scheme.n, scheme.num_groups)
    return QuantizedMatrix(
        codes=draw(_integers((scheme.n, scheme.k), scheme.bits, generator)),
        scales=(_ordinary_scales if is_ordinary else _any_scales)(scheme, shape, generator),
        zero_points=zero_points,
        group_index=index,
        global_scale=_global_scale(scheme, generator, is_ordinary),
    )


@st.composite
def stored_layers(draw: st.DrawFn, scheme: Scheme) -> dict[str, Tensor]:
    """Tensors that a file may hold for a layer of this scheme: random bytes where any will do.

    Bits that the layout leaves spare are zero, as every tool writes them.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    matrix = draw(matrices(scheme))
    packed = format_named(scheme.format).pack(scheme, matrix)
    stored: dict[str, Tensor] = {}
    for suffix, header in format_named(scheme.format).tensors(scheme).items():
        stored[suffix] = packed[suffix]
        if _is_free(scheme, suffix):
            stored[suffix] = random_bits(header.shape, header.dtype, generator)
    return stored


def random_trellis(scheme: TrellisScheme, generator: torch.Generator) -> TrellisMatrix:
    """Any tiles, which stand for nearly normal weights; scales that make them small."""
    tiles = torch.randint(-(2**15), 2**15, scheme.tiles, generator=generator)
    scales: list[Tensor] = []
    for size in (scheme.k, scheme.n):
        signs = torch.randint(0, 2, (padded(size),), generator=generator) * 2.0 - 1
        if scheme.layout != "signs":
            signs *= (0.5 + torch.rand(padded(size), generator=generator)) / scheme.k**0.25
        scales.append(signs.half())
    return TrellisMatrix(trellis=tiles.short(), suh=scales[0], svh=scales[1])


@st.composite
def stored_tiles(
    draw: st.DrawFn, *, max_rows: int = 2, max_columns: int = 2
) -> tuple[TrellisCode, Tensor]:
    """A code of a trellis and tiles of it: bits all random, all zeros or all ones."""
    code = draw(TRELLIS_CODES)
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    shape = (rows, columns, code.tile_words)
    kind = draw(st.sampled_from(("random", "random", "zeros", "ones")))
    if kind != "random":
        return code, torch.full(shape, 0 if kind == "zeros" else -1, dtype=torch.int16)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return code, random_bits(shape, torch.int16, generator)


def headers_of(stored: dict[str, Tensor]) -> dict[str, TensorHeader]:
    """The headers of a layer's tensors, as a file would give them."""
    return {
        suffix: TensorHeader(tuple(tensor.shape), tensor.dtype) for suffix, tensor in stored.items()
    }


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A tensor whose bytes are all random."""
    size = (*shape, dtype.itemsize)
    drawn = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return drawn.flatten().view(dtype).reshape(shape)


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes as integers of its item size, to compare bit for bit."""
    size = tensor.dtype.itemsize
    return tensor.contiguous().view(_INT_OF_SIZE.get(size, torch.int64))


def _layouts(name: str) -> st.SearchStrategy[str]:
    """The layouts of one integer format."""
    layouts = {
        "compressed-tensors": ("stream", "ten-a-word"),
        "gptq": _GPTQ_LAYOUTS,
        "auto-round": _AUTO_ROUND_LAYOUTS,
    }
    return st.sampled_from(layouts.get(name, ("",)))


def _is_free(scheme: Scheme, suffix: str) -> bool:
    """Whether any bytes are valid in this tensor."""
    if suffix in ("weight", "blocks") or (suffix == "weight_packed" and scheme.bits == 4):
        return scheme.k * scheme.bits % 32 == 0 or scheme.element == "e2m1"
    if suffix == "codes":
        return True
    return suffix == "qweight" or (suffix == "qzeros" and scheme.has_zero_points)


@st.composite
def _integers(
    draw: st.DrawFn, shape: tuple[int, int], bits: int, generator: torch.Generator
) -> Tensor:
    """uint8 below `2**bits`: random, or all of one end, or random with both ends sown in."""
    top = (1 << bits) - 1
    numbers = torch.randint(0, top + 1, shape, dtype=torch.uint8, generator=generator)
    kind = draw(st.sampled_from(("random", "ends", "zeros", "tops")))
    if kind == "zeros":
        return torch.zeros_like(numbers)
    if kind == "tops":
        return torch.full_like(numbers, top)
    if kind == "ends":
        return torch.where(numbers < (top + 1) // 2, 0, top).byte()
    return numbers


def _any_scales(scheme: Scheme, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Scales of any finite bits."""
    dtype = SCALE_DTYPES[scheme.scale]
    if scheme.scale == "e8m0":
        return torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    if scheme.scale == "e5m3":
        return _NF3_SCALES[torch.randint(0, len(_NF3_SCALES), shape, generator=generator)]
    scales = random_bits(shape, dtype, generator)
    return torch.where(scales.float().isfinite(), scales.float(), 1.0).to(dtype)


def _ordinary_scales(scheme: Scheme, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Positive scales over two orders of magnitude."""
    if scheme.scale == "e8m0":
        return torch.randint(120, 127, shape, dtype=torch.uint8, generator=generator)
    if scheme.scale == "e5m3":
        return torch.randint(32, 88, shape, dtype=torch.uint8, generator=generator)
    top = max(1.0, 2.0 ** (scheme.bits - 1)) if ELEMENTS[scheme.element].values is None else 6.0
    spread = 10 ** (2 * torch.rand(shape, generator=generator) - 2)
    scale = spread / top if scheme.global_scale == "none" else 400 * spread
    return scale.to(SCALE_DTYPES[scheme.scale])


def _global_scale(
    scheme: Scheme, generator: torch.Generator, is_ordinary: bool
) -> GlobalScale | None:
    if scheme.global_scale == "none":
        return None
    value = 2000 * (0.5 + torch.rand((), generator=generator))
    if not is_ordinary:
        bits = random_bits((1,), torch.float32, generator)
        # Such that no weight passes the largest float: 6 * 448 times it, or over it.
        is_usable = (bits.abs() > 1e-30) & (bits.abs() < 1e34)
        value = torch.where(is_usable, bits, 1.0).reshape(())
    if scheme.global_scale == "divisor":
        return Divisor(value)
    return Multiplier(1 / value if is_ordinary else value)
