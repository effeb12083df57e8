"""Round-to-nearest quantisation of plain weights, for `--quantize RECIPE`.

A recipe names what `compressed-tensors` can store ("int4-g128", "int4-g32-asym", "int8-channel",
"mxfp4", "nvfp4"), "nf3", or what EXL3 can ("exl3-3.0-mcg"). Scales of the first follow that
library's own rules, so a matrix quantised here differs from one quantised by llmcompressor without
data only where its 16-bit division rounds otherwise:

    int, symmetric   scale = max|w| / ((2**bits - 1) / 2); codes are clamped
    int, asymmetric  scale = (max - min) / (2**bits - 1), both ends taken to include 0
    mxfp4            scale = the power of two that brings max|w| below 7, where 6 is the last value
    nvfp4            one divisor a matrix, 448 * 6 / max|w|; group scales max|w| / 6 as E4M3

No scale of these is ever 0: a group of zeros takes the smallest scale in use.

    nf3              scale = max|w| cut to the format's three bits of mantissa, or the next scale up
                     where that makes the sum of squared errors of the group less. A group that
                     both would raise above max|w|, since scales start at 2**-10, takes 0 where that
                     is better still; the codebook has no zero of its own
    exl3             scales bring rows and columns to one size; of all tiles those with the least
                     sum of squared errors in the rotated frame (`trellis_encode`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import (
    ELEMENTS,
    NF3,
    SCALE_DTYPES,
    Divisor,
    Matrix,
    QuantizedMatrix,
    ScaleType,
    Scheme,
    group_count,
    scales_to_float,
)
from firesteel.formats.config_groups import config_for_group
from firesteel.formats.nf3 import (
    BLOCK_ROWS,
    LARGEST_BYTE,
    SCALE_LIMIT,
    SMALLEST_SCALE,
    encode_scales,
    nf3_scheme,
)
from firesteel.formats.registry import format_named
from firesteel.formats.stored import GROUP_SIZES
from firesteel.formats.trellis import Codebook, TrellisCode
from firesteel.formats.trellis_encode import quantize_trellis
from firesteel.formats.trellis_matrix import TrellisMatrix, trellis_scheme

__all__ = ["ALL_BUT_EXPERTS", "Recipe", "parse_recipe", "quantize_matrix", "round_to_e2m1"]

ALL_BUT_EXPERTS = (r"re:^(?!.*\.experts\.).*$",)
"""What a config says is not quantised where experts alone are."""

_INT_RECIPE = re.compile(r"int(?P<bits>\d+)-(?:g(?P<group>\d+)|channel)(?P<asym>-asym)?")
_EXL3_RECIPE = re.compile(r"exl3-(?P<bits>[1-7]\.[05]|8\.0)-(?P<codebook>mcg|mul1|3inst)")
_BITS = (3, 4, 8)
_ALLOWED = (
    f"int{{{','.join(map(str, _BITS))}}}-g{{{','.join(map(str, GROUP_SIZES))}}} or "
    f"int{{{','.join(map(str, _BITS))}}}-channel, each also with -asym; mxfp4; nvfp4; nf3; "
    "exl3-{1.0,1.5,...,8.0}-{mcg,mul1,3inst}"
)
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
# E4M3 goes down to 2**-9; fp16 scales keep five bits of precision; bf16 ones stay normal numbers.
_SMALLEST_SCALE = {"e4m3": 2.0**-9, "fp16": 2.0**-19, "bf16": 2.0**-126}
# The largest number that rounds to each E2M1 magnitude but the last: half way to the next one, or
# where the next one's code is even the fp32 number just before.
_BEFORE = 1 - 2.0**-24
_E2M1_LIMITS = (0.25, 0.75 * _BEFORE, 1.25, 1.75 * _BEFORE, 2.5, 3.5 * _BEFORE, 5.0)
# The code of NF3's smallest positive value.
_NF3_ZERO = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to quantise matrices of any shape.

    Fields
        name        as given, for instance "int4-g128"
        format      the registry's format that stores the result
        element     key of `ELEMENTS`
        group_size  columns that share a scale; -1 for one scale a row
        scale       type of group scales, or "weight": bf16, and fp16 for fp16 weights
        has_zero_points  asymmetric
        global_scale     matrix-wide scale
        code        of EXL3
    """

    name: str
    format: str
    element: str
    group_size: int
    scale: ScaleType | Literal["weight"]
    has_zero_points: bool = False
    global_scale: Literal["none", "divisor"] = "none"
    code: TrellisCode | None = None

    def scheme(self, n: int, k: int, dtype: torch.dtype) -> Scheme:
        """The scheme of a matrix `[n, k]` of `dtype` quantised by this recipe.

        Raises
            InvalidArgumentError: the group size does not divide `k`, or the format has no place for
                `n` rows.
        """
        if self.code is not None:
            return trellis_scheme(n, k, self.code)
        group_size = k if self.group_size == -1 else self.group_size
        try:
            if self.format == "nf3":
                return nf3_scheme(n, k)
            group_count(k, group_size)
        except CheckpointError as error:
            raise InvalidArgumentError(f"recipe {self.name!r}: {error}") from error
        scale = self.scale
        if scale == "weight":
            scale = "fp16" if dtype == torch.float16 else "bf16"
        return Scheme(
            format=self.format,
            element=self.element,
            n=n,
            k=k,
            group_size=group_size,
            scale=scale,
            has_zero_points=self.has_zero_points,
            global_scale=self.global_scale,
            layout="stream" if self.format == "compressed-tensors" else "",
        )

    def config(self, ignore: Sequence[str] = ()) -> dict[str, Any]:
        """A quantization_config of a checkpoint quantised by this recipe but for `ignore`."""
        if self.format != "compressed-tensors":
            # One scheme fits all shapes: the group size of these formats is fixed.
            scheme = self.scheme(BLOCK_ROWS, self.group_size, torch.bfloat16)
            return format_named(self.format).config(scheme, ignore)
        is_channel = self.group_size == -1
        weights = {
            "num_bits": ELEMENTS[self.element].bits,
            "type": "int",
            "strategy": "channel" if is_channel else "group",
            "group_size": None if is_channel else self.group_size,
            "symmetric": not self.has_zero_points,
        }
        return {**config_for_group("pack-quantized", weights, ignore), "version": "0.18.0"}


