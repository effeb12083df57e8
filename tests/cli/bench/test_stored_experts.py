from collections.abc import Callable
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.rounding import quantize_checkpoint
from firesteel.cli.bench.stored_experts import StoredExperts, stored_experts
from firesteel.cli.bench.synthetic import write_plain_checkpoint
from firesteel.formats.quantize import parse_recipe, quantize_matrix
from tests.cli.command import SHAPE


def no_progress(total: int) -> Callable[[], None]:
    del total
    return lambda: None


@pytest.mark.parametrize("name", ["int3-g32", "nf3"])
def test_it_is_of_every_expert_rounded_when_loaded_or_stored(plain_folder, tmp_path, name):
    recipe = parse_recipe(name)
    error = energy = 0.0
    for file in plain_folder.glob("*.safetensors"):
        for tensor, weight in load_file(file).items():
            if ".experts." in tensor:
                scheme, matrix = quantize_matrix(weight, recipe)
                off = matrix.dequantize(scheme).double() - weight.double()
                error += float(off.square().sum())
                energy += float(weight.double().square().sum())
    out = tmp_path / "out"
    quantize_checkpoint(plain_folder, recipe, out, progress=no_progress)
    headers = Checkpoint.open(out).headers
    num_bytes = sum(headers[name].num_bytes for name in headers if ".experts." in name)
    wanted = StoredExperts(num_bytes, pytest.approx(error / energy))
    assert stored_experts(plain_folder, name) == wanted
    assert stored_experts(plain_folder, out) == wanted


def test_there_is_no_error_of_what_has_no_plain_twin(plain_folder, packed_folder, tmp_path):
    assert stored_experts(packed_folder, packed_folder).error is None
    other = tmp_path / "other"
    other.mkdir()
    write_plain_checkpoint(other, replace(SHAPE, intermediate_size=128))
    quantize_checkpoint(other, parse_recipe("int4-g32"), tmp_path / "out", progress=no_progress)
    assert stored_experts(plain_folder, tmp_path / "out").error is None
    assert stored_experts(plain_folder, plain_folder) == StoredExperts(0, None)
