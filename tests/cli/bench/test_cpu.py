import json
import statistics
from pathlib import Path

import pytest
import torch

from firesteel.cli.bench.cpu import CpuRequest, time_model
from firesteel.cli.bench.expand import expand_model
from firesteel.errors import InvalidArgumentError
from tests.cli.command import assert_error, invoke


def test_the_command_compares_speeds(packed_folder, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--model", packed_folder, "--prefill", "16", "--decode", "4", "--repeats", "3")
    result = invoke("bench", "cpu", *options, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert out.read_text() == line + "\n"
    record = json.loads(line)
    assert record["bench"] == "cpu"
    assert record["transformers"]["experts"] == "grouped_mm"
    assert record["relative_difference"] < 0.05
    assert record["machine"]["threads"] == torch.get_num_threads()
    for phase in ("prefill", "decode"):
        ours = record["firesteel"][f"{phase}_seconds"]
        theirs = record["transformers"][f"{phase}_seconds"]
        assert len(ours) == len(theirs) == 3
        ratio = statistics.median(theirs) / statistics.median(ours)
        assert record[f"{phase}_ratio"] == pytest.approx(ratio)


def test_the_command_prints_a_table(packed_folder):
    options = ("--model", packed_folder, "--prefill", "8", "--decode", "2", "--repeats", "1")
    result = invoke("bench", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert "ratio" in result.stdout
    assert "prefill 8" in result.stdout


def test_time_model_runs_one_step_a_token():
    calls: list[int] = []

    class Model:
        def __call__(self, input_ids, **kwargs):
            calls.append(input_ids.shape[1])
            assert kwargs.get("past_key_values") == (None if len(calls) == 1 else "cache")
            return type("Output", (), {"past_key_values": "cache"})

    prefill, decode = time_model(Model(), torch.zeros(1, 9, dtype=torch.int64), 6)
    assert calls == [6, 1, 1, 1]
    assert min(prefill, decode) > 0


def test_models_that_disagree_have_no_speed(packed_folder, monkeypatch):
    def broken(packed, implementation):
        dense = expand_model(packed, implementation)
        dense.model.layers[0].mlp.experts.down_proj.data.neg_()
        return dense

    monkeypatch.setattr("firesteel.cli.bench.cpu.expand_model", broken)
    options = ("--model", packed_folder, "--prefill", "8", "--decode", "2", "--repeats", "1")
    assert_error(invoke("bench", "cpu", *options), "logits: ", "no speed is reported")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "x"}, "--shape: got 'x', must be one of qwen3-30b-layers"),
        ({"model": Path("nowhere")}, "--model: got 'nowhere', must be a folder"),
        ({"shape": "qwen3-30b-layers", "repeats": 0}, "--repeats: got 0"),
        ({"shape": "qwen3-30b-layers", "threads": 0}, "--threads: got 0"),
    ],
)
def test_options_are_checked_first(options: dict, words: str):
    with pytest.raises(InvalidArgumentError) as caught:
        CpuRequest(**options)
    assert words in str(caught.value)


def test_there_must_be_something_packed(plain_folder):
    assert_error(invoke("bench", "cpu", "--model", plain_folder), "nothing of it is packed")


def test_the_context_has_an_end(packed_folder):
    result = invoke("bench", "cpu", "--model", packed_folder)
    assert_error(result, "--prefill, --decode: got 576 tokens", "at most 64")
