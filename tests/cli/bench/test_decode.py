import json
import math

import pytest
import torch

from firesteel.cli.bench import decode
from firesteel.cli.bench.decode import DecodeRequest, relative_difference, tolerance
from firesteel.cli.bench.decoder import Decoder, step_us
from firesteel.cli.bench.expand import expand_model
from firesteel.cli.bench.stacks import stack_config, write_stack
from firesteel.cli.options import counts_of
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.integrations.transformers import load_model
from tests.cli.command import assert_error, invoke

SMALL = ("--layers", "2", "--context", "16", "--steps", "8", "--repeats", "2")
KINDS = ("none", "firesteel", *(f"transformers {n}" for n in decode.HOST_IMPLEMENTATIONS))


def _lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stack")
    write_stack(folder, stack_config("qwen3-tiny", 2), "int4-g128")
    return load_model(folder, device="cpu")


@pytest.mark.host
@pytest.mark.parametrize("model", ["qwen3-tiny", "glm-tiny"])
def test_the_command_measures_every_kind_of_experts(tmp_path, model: str):
    out = tmp_path / "out.jsonl"
    options = ("--model", model, *SMALL, "--batch", "1,3", "--device", "cpu")
    result = invoke("bench", "decode", *options, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_text() == result.stdout
    rows = _lines(result.stdout)
    keys = [(row["experts"], row["batch"], row["graph"]) for row in rows]
    assert keys == [(k, b, graph) for k in KINDS for b in (1, 3) for graph in (False, True)]
    for row in rows:
        assert (row["bench"], row["model"], row["layers"]) == ("decode", model, 2)
        assert row["machine"]["cpus"]
        assert row["versions"]["transformers"]
        if row["graph"]:
            assert row["reason"] == "graphs were not measured: cpu is no CUDA device"
            assert row["step_us"] is row["tokens_per_s"] is None
            continue
        assert row["reason"] is None
        assert len(row["step_us_all"]) == 2
        assert row["tokens_per_s"] == pytest.approx(row["batch"] / row["step_us"] * 1e6)
        assert row["layer_us"] == pytest.approx(row["step_us"] / 2)
        # The check sees what experts give, by far.
        if row["experts"] == "none":
            assert row["relative_difference"] > 10 * row["tolerance"]
        else:
            assert row["relative_difference"] <= row["tolerance"]


def test_the_command_prints_a_table_and_what_was_not_measured():
    result = invoke("bench", "decode", "--model", "qwen3-tiny", *SMALL, "--batch", "2")
    assert result.exit_code == 0, result.output
    assert "2 layers of qwen3-tiny, int4-g128" in result.stdout
    for kind in KINDS:
        assert kind in result.stdout
    if not torch.cuda.is_available():
        assert result.stdout.count("graphs were not measured: cpu is no CUDA device") == 1


def test_logits_that_are_wrong_have_no_speed(tmp_path, monkeypatch):
    def broken(packed, implementation):
        dense = expand_model(packed, implementation)
        dense.model.layers[0].mlp.experts.down_proj.data.neg_()
        return dense

    monkeypatch.setattr("firesteel.cli.bench.decode.expand_model", broken)
    out = tmp_path / "out.jsonl"
    options = ("--model", "qwen3-tiny", *SMALL, "--batch", "1", "--device", "cpu", "--json")
    result = invoke("bench", "decode", *options, "--out", out)
    assert result.exit_code == 2
    assert "error: logits: firesteel and transformers grouped_mm differ by" in result.stderr
    (row,) = [r for r in _lines(out.read_text()) if r["experts"] == "firesteel" and not r["graph"]]
    assert row["step_us"] is row["tokens_per_s"] is row["experts_us_a_layer"] is None
    assert row["is_wrong"]


def test_a_kind_that_fails_says_why(monkeypatch):
    from transformers.integrations.moe import ExpertsInterface

    def broken(*_: object) -> None:
        raise NotImplementedError("no such device\nand more")

    monkeypatch.setitem(ExpertsInterface._global_mapping, "batched_mm", broken)
    options = ("--model", "qwen3-tiny", *SMALL, "--batch", "1", "--device", "cpu", "--json")
    result = invoke("bench", "decode", *options)
    assert result.exit_code == 0, result.output
    for row in _lines(result.stdout):
        is_broken = row["experts"] == "transformers batched_mm"
        assert (row["reason"] == "NotImplementedError: no such device") == is_broken
        assert not row["is_wrong"]


def test_steps_are_those_of_one_forward(packed):
    """With the static cache, step by step, what the model gives for the whole sequence."""
    tokens = torch.randint(1024, (12, 2), generator=torch.Generator().manual_seed(0))
    decoder = Decoder(packed, tokens)
    decoder.warm_up()
    decoder.reset()
    steps = torch.stack([decoder.step() for _ in range(12)], 1)
    with torch.no_grad():
        whole = packed(input_ids=tokens.T, use_cache=False).logits
    assert relative_difference(steps, whole) <= tolerance(2)
    decoder.reset()
    assert torch.equal(decoder.step(), steps[:, 0])


def test_every_run_starts_from_an_empty_cache(packed):
    decoder = Decoder(packed, torch.zeros(4, 1, dtype=torch.int64))
    found: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        found.append(decoder.step())
        return found[-1]

    times = step_us(step, decoder, steps=4, repeats=2)
    assert len(times) == 2
    assert min(times) > 0
    assert torch.equal(torch.stack(found[:4]), torch.stack(found[4:]))


def test_a_step_on_a_cpu_is_not_captured(packed):
    with pytest.raises(UnsupportedError, match="graphs were not measured: cpu is no CUDA device"):
        Decoder(packed, torch.zeros(4, 1, dtype=torch.int64)).capture()


def test_the_difference_is_the_median_tokens():
    expected = torch.tensor([[3.0, 4.0], [6.0, 8.0], [1.0, 0.0]])
    logits = expected + torch.tensor([[0.5, 0.0], [0.0, 2.0], [9.0, 0.0]])
    assert relative_difference(logits, expected) == pytest.approx(0.2)
    assert math.isnan(relative_difference(logits * math.nan, expected))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": (0,)}, "--batch: got [0]"),
        ({"steps": 0}, "--steps: got 0, must be 1 or more"),
        ({"repeats": -1}, "--repeats: got -1"),
        ({"steps": 9, "context": 8}, "--steps: got 9, must be at most --context 8"),
    ],
)
def test_options_are_checked_first(options: dict, words: str):
    with pytest.raises(InvalidArgumentError) as caught:
        DecodeRequest(**options)
    assert words in str(caught.value)


