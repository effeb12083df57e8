"""EXL3 against gptqmodel's decoder, a reading of the format that is not ours.

`make test-gptqmodel` runs it. Of gptqmodel only its decoder and what that imports are loaded, which
need nothing but torch: the package itself imports much else, and changes transformers when it is
imported. It reads whole bits a weight, sizes of multiples of 128, and scales but no sign bits.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from firesteel.formats.exl3 import Exl3
from firesteel.formats.trellis import TrellisCode, decode_tiles, hadamard128
from firesteel.formats.trellis_matrix import TrellisMatrix, TrellisScheme, trellis_scheme
from firesteel.formats.trellis_weights import TrellisWeights
from tests.strategies import CODEBOOKS, headers_of, random_trellis

pytestmark = [
    pytest.mark.gptqmodel,
    pytest.mark.skipif(
        find_spec("gptqmodel") is None, reason="gptqmodel is not installed: make test-gptqmodel"
    ),
]

N, K = 128, 256


@pytest.fixture(scope="module")
def decoder() -> Iterator[Any]:
    """The class of a linear layer of EXL3."""
    spec = find_spec("gptqmodel")
    assert spec is not None
    # A package without its __init__.
    package = ModuleType("gptqmodel")
    package.__path__ = spec.submodule_search_locations
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gptqmodel", package)
        yield import_module("gptqmodel.nn_modules.exllamav3_torch").ExllamaV3TorchLinear
    for name in [name for name in sys.modules if name.startswith("gptqmodel.")]:
        del sys.modules[name]


@pytest.fixture(params=[f"{bits}-{book}" for book in CODEBOOKS for bits in range(1, 9)])
def case(request: pytest.FixtureRequest) -> tuple[TrellisScheme, dict[str, torch.Tensor]]:
    """A scheme, and tensors of a file: random tiles and scales."""
    bits, codebook = request.param.split("-")
    scheme = trellis_scheme(N, K, TrellisCode(float(bits), codebook))
    generator = torch.Generator().manual_seed(int(bits))
    return scheme, Exl3().pack(scheme, random_trellis(scheme, generator))


def theirs(decoder: Any, stored: dict[str, torch.Tensor]) -> Any:
    tensors = {suffix: tensor.clone() for suffix, tensor in stored.items()}
    return decoder.from_tensors(in_features=K, out_features=N, name="layer", tensors=tensors)


def ours(stored: dict[str, torch.Tensor]) -> tuple[TrellisScheme, TrellisMatrix]:
    form = Exl3()
    found = form.scheme({"quant_method": "exl3"}, "layer", headers_of(stored))
    assert isinstance(found, TrellisScheme)
    return found, form.unpack(found, stored)


def test_numbers_of_tiles_are_theirs_rounded_to_fp16(decoder, case):
    """They leave the number of a state in fp32, where the format rounds it to fp16."""
    scheme, stored = case
    found, matrix = ours(stored)
    assert found.code == scheme.code
    numbers = theirs(decoder, stored).get_inner_weight_tensor(torch.float32)
    assert torch.equal(decode_tiles(matrix.trellis, found.code), numbers.half())


def test_weights_differ_from_theirs_by_that_rounding(decoder, case):
    _, stored = case
    found, matrix = ours(stored)
    own, other = matrix.dequantize(found).T, theirs(decoder, stored).get_weight_tensor()
    numbers = decode_tiles(matrix.trellis, found.code).double()
    # Half a unit of fp16 (11 bits, or 2**-24 near 0), and two fp32 sums of 128 products on each
    # side.
    off = 2.0**-11 * numbers.abs() + 2.0**-25
    sums = 2 * 2 * 130 * 2.0**-23
    h = hadamard128(torch.eye(128, dtype=torch.float64)).abs()
    wide = torch.block_diag(h, h)
    scales = (matrix.suh.double().unsqueeze(1) * matrix.svh.double()).abs()
    bound = scales * (wide @ (off + sums * numbers.abs()) @ h)
    assert bool(((own.double() - other.double()).abs() <= bound).all())
    assert (own - other).norm() <= 1e-3 * other.norm()


def test_a_layer_gives_what_theirs_gives(decoder, case):
    scheme, stored = case
    found, matrix = ours(stored)
    stack = TrellisWeights([found.fitted(N, K) or scheme], num_matrices=1)
    stack.write(0, 0, matrix)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(9))
    own, other = stack.linear(0, x), theirs(decoder, stored)(x)
    assert (own - other).norm() <= 1e-3 * other.norm()
