import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from firesteel.cli.bench.quality import QualityRequest, measure, windows
from firesteel.errors import InvalidArgumentError
from tests.cli.command import assert_error, invoke

KEYS = {
    "bench",
    "recipe",
    "perplexity",
    "bits_per_byte",
    "tokens",
    "experts_bytes",
    "experts_bf16_bytes",
    "file_bytes",
    "weight_error",
    "divergence",
    "seconds",
    "date",
    "commit",
    "versions",
    "device",
}


@st.composite
def window_cases(draw: st.DrawFn) -> tuple[int, int, int]:
    num_targets = draw(st.integers(1, 200))
    size = draw(st.integers(1, num_targets))
    return num_targets, size, draw(st.integers(1, size))


@given(case=window_cases())
def test_windows_score_every_target_once(case: tuple[int, int, int]):
    num_targets, size, stride = case
    found = windows(num_targets, size, stride)
    scored = [w.start + i for w in found for i in range(w.first, size)]
    assert scored == list(range(num_targets))
    assert found[0].start == found[0].first == 0
    assert all(w.first >= size - stride for w in found[1:])


class Previous(nn.Module):
    """Gives token t the logit `weight` for following itself: each row sees one token back."""

    def __init__(self, vocab_size: int, weight: float) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = weight
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> CausalLMOutput:
        del use_cache
        logits = self.weight * nn.functional.one_hot(input_ids, self.vocab_size).float()
        return CausalLMOutput(logits=logits)


@given(
    ids=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    window=st.integers(2, 70),
    weight=st.floats(0, 5),
    data=st.data(),
)
def test_measure_is_the_sum_over_the_text(
    ids: list[int], window: int, weight: float, data: st.DataObject
):
    stride = data.draw(st.integers(1, min(window, len(ids) - 1)))
    score = measure(Previous(5, weight), torch.tensor(ids), window=window, stride=stride)
    assert score.divergence is None
    total = math.log(math.exp(weight) + 4)
    expected = sum(total - weight * (a == b) for a, b in itertools.pairwise(ids))
    # fp32 log-softmax: a few roundings of numbers up to `total` for each of the tokens.
    assert score.nats == pytest.approx(expected, abs=len(ids) * 4 * 2.0**-23 * (total + weight))


@given(
    ids=st.lists(st.integers(0, 4), min_size=2, max_size=60),
    window=st.integers(2, 70),
    weights=st.tuples(st.floats(0, 5), st.floats(0, 5)),
)
def test_divergence_is_that_of_every_prediction(
    ids: list[int], window: int, weights: tuple[float, float]
):
    own, plain = weights
    score = measure(
        Previous(5, own),
        torch.tensor(ids),
        window=window,
        stride=min(window, len(ids) - 1),
        plain=Previous(5, plain),
    )
    totals = [math.log(math.exp(weight) + 4) for weight in (own, plain)]
    # The token before has its weight, the other four 0.
    follows, others = math.exp(plain - totals[1]), math.exp(-totals[1])
    one = follows * (plain - own) + (follows + 4 * others) * (totals[0] - totals[1])
    bound = len(ids) * 8 * 2.0**-23 * (sum(totals) + own + plain)
    assert score.divergence == pytest.approx((len(ids) - 1) * one, abs=bound)


def write_text(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (150,), generator=generator).tolist()
    path = folder / "text.txt"
    path.write_text(" ".join(f"w{token}" for token in tokens))
    return path


def test_the_command_measures_each_recipe(plain_folder, packed_folder, tmp_path):
    text, out = write_text(tmp_path), tmp_path / "out.jsonl"
    recipes = f"bf16,int8-g128,int3-g128,nvfp4,{packed_folder}"
    options = ("--model", plain_folder, "--text", text, "--recipes", recipes, "--out", out)
    size = ("--window", "32", "--stride", "16", "--device", "cpu")
    result = invoke("bench", "quality", *options, *size, "--divergence", "--json")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert out.read_text() == result.stdout
    assert [record["recipe"] for record in records] == recipes.split(",")
    for record in records:
        assert set(record) >= KEYS
        assert record["tokens"] == 149
        assert record["bytes"] == text.stat().st_size
        nats = math.log(record["perplexity"]) * record["tokens"]
        assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / record["bytes"])
    plain, int8, int3, nvfp4, packed = records
    assert plain["experts_bytes"] == plain["experts_bf16_bytes"]
    assert plain["experts_bytes"] > int8["experts_bytes"] > int3["experts_bytes"]
    assert nvfp4["stored"] == {"nvfp4 e2m1 g16": 2}
    # Random models know nothing of the text; what is quantised finely stays close to bf16.
    assert int8["perplexity"] == pytest.approx(plain["perplexity"], rel=0.02)
    assert packed["perplexity"] != plain["perplexity"]
    assert plain["divergence"] == 0
    assert 0 < int8["divergence"] < int3["divergence"] < packed["divergence"]
    assert plain["file_bytes"] == plain["experts_bytes"]
    assert int8["file_bytes"] / plain["file_bytes"] == pytest.approx(8.125 / 16, rel=1e-3)
    assert plain["weight_error"] == 0
    assert 0 < int8["weight_error"] < nvfp4["weight_error"] < int3["weight_error"] < 0.1


def test_the_command_prints_a_table(plain_folder, tmp_path):
    text = write_text(tmp_path)
    options = ("--model", plain_folder, "--text", text, "--recipes", "bf16", "--window", "32")
    result = invoke("bench", "quality", *options, "--stride", "32")
    assert result.exit_code == 0, result.output
    assert "perplexity" in result.stdout
    assert "bf16" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 1}, "--window: got 1"),
        ({"stride": 0}, "--stride: got 0, must be 1 to 512"),
        ({"stride": 513}, "--stride: got 513"),
        ({"recipes": ("int5-g128",)}, "--recipes: 'int5-g128' is neither bf16, a folder, nor"),
        ({"recipes": ("",)}, "--recipes: '' is neither"),
        ({"device": "tpu"}, "--device: got 'tpu'"),
        ({"model": Path("nowhere")}, "--model: got 'nowhere', must be a folder"),
        ({"text": Path("nowhere")}, "--text: got 'nowhere', must be a file"),
    ],
)
def test_options_are_checked_first(tmp_path, options: dict, words: str):
    given_options = {"model": tmp_path, "text": write_text(tmp_path), "recipes": ("bf16",)}
    with pytest.raises(InvalidArgumentError) as caught:
        QualityRequest(**(given_options | options))
    assert words in str(caught.value)


def test_the_window_must_fit_the_model(plain_folder, tmp_path):
    options = ("--model", plain_folder, "--text", write_text(tmp_path), "--recipes", "bf16")
    assert_error(invoke("bench", "quality", *options), "--window: got 512", "at most 64")


def test_a_text_of_no_tokens(plain_folder, tmp_path):
    (tmp_path / "text.txt").write_text("")
    options = ("--model", plain_folder, "--text", tmp_path / "text.txt", "--recipes", "bf16")
    result = invoke("bench", "quality", *options, "--window", "32", "--stride", "16")
    assert_error(result, "--text: got 0 tokens")


@pytest.mark.slow
def test_only_json_is_on_stdout(piped):
    done = piped["bench quality --json"]
    assert (done.returncode, done.stderr) == (0, "")
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 2