def test_batches_are_numbers():
    assert counts_of("--batch", "sequences", "1, 8,64") == (1, 8, 64)
    assert_error(invoke("bench", "decode", "--batch", "1,x"), "--batch: got '1,x'")
    assert_error(invoke("bench", "decode", "--model", "x"), "--model: got 'x'", "qwen3-30b-a3b")


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-tiny", "glm-tiny"])
def test_on_a_gpu_steps_run_on_kernels_and_in_graphs(model: str):
    options = ("--model", model, *SMALL, "--batch", "1,8,64", "--device", "cuda", "--json")
    result = invoke("bench", "decode", *options)
    assert result.exit_code == 0, result.output
    rows = _lines(result.stdout)
    for row in rows:
        if row["experts"] == "transformers eager" and row["graph"]:
            assert "waits for the GPU" in row["reason"]
            continue
        assert row["reason"] is None, row
        assert row["step_us"] > 0
        if row["experts"] == "firesteel":
            assert row["backend"] == "triton"
            assert row["graph_equals_eager"] is (True if row["graph"] else None)
            if not row["graph"]:
                assert row["kernel_launches_per_step"] >= 2 * 3


@pytest.mark.gpu
def test_on_a_gpu_a_recipe_must_have_kernels():
    options = ("--model", "qwen3-tiny", "--recipe", "int8-g64", *SMALL, "--device", "cuda")
    assert_error(invoke("bench", "decode", *options), "--recipe: 0 of 2 layers run on kernels")
