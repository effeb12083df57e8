from collections.abc import Callable
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from firesteel.checkpoint.rounding import quantize_checkpoint
from firesteel.cli.bench.synthetic import write_plain_checkpoint
from firesteel.cli.bench.weight_error import weight_error
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from tests.cli.command import SHAPE


def no_progress(total: int) -> Callable[[], None]:
    del total
    return lambda: None


@pytest.mark.parametrize("name", ["int3-g32", "nf3"])
def test_it_is_the_error_of_every_expert_rounded_when_loaded_or_stored(
    plain_folder, tmp_path, name
):
    recipe = parse_recipe(name)
    error = energy = 0.0
    for file in plain_folder.glob("*.safetensors"):
        for tensor, weight in load_file(file).items():
            if ".experts." in tensor:
                scheme, matrix = quantize_matrix(weight, recipe)
                off = matrix.dequantize(scheme).double() - weight.double()
                error += float(off.square().sum())
                energy += float(weight.double().square().sum())
    assert weight_error(plain_folder, name) == pytest.approx(error / energy)
    quantize_checkpoint(plain_folder, recipe, tmp_path / "out", progress=no_progress)
    assert weight_error(plain_folder, tmp_path / "out") == pytest.approx(error / energy)


def test_there_is_none_of_what_has_no_plain_twin(plain_folder, packed_folder, tmp_path):
    assert weight_error(packed_folder, packed_folder) is None
    other = tmp_path / "other"
    other.mkdir()
    write_plain_checkpoint(other, replace(SHAPE, intermediate_size=128))
    quantize_checkpoint(other, parse_recipe("int4-g32"), tmp_path / "out", progress=no_progress)
    assert weight_error(plain_folder, tmp_path / "out") is None
