import json

import pytest
import torch

from firesteel.checkpoint.files import Checkpoint
from firesteel.checkpoint.layers import scan
from firesteel.cli.bench.synthetic import SHAPES, write_checkpoint, write_plain_checkpoint
from tests.cli.command import SHAPE, invoke_json


@pytest.mark.parametrize("recipe", ["int4-g128", "int8-g128", "int3-g64"])
def test_a_quantised_checkpoint_is_what_it_says(tmp_path, recipe: str):
    packed = write_checkpoint(tmp_path, SHAPE, recipe)
    found = invoke_json("inspect", tmp_path)
    (entry,) = found["experts"]
    element, _, group = recipe.partition("-g")
    assert (entry["element"], entry["group_size"]) == (element, int(group))
    assert entry["packed_bytes"] == packed
    assert entry["bf16_bytes"] == SHAPE.num_layers * SHAPE.layer_bf16_bytes
    assert len(found["files"]) == SHAPE.num_layers + 1
    assert found["linears"] == []


def test_weights_have_the_spread_of_a_trained_model(tmp_path):
    write_checkpoint(tmp_path, SHAPE)
    contents = scan(Checkpoint.open(tmp_path))
    with contents.checkpoint.reader() as reader:
        for part in range(3):
            source = contents.experts[0].sources[part][0]
            weight = source.read(reader).dequantize(source.scheme)
            assert weight.shape == (source.scheme.n, source.scheme.k)
            assert 0.01 < weight.std() < 0.04


def test_a_plain_checkpoint_has_no_quantization_config(tmp_path):
    write_plain_checkpoint(tmp_path, SHAPE)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    contents = scan(Checkpoint.open(tmp_path))
    assert not any(layer.is_packed for layer in contents.experts)
    assert {h.dtype for h in contents.checkpoint.headers.values()} == {torch.bfloat16}


def test_the_published_shape_is_that_of_qwen3_30b_a3b():
    shape = SHAPES["qwen3-30b-layers"]
    assert (shape.hidden_size, shape.intermediate_size) == (2048, 768)
    assert (shape.num_experts, shape.top_k) == (128, 8)
    assert shape.layer_bf16_bytes == 1_207_959_552
