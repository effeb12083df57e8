import math
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.cli.request import Request, parse_ids, read_prompt
from firesteel.errors import CheckpointError, InvalidArgumentError
from tests.cli.command import INT4, assert_error, invoke, write_tokenizer

CONFIG = {"vocab_size": 64, "max_position_embeddings": 16}


@given(ids=st.lists(st.integers(0, 63), min_size=1))
def test_ids_parse(ids: list[int]):
    assert parse_ids(",".join(map(str, ids)), 64) == tuple(ids)
    assert parse_ids(" , ".join(map(str, ids)), 64) == tuple(ids)


@pytest.mark.parametrize("text", ["", "1,", ",1", "1 2", "1.0", "x", "1,,2"])
def test_ids_that_are_no_integers(text: str):
    with pytest.raises(InvalidArgumentError, match=r"--prompt-ids: got '.*must be integers"):
        parse_ids(text, 64)


@pytest.mark.parametrize("text", ["64", "-1", "1,2,1000000000000000000000"])
def test_ids_outside_the_vocabulary(text: str):
    with pytest.raises(InvalidArgumentError, match=r"must be 0 to 63 \(the model's vocabulary\)"):
        parse_ids(text, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got neither, exactly one"),
        ({"prompt": "a", "prompt_ids": "1"}, "got both, exactly one"),
        ({"prompt": ""}, "--prompt: got '', must not be empty"),
        ({"prompt_ids": "1", "max_new_tokens": 0}, "--max-new-tokens: got 0, must be 1 or more"),
        ({"prompt_ids": "1", "seed": -1}, "--seed: got -1, must be 0 to"),
        ({"prompt_ids": "1", "seed": 2**63}, "--seed: got 9223372036854775808, must be 0 to"),
        ({"prompt_ids": "1", "temperature": -0.1}, "--temperature: got -0.1, must be 0"),
        ({"prompt_ids": "1", "temperature": math.nan}, "--temperature: got nan"),
        ({"prompt_ids": "1", "temperature": math.inf}, "--temperature: got inf"),
        ({"prompt_ids": "1", "dtype": "int8"}, "--dtype: got 'int8', must be one of auto"),
        ({"prompt_ids": "1", "device": "tpu"}, "--device: got 'tpu', must be one of cpu, cuda"),
    ],
)
def test_options_are_checked_when_the_request_is_made(options: dict, message: str):
    with pytest.raises(InvalidArgumentError) as caught:
        Request(checkpoint="x", **options)
    assert message in str(caught.value)


def test_a_prompt_needs_a_tokenizer(tmp_path):
    request = Request(checkpoint="x", prompt="w1")
    with pytest.raises(InvalidArgumentError, match=r"has no tokenizer.*--prompt-ids"):
        read_prompt(request, tmp_path, CONFIG)


def test_a_prompt_is_encoded(tmp_path):
    write_tokenizer(tmp_path)
    prompt = read_prompt(
        Request(checkpoint="x", prompt="w5 w7", max_new_tokens=1), tmp_path, CONFIG
    )
    assert prompt.ids == (5, 7)
    assert prompt.tokenizer is not None


def test_a_prompt_without_a_token(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(InvalidArgumentError, match="gives no token"):
        read_prompt(Request(checkpoint="x", prompt="  "), tmp_path, CONFIG)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path):
    write_tokenizer(tmp_path, vocab_size=100)
    with pytest.raises(CheckpointError, match="gives token 80, the model's vocabulary ends at 63"):
        read_prompt(Request(checkpoint="x", prompt="w80"), tmp_path, CONFIG)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_a_broken_tokenizer(tmp_path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(CheckpointError, match="tokenizer: transformers cannot read it from"):
        read_prompt(Request(checkpoint="x", prompt="a"), tmp_path, CONFIG)


def test_a_tokenizer_with_code_of_its_own_runs_none_of_it(tmp_path):
    shutil.copy(INT4 / "config.json", tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'
    )
    with pytest.raises(CheckpointError, match="tokenizer: transformers cannot read it"):
        read_prompt(Request(checkpoint="x", prompt="a"), tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "message"),
    [
        (16, 1, "prompt: got 16 tokens, must be fewer than 16"),
        (10, 7, "--max-new-tokens: got 7 after 10 tokens of prompt, must be 6 or fewer"),
    ],
)
def test_the_context_has_an_end(tmp_path, num_prompt: int, num_new: int, message: str):
    request = Request(
        checkpoint="x", prompt_ids=",".join(["1"] * num_prompt), max_new_tokens=num_new
    )
    with pytest.raises(InvalidArgumentError) as caught:
        read_prompt(request, tmp_path, CONFIG)
    assert message in str(caught.value)


def test_the_whole_context_may_be_used(tmp_path):
    request = Request(checkpoint="x", prompt_ids=",".join(["1"] * 10), max_new_tokens=6)
    assert len(read_prompt(request, tmp_path, CONFIG).ids) == 10


@pytest.mark.parametrize("vocab_size", [None, "64", 0, True])
def test_a_config_without_a_vocabulary(tmp_path, vocab_size: object):
    with pytest.raises(CheckpointError, match=r"config.json: vocab_size is"):
        read_prompt(Request(checkpoint="x", prompt_ids="1"), tmp_path, {"vocab_size": vocab_size})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "hello"], ["no tokenizer", "--prompt-ids"]),
        (["--prompt", ""], ["--prompt", "empty"]),
        (["--prompt-ids", "1,64"], ["64", "0 to 63"]),
        (["--prompt-ids", "1", "--prompt", "a"], ["both"]),
        ([], ["neither"]),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--prompt-ids", "1", "--quantize", "int5-g128"], ["int5-g128"]),
        (["--prompt-ids", "1", "--quantize", "int4-g32"], ["quantised already"]),
    ],
)
def test_the_command_refuses_before_it_loads(options: list[str], words: list[str]):
    assert_error(invoke("generate", INT4, *options), *words)