def parse_recipe(text: str) -> Recipe:
    """The recipe of that name, such as "int4-g128", "int3-channel-asym", "nvfp4" or "exl3-3.0-mcg".

    Raises
        InvalidArgumentError: no such recipe; the message lists those allowed.
    """
    if text == "mxfp4":
        return Recipe(text, "mxfp4", "e2m1", 32, "e8m0")
    if text == "nvfp4":
        return Recipe(text, "nvfp4", "e2m1", 16, "e4m3", global_scale="divisor")
    if text == "nf3":
        return Recipe(text, "nf3", "nf3", 32, "e5m3")
    match = _EXL3_RECIPE.fullmatch(text)
    if match is not None:
        code = TrellisCode(float(match["bits"]), cast(Codebook, match["codebook"]))
        return Recipe(text, "exl3", trellis_scheme(1, 1, code).element, -1, "fp16", code=code)
    match = _INT_RECIPE.fullmatch(text)
    if match is not None:
        bits = int(match["bits"])
        group_size = -1 if match["group"] is None else int(match["group"])
        if bits in _BITS and group_size in (*GROUP_SIZES, -1):
            return Recipe(
                name=text,
                format="compressed-tensors",
                element=f"int{bits}",
                group_size=group_size,
                scale="weight",
                has_zero_points=match["asym"] is not None,
            )
    raise InvalidArgumentError(f"recipe: got {text!r}, must be {_ALLOWED}")


def quantize_matrix(weight: Tensor, recipe: Recipe) -> tuple[Scheme, Matrix]:
    """The nearest codes of `weight`, floating point `[n, k]`, under `recipe`.

    EXL3 takes some minutes for 3 million weights (`trellis_encode`).

    Raises
        InvalidArgumentError: not a matrix of finite floating-point numbers, a shape that the recipe
            cannot store, or a number too large for it (32 of nf3).
    """
    if weight.ndim != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise InvalidArgumentError(
            f"weight: got {weight.dtype} {list(weight.shape)}, "
            "must be floating point [n, k] and not empty"
        )
    n, k = weight.shape
    scheme = recipe.scheme(n, k, weight.dtype)
    if recipe.code is not None:
        trellis, suh, svh = quantize_trellis(weight, recipe.code)
        return scheme, TrellisMatrix(trellis=trellis, suh=suh, svh=svh)
    groups = weight.float().contiguous().unflatten(1, (scheme.num_groups, scheme.group_size))
    if not bool(groups.isfinite().all()):
        index = (~weight.float().isfinite()).nonzero()[0].tolist()
        raise InvalidArgumentError(f"weight{index}: got {weight[tuple(index)]}, must be finite")
    if recipe.format == "mxfp4":
        return scheme, _quantize_mxfp4(groups)
    if recipe.format == "nvfp4":
        return scheme, _quantize_nvfp4(groups)
    if recipe.format == "nf3":
        return scheme, _quantize_nf3(groups)
    return scheme, _quantize_int(groups, scheme)


def round_to_e2m1(numbers: Tensor) -> Tensor:
    """Codes uint8 of the nearest E2M1 values of fp32 `numbers`; ties go to the even code.

    Numbers past 6 become 6; what rounds to zero becomes +0.
    """
    limits = torch.tensor(_E2M1_LIMITS, dtype=torch.float32, device=numbers.device)
    codes = torch.bucketize(numbers.abs().contiguous(), limits, out_int32=True).byte()
    return torch.where((numbers < 0) & (codes > 0), codes | 8, codes)


