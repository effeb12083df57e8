"""NF3: the place of each bit, scale bytes, the one rounding, the recipe, and what is refused."""

import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firesteel.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from firesteel.formats.base import ELEMENTS, QuantizedMatrix, Scheme, scales_to_float
from firesteel.formats.nf3 import encode_scales, nf3_scheme
from firesteel.formats.packed import PackedWeights
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from firesteel.formats.registry import detect, format_named
from tests.formats import oracle
from tests.strategies import bits_of, headers_of

LAYER = "model.layers.0.mlp.experts.0.gate_proj"
ENTRY = format_named("nf3")
RECIPE = parse_recipe("nf3")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (0, *range(8, 128))


def layer(n: int = 128, k: int = 64, tile_width: int = 64) -> tuple[Scheme, dict[str, Tensor]]:
    """Random codes and scales of any size."""
    scheme = nf3_scheme(n, k, tile_width)
    generator = torch.Generator().manual_seed(n + k)
    matrix = QuantizedMatrix(
        codes=torch.randint(0, 8, (n, k), dtype=torch.uint8, generator=generator),
        scales=torch.randint(8, 128, (n, k // 32), dtype=torch.uint8, generator=generator),
    )
    return scheme, ENTRY.pack(scheme, matrix)


@pytest.mark.parametrize(
    ("n", "k", "tile_width"),
    [(64, 32, 64), (128, 64, 64), (128, 64, 128), (192, 32, 192), (256, 32, 128)],
)
def test_every_bit_of_every_code_has_a_place_of_its_own(n: int, k: int, tile_width: int) -> None:
    scheme = nf3_scheme(n, k, tile_width)
    codes = torch.randint(0, 8, (n, k), generator=torch.Generator().manual_seed(n)).byte()
    rows = codes.tolist()
    places = set()
    words = [[0, 0, 0] for _ in range(n * k // 32)]
    for i in range(n):
        for j in range(k):
            unit, bits = oracle.nf3_place((n, k), tile_width, i, j)
            for number, (word, bit) in enumerate(bits):
                places.add((unit, word, bit))
                words[unit][word] |= (rows[i][j] >> number & 1) << bit
    assert places == {
        (unit, word, bit) for unit in range(n * k // 32) for word in range(3) for bit in range(32)
    }
    scales = torch.full((n, k // 32), 8, dtype=torch.uint8)
    stored = ENTRY.pack(scheme, QuantizedMatrix(codes=codes, scales=scales))
    assert (stored["codes"].long() % 2**32).tolist() == words
    assert torch.equal(ENTRY.unpack(scheme, stored).codes, codes)


def test_the_worked_example_of_the_documents() -> None:
    codes = torch.zeros(64, 32, dtype=torch.uint8)
    codes[9, 3] = 6
    scales = torch.full((64, 1), 0x64, dtype=torch.uint8)
    stored = ENTRY.pack(nf3_scheme(64, 32), QuantizedMatrix(codes=codes, scales=scales))
    assert stored["codes"].nonzero().tolist() == [[5, 0], [5, 2]]
    assert stored["codes"][5].tolist() == [1 << 11, 0, 1 << 5]
    weight = ENTRY.unpack(nf3_scheme(64, 32), stored).dequantize(nf3_scheme(64, 32))
    assert weight[9, 2:4].tolist() == [-3.0, 1.8125]


def test_scale_bytes_are_the_middle_of_an_fp16() -> None:
    every = torch.arange(256, dtype=torch.int16).byte()
    wanted = torch.tensor([oracle.nf3_scale(byte) for byte in range(256)])
    assert torch.equal(scales_to_float(every, "e5m3").nan_to_num(7.0), wanted.nan_to_num(7.0))
    usable = scales_to_float(torch.tensor(BYTES).byte(), "e5m3")
    assert torch.equal(usable.bfloat16().float(), usable)
    assert torch.equal(encode_scales(usable), torch.tensor(BYTES).byte())
    # The type of a byte is in the scheme, not in its dtype.
    assert scales_to_float(every[127], "e8m0") == 1


@pytest.mark.parametrize(
    ("scale", "stored"),
    [
        (3.14, 3.0),
        (31.9, 30.0),
        (31.9999, 30.0),
        (2.9999, 3.0),
        (1.0, 1.0),
        (0.1249, 0.1171875),
        (2.0**-10, 2.0**-10),
        (2.0**-11, 2.0**-10),
        (1e-30, 2.0**-10),
        (0.0, 0.0),
        (-0.0, 0.0),
    ],
)
def test_scales_are_cut_to_three_bits_of_mantissa(scale: float, stored: float) -> None:
    assert scales_to_float(encode_scales(torch.tensor([scale])), "e5m3").item() == stored


@given(st.lists(st.floats(0, 32, exclude_max=True, width=32), min_size=1, max_size=20))
def test_a_scale_byte_is_the_high_byte_of_its_sixteenth_shifted_by_one(scales: list[float]) -> None:
    wanted = []
    for scale in scales:
        raised = 0.0 if scale == 0 else max(scale, 2.0**-10)
        (bits,) = struct.unpack("<H", struct.pack("<e", raised / 16))
        wanted.append(min((bits << 1) >> 8, 127))
    assert encode_scales(torch.tensor(scales)).tolist() == wanted
    assert set(wanted) <= set(BYTES)


@pytest.mark.parametrize("scale", [-1e-9, 32.0, float("inf"), float("nan")])
def test_scales_out_of_range_have_no_byte(scale: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"scale: got .*, must be at least 0 and below"):
        encode_scales(torch.tensor([1.0, scale]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [32, 64])
def test_every_weight_is_rounded_to_bf16_and_no_further(k: int, dtype: torch.dtype) -> None:
    # A row a byte, each code in it; rows of 0 fill the last block.
    scales = torch.tensor(BYTES + (0,) * (128 - len(BYTES))).byte().unsqueeze(1)
    scheme = nf3_scheme(128, k)
    matrix = QuantizedMatrix(
        codes=torch.arange(8).byte().repeat(128, k // 8), scales=scales.expand(128, k // 32)
    )
    values = [struct.unpack("<f", struct.pack("<HH", 0, bits))[0] for bits in oracle.NF3_BITS]
    assert list(ELEMENTS["nf3"].values or ()) == values
    wanted = torch.tensor(
        [
            [oracle.to_bf16(value * oracle.nf3_scale(byte)) for value in values]
            for byte in scales.flatten().tolist()
        ]
    ).repeat(1, k // 8)
    assert torch.equal(bits_of(matrix.dequantize(scheme, dtype)), bits_of(wanted.to(dtype)))
    assert torch.equal(matrix.dequantize(scheme, dtype).float(), wanted)
    packed = PackedWeights(scheme, num_matrices=1)
    packed.write(0, 0, matrix)
    # One 1 a row picks a column of W unchanged.
    picked = packed.linear(0, torch.eye(k, dtype=dtype))
    assert torch.equal(picked.T.float(), wanted)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Groups of zeros, of one sign, of outliers, tiny and large, mixed; below 32."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    weight = torch.randn(64, 32 * draw(st.integers(1, 3)), generator=generator)
    groups = weight.view(-1, 32)
    kinds = torch.randint(0, 8, (len(groups),), generator=generator)
    groups[kinds == 0] = 0.0
    groups[kinds == 1] = groups[kinds == 1].abs() + 3
    groups[kinds == 2, 5] = -31.99
    groups[kinds == 3] *= 1e-6
    groups[kinds == 4] *= 2.0**-12
    groups[kinds == 5] = 0.37
    # Of wide spread: every exponent of a scale is met.
    spread = 2.0 ** torch.randint(-12, 3, (len(groups), 1), generator=generator)
    groups[kinds == 6] *= spread[kinds == 6]
    return weight.clamp(-31.99, 31.99).to(draw(st.sampled_from(DTYPES))).clamp(-31.75, 31.75)


def least_error(groups: Tensor, byte: Tensor) -> Tensor:
    """The least sums of squared errors of fp64 groups under scale bytes."""
    step = torch.tensor([oracle.nf3_scale(int(b)) for b in byte.flatten()]).double().view(-1, 1, 1)
    values = torch.tensor(ELEMENTS["nf3"].values).double()
    weights = (values * step).float().bfloat16().double()
    return (weights - groups.unsqueeze(-1)).square().amin(-1).sum(-1)


@given(weights())
@settings(max_examples=30)
def test_the_recipe_takes_the_best_of_its_scales_and_the_nearest_codes(weight: Tensor) -> None:
    scheme, matrix = quantize_matrix(weight, RECIPE)
    groups = weight.double().view(-1, 32)
    largest = groups.abs().amax(-1).float()
    cut = encode_scales(largest)
    following = torch.where((cut > 0) & (cut < 127), cut + 1, cut)
    other = torch.where(largest < 2.0**-10, 0, cut)
    errors = [least_error(groups, byte) for byte in (cut, following, other)]
    best = torch.stack(errors).amin(0)
    got = matrix.dequantize(scheme).double().view(-1, 32)
    error = (got - groups).square().sum(-1)
    # Sums of 32 squares in fp32 choose the scale; each code is the nearest.
    assert (error <= best * (1 + 2 * 34 * 2.0**-24)).all()
    chosen = matrix.scales.flatten()
    assert ((chosen == cut) | (chosen == following) | (chosen == other)).all()
    assert (got[largest == 0] == 0).all()
    assert not torch.signbit(got[largest == 0]).any()


@given(weights())
@settings(max_examples=20)
def test_the_result_is_a_file_s(weight: Tensor) -> None:
    scheme, matrix = quantize_matrix(weight, RECIPE)
    stored = ENTRY.pack(scheme, matrix)
    config = RECIPE.config(["lm_head"])
    assert detect(config, stored) is ENTRY
    assert ENTRY.scheme(config, LAYER, headers_of(stored)) == scheme
    assert config["ignore"] == ["lm_head"]
    assert torch.equal(ENTRY.unpack(scheme, stored).codes, matrix.codes)
    # Weights of the codebook stay as they are.
    again = quantize_matrix(matrix.dequantize(scheme), RECIPE)[1].dequantize(scheme)
    largest = matrix.dequantize(scheme).view(-1, 32).abs().amax(-1)
    is_whole = largest == scales_to_float(matrix.scales, "e5m3").flatten()
    same = (again == matrix.dequantize(scheme)).view(-1, 32).all(-1)
    assert same[is_whole].all()


def test_ties_go_to_the_larger_weight_and_zeros_to_the_smallest_positive_code() -> None:
    values = torch.tensor(ELEMENTS["nf3"].values)
    ties = (values[1:] + values[:-1]) / 2
    weight = torch.zeros(64, 32)
    weight[0, :8], weight[0, 8:15] = values, ties
    weight[1, :8], weight[1, 8:15] = values, torch.nextafter(ties, torch.tensor(-1.0))
    weight[2, 0] = -1e-9
    codes = quantize_matrix(weight, RECIPE)[1].codes
    assert codes[0].tolist() == [*range(8), *range(1, 8), *(4,) * 17]
    assert codes[1].tolist() == [*range(8), *range(7), *(4,) * 17]
    assert (codes[2:] == 4).all()


def test_a_tiny_group_becomes_zero_where_the_smallest_scale_is_worse() -> None:
    weight = torch.zeros(64, 32)
    weight[0], weight[1, 0], weight[2, 0], weight[3] = 1e-6, 5e-4, 9e-4, 1.2e-4
    scheme, matrix = quantize_matrix(weight, RECIPE)
    assert matrix.scales.flatten()[:5].tolist() == [0, 0, 8, 8, 0]
    assert not matrix.dequantize(scheme)[:2].any()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(48, 32), "recipe 'nf3': n: got 48, must be a multiple of 64"),
        (torch.zeros(64, 48), "recipe 'nf3': group_size: got 32, must be positive and divide k"),
        (torch.full((64, 64), -32.0), r"weight\[0, 0\]: got -32, must be below 32 in magnitude"),
    ],
)
def test_weights_without_a_place_are_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        quantize_matrix(weight, RECIPE)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tile_width": None}, CheckpointError, r"tile_width: got None, must be int"),
        ({"tile_width": "64"}, CheckpointError, r"tile_width: got '64', must be int"),
        ({"tile_width": 0}, CheckpointError, "gate_proj: tile_width: got 0, must be a multiple of"),
        ({"tile_width": 96}, CheckpointError, "got 96, must be a multiple of 64 that divides n"),
        ({"tile_width": -64}, CheckpointError, "tile_width: got -64, must be a multiple of 64"),
        ({"tile_width": 256}, CheckpointError, "got 256, .* that divides n = 128"),
        ({"group_size": 64}, UnsupportedError, "NF3 group_size: got 64, supported is 32"),
        ({"format": "nf3_1p2"}, UnsupportedError, "NF3 format: got 'nf3_1p2', supported is"),
    ],
)
def test_another_config_is_refused(changes: dict[str, Any], error: type, message: str) -> None:
    scheme, stored = layer()
    with pytest.raises(error, match=message):
        ENTRY.scheme({**ENTRY.config(scheme), **changes}, LAYER, headers_of(stored))


def test_only_the_width_of_tiles_must_be_said() -> None:
    scheme, stored = layer(tile_width=128)
    config = {"quant_method": "nf3", "tile_width": 128}
    assert detect(config, stored) is ENTRY
    assert ENTRY.scheme(config, LAYER, headers_of(stored)) == scheme
    with pytest.raises(CheckpointError, match=r"quantization_config\.tile_width: missing"):
        ENTRY.scheme({"quant_method": "nf3"}, LAYER, headers_of(stored))


def test_tiles_of_another_width_are_other_weights() -> None:
    scheme, stored = layer(n=128, tile_width=128)
    other = ENTRY.unpack(nf3_scheme(128, 64), stored)
    assert not torch.equal(other.codes, ENTRY.unpack(scheme, stored).codes)


@pytest.mark.parametrize("suffix", ["codes", "scales"])
def test_every_missing_or_wrong_tensor_is_named(suffix: str) -> None:
    scheme, stored = layer()
    config = ENTRY.config(scheme)
    rest = {key: tensor for key, tensor in stored.items() if key != suffix}
    assert detect(config, rest) is ENTRY
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{suffix}: missing"):
        ENTRY.scheme(config, LAYER, headers_of(rest))
    with pytest.raises(CheckpointError, match=f"{suffix}: missing"):
        ENTRY.unpack(scheme, rest)
    for wrong in (stored[suffix].double(), stored[suffix][:-64]):
        headers = headers_of({**stored, suffix: wrong})
        with pytest.raises(CheckpointError, match=rf"{LAYER}\.\w+: got (float64|int32|uint8) "):
            ENTRY.scheme(config, LAYER, headers)


def test_rows_of_no_whole_block_are_refused() -> None:
    scheme, stored = layer()
    stored = {"codes": stored["codes"][:192], "scales": stored["scales"][:96]}
    with pytest.raises(CheckpointError, match=rf"{LAYER}: n: got 96, must be a multiple of 64"):
        ENTRY.scheme(ENTRY.config(scheme), LAYER, headers_of(stored))


@pytest.mark.parametrize(
    ("byte", "value"),
    [
        (1, "0.00012207"),
        (7, "0.000854492"),
        (128, "32"),
        (247, "983040"),
        (248, "inf"),
        (252, "nan"),
        (255, "nan"),
    ],
)
def test_a_byte_that_is_no_scale_is_refused_both_ways(byte: int, value: str) -> None:
    scheme, stored = layer()
    matrix = ENTRY.unpack(scheme, stored)
    stored["scales"][3, 1] = byte
    message = rf"scales\[3, 1\]: got byte {byte} \({value}\), must be 0 or 8 to 127"
    with pytest.raises(CheckpointError, match=f"^{message}"):
        ENTRY.unpack(scheme, stored)
    matrix.scales[3, 1] = byte
    with pytest.raises(InvalidArgumentError, match=rf"matrix\.{message}"):
        ENTRY.pack(scheme, matrix)
