"""A second reading of every format: Python integers, one code at a time, no shared code.

`read` takes stored tensors and gives lists of plain numbers. Written from the tools' documents and
from `docs/formats.md`, not from `firesteel.formats`.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.formats.base import Scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NF3_BITS = (0xBF80, 0xBF1B, 0xBEB6, 0xBE03, 0x3E03, 0x3EB6, 0x3F1B, 0x3F80)
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Numbers:
    """codes [n][k], zeros [n][g], scales [n][g] as floats, group of each column, global scale."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: list[list[float]]
    groups: list[int]
    global_scale: float | None = None


def read(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    """The numbers of one layer."""
    readers = {
        "compressed-tensors": _read_compressed_tensors,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "auto-round": _read_auto_round,
        "mxfp4": _read_fp4,
        "nvfp4": _read_fp4,
        "nvfp4-modelopt": _read_fp4,
        "mxfp4-gpt-oss": _read_gpt_oss,
        "nf3": _read_nf3,
    }
    return readers[scheme.format](scheme, stored)


def dequantized(scheme: Scheme, numbers: Numbers) -> list[list[float]]:
    """fp32 weights, in Python floats: each step rounded to fp32 as the tools do; NF3 to bf16."""
    rows = []
    nf3 = [struct.unpack("<f", struct.pack("<HH", 0, bits))[0] for bits in NF3_BITS]
    for codes, zeros, scales in zip(numbers.codes, numbers.zeros, numbers.scales, strict=True):
        steps = [_step(scheme, scale, numbers.global_scale) for scale in scales]
        row = []
        for code, group in zip(codes, numbers.groups, strict=True):
            if scheme.element == "nf3":
                row.append(to_bf16(nf3[code] * steps[group]))
                continue
            if scheme.element == "e2m1":
                number = E2M1[code % 8] * (-1 if code >= 8 else 1)
            else:
                number = code - zeros[group]
            row.append(_to_fp32(number * steps[group]))
        rows.append(row)
    return rows


def _step(scheme: Scheme, scale: float, global_scale: float | None) -> float:
    if scheme.global_scale == "divisor":
        return _to_fp32(scale / global_scale)
    if scheme.global_scale == "multiplier":
        return _to_fp32(scale * global_scale)
    return scale


def _to_fp32(number: float) -> float:
    """A Python float rounded to fp32; too large becomes infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def to_bf16(number: float) -> float:
    """A number of fp32 rounded to bf16, ties to even; not for NaN."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return struct.unpack("<f", struct.pack("<HH", 0, bits))[0]


def _stream(words: list[int], bits: int, count: int) -> list[int]:
    """`count` codes of a stream of words, through one big integer."""
    whole = sum((word % 2**32) << (32 * place) for place, word in enumerate(words))
    return [(whole >> (bits * i)) % 2**bits for i in range(count)]


def _slots(words: list[int], bits: int, count: int) -> list[int]:
    """`count` codes of words that each hold 32 // bits."""
    each = 32 // bits
    return [(words[i // each] % 2**32 >> (bits * (i % each))) % 2**bits for i in range(count)]


def _column(matrix: list[list[int]], j: int) -> list[int]:
    return [row[j] for row in matrix]


def _transposed(matrix: list[list]) -> list[list]:
    return [list(column) for column in zip(*matrix, strict=True)]


def _runs(scheme: Scheme) -> list[int]:
    return [column // scheme.group_size for column in range(scheme.k)]


def _read_compressed_tensors(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    unpack = _slots if scheme.layout == "ten-a-word" else _stream
    bits, n, k = scheme.bits, scheme.n, scheme.k
    codes = [unpack(words, bits, k) for words in stored["weight_packed"].tolist()]
    zeros = [[2 ** (bits - 1)] * scheme.num_groups for _ in range(n)]
    if "weight_zero_point" in stored:
        words = stored["weight_zero_point"].tolist()
        columns = [unpack(_column(words, g), bits, n) for g in range(scheme.num_groups)]
        zeros = _transposed(columns)
    groups = _runs(scheme)
    if "weight_g_idx" in stored:
        groups = stored["weight_g_idx"].tolist()
    return Numbers(codes, zeros, stored["weight_scale"].double().tolist(), groups)


def _read_gptq(scheme: Scheme, stored: dict[str, Tensor], layout: str | None = None) -> Numbers:
    layout = scheme.layout if layout is None else layout
    bits, n, k = scheme.bits, scheme.n, scheme.k
    words = stored["qweight"].tolist()
    codes = [_stream(_column(words, j), bits, k) for j in range(n)]
    zeros = []
    for row in stored["qzeros"].tolist():
        if layout.startswith("v1") and bits != 3:
            ones = sum(1 << (bits * i) for i in range(32 // bits))
            row = [(word + ones) % 2**32 for word in row]
        fields = _stream(row, bits, n)
        if layout.startswith("v1") and bits == 3:
            fields = [(field + 1) % 8 for field in fields]
        zeros.append(fields)
    scales = _transposed(stored["scales"].double().tolist())
    groups = stored["g_idx"].tolist() if "g_idx" in stored else _runs(scheme)
    return Numbers(codes, _transposed(zeros), scales, groups)


def _read_awq(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    def rows(words: Tensor) -> list[list[int]]:
        return [
            [(line[j // 8] % 2**32 >> (4 * AWQ_NIBBLES[j % 8])) % 16 for j in range(scheme.n)]
            for line in words.tolist()
        ]

    return Numbers(
        _transposed(rows(stored["qweight"])),
        _transposed(rows(stored["qzeros"])),
        _transposed(stored["scales"].double().tolist()),
        _runs(scheme),
    )


def _read_auto_round(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    if scheme.layout.startswith("awq"):
        return _read_awq(scheme, stored)
    return _read_gptq(scheme, stored, scheme.layout.removeprefix("gptq:"))


def _nibbles(row: list[int]) -> list[int]:
    return [nibble for byte in row for nibble in (byte % 16, byte // 16)]


def _read_fp4(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    packed = stored["weight" if scheme.format == "nvfp4-modelopt" else "weight_packed"]
    if scheme.scale == "e8m0":
        scales = [[2.0 ** (byte - 127) for byte in row] for row in stored["weight_scale"].tolist()]
    else:
        bits = stored["weight_scale"].view(torch.uint8).tolist()
        scales = [[_e4m3(byte) for byte in row] for row in bits]
    names = {"nvfp4": "weight_global_scale", "nvfp4-modelopt": "weight_scale_2"}
    name = names.get(scheme.format)
    return Numbers(
        [_nibbles(row) for row in packed.tolist()],
        [[0] * scheme.num_groups] * scheme.n,
        scales,
        _runs(scheme),
        None if name is None else stored[name].item(),
    )


def _read_gpt_oss(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    codes = [
        [code for block in row for code in _nibbles(block)] for row in stored["blocks"].tolist()
    ]
    scales = [[2.0 ** (byte - 127) for byte in row] for row in stored["scales"].tolist()]
    return Numbers(codes, [[0] * scheme.num_groups] * scheme.n, scales, _runs(scheme))


def nf3_place(
    shape: tuple[int, int], tile_width: int, n: int, k: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The unit of code `[n, k]`, and (word of lo0, lo1 and hi, bit) of each of its three bits."""
    half = tile_width // 2
    wru = (n // 64) * 32 + ((n % 16) % 8) * 4 + (k % 8) // 2
    unit = (wru // half) * (shape[1] // 16) * half + (k // 16) * half + wru % half
    jj = (n % 64) // 16
    v = ((n % 16) // 8) * 4 + k % 2 + 2 * ((k % 16) // 8)
    low = 16 * (jj % 2) + 2 * v
    return unit, ((jj // 2, low), (jj // 2, low + 1), (2, 8 * jj + v))


def nf3_scale(byte: int) -> float:
    """16 times the fp16 of bits `byte << 7`."""
    return 16 * struct.unpack("<e", struct.pack("<H", byte << 7))[0]


def _read_nf3(scheme: Scheme, stored: dict[str, Tensor]) -> Numbers:
    units, tile_width = stored["codes"].tolist(), int(scheme.layout.removeprefix("tile-"))
    codes = []
    for n in range(scheme.n):
        codes.append([])
        for k in range(scheme.k):
            unit, bits = nf3_place((scheme.n, scheme.k), tile_width, n, k)
            found = [units[unit][word] >> bit & 1 for word, bit in bits]
            codes[-1].append(found[0] + 2 * found[1] + 4 * found[2])
    scales = [[nf3_scale(byte) for byte in row] for row in stored["scales"].tolist()]
    return Numbers(codes, [[0] * scheme.num_groups] * scheme.n, scales, _runs(scheme))


def _e4m3(byte: int) -> float:
    """sign, four bits of exponent of bias 7, three of mantissa."""
    sign = -1.0 if byte & 128 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)