def _quantize_int(groups: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """fp32 `[n, g, group_size]` to integers of `scheme`."""
    top = (1 << scheme.bits) - 1
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    spread = high - low if scheme.has_zero_points else 2 * torch.maximum(high, -low)
    smallest = _SMALLEST_SCALE[scheme.scale]
    dtype = SCALE_DTYPES[scheme.scale]
    scales = (spread / top).clamp(smallest, torch.finfo(dtype).max).to(dtype)
    step = scales.float()
    if scheme.has_zero_points:
        zeros = (-low / step).round().clamp(0, top)
    else:
        zeros = torch.full_like(step, ELEMENTS[scheme.element].zero_point)
    codes = ((groups / step.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, top)
    return QuantizedMatrix(
        codes=codes.flatten(1).byte(),
        scales=scales,
        zero_points=zeros.byte() if scheme.has_zero_points else None,
    )


def _quantize_mxfp4(groups: Tensor) -> QuantizedMatrix:
    """fp32 `[n, g, 32]` to MXFP4."""
    largest = groups.abs().amax(-1)
    # largest = mantissa * 2**exponent with 0.5 <= mantissa < 1, and 7 is 0.875 * 2**3.
    mantissa, exponent = torch.frexp(largest)
    power = exponent - 3 + (mantissa >= 0.875).int()
    biased = torch.where(largest == 0, 1, (power + 127).clamp(1, 254)).byte()
    step = scales_to_float(biased, "e8m0").unsqueeze(-1)
    return QuantizedMatrix(codes=round_to_e2m1(groups / step).flatten(1), scales=biased)


def _quantize_nvfp4(groups: Tensor) -> QuantizedMatrix:
    """fp32 `[n, g, 16]` to NVFP4 with a divisor."""
    largest = groups.abs().amax().item()
    divisor = _E4M3_MAX * _E2M1_MAX / largest if largest > 0 else 1.0
    if divisor > torch.finfo(torch.float32).max:
        divisor = 1.0
    value = torch.tensor(divisor, dtype=torch.float32, device=groups.device)
    wanted = groups.abs().amax(-1) * (value / _E2M1_MAX)
    scales = wanted.clamp(_SMALLEST_SCALE["e4m3"], _E4M3_MAX).to(torch.float8_e4m3fn)
    step = (scales.float() / value).unsqueeze(-1)
    return QuantizedMatrix(
        codes=round_to_e2m1(groups / step).flatten(1),
        scales=scales,
        global_scale=Divisor(value),
    )


def _quantize_nf3(groups: Tensor) -> QuantizedMatrix:
    """fp32 `[n, g, 32]` to NF3.

    Raises
        InvalidArgumentError: a weight of 32 or more, for which the format has no scale.
    """
    largest = groups.abs().amax(-1)
    if bool((largest >= SCALE_LIMIT).any()):
        rows = groups.flatten(1)
        index = (rows.abs() >= SCALE_LIMIT).nonzero()[0].tolist()
        raise InvalidArgumentError(
            f"weight{index}: got {rows[tuple(index)].item():.6g}, "
            f"must be below {SCALE_LIMIT:g} in magnitude for nf3"
        )
    cut = encode_scales(largest)
    best, codes, error = cut, *_round_to_nf3(groups, cut)
    has_next = (cut > 0) & (cut < LARGEST_BYTE)
    candidates = [torch.where(has_next, cut + 1, cut)]
    is_raised = largest < SMALLEST_SCALE
    if bool(is_raised.any()):
        candidates.append(torch.where(is_raised, 0, cut))
    for scales in candidates:
        others, other_error = _round_to_nf3(groups, scales)
        is_better = other_error < error
        best = torch.where(is_better, scales, best)
        codes = torch.where(is_better.unsqueeze(-1), others, codes)
        error = torch.where(is_better, other_error, error)
    return QuantizedMatrix(codes=codes.flatten(1), scales=best)


def _round_to_nf3(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of the nearest weights under scale bytes `[n, g]`, and sums of squared errors `[n, g]`.

    Ties go to the larger weight; zeros, and all of a scale of 0, to the smallest positive code.
    """
    values = torch.tensor(NF3.values, dtype=torch.float32, device=groups.device)
    # [n, g, 8]: what each code stands for. Their means are exact in fp32.
    weights = (values * scales_to_float(scales, "e5m3").unsqueeze(-1)).bfloat16().float()
    codes = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
    for limit in ((weights[..., :-1] + weights[..., 1:]) / 2).unbind(-1):
        codes += groups >= limit.unsqueeze(-1)
    codes = torch.where(scales.unsqueeze(-1) == 0, _NF3_ZERO, codes)
    errors = weights.gather(-1, codes.long()) - groups
    return codes, errors.square().sum(-1)
