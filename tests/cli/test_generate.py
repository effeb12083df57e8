import json

import pytest

from tests.cli.command import CHECKPOINTS, INT4, invoke, invoke_json, run_apart

KEYS = {
    "prompt_ids",
    "token_ids",
    "text",
    "tokens_per_second",
    "prefill_seconds",
    "decode_seconds",
    "experts_bytes",
    "experts_bf16_bytes",
    "backend",
    "device",
    "load",
    "versions",
}

# One a tool and format; tests of the integration cover every checkpoint.
NAMES = (
    "autoround-gptq-w4-g32-asym",
    "llmcompressor-ct-w3-g32-sym-attn",
    "llmcompressor-ct-w4-g32-sym",
    "llmcompressor-ct-w8-g32-sym-attn-sharded",
    "llmcompressor-mxfp4a16-w4-g32-sym",
    "llmcompressor-nvfp4a16-w4-g16-sym-attn",
)


@pytest.mark.host
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_dequantised_model(name: str):
    prompts = json.loads((CHECKPOINTS / name / "reference.json").read_text())["prompts"]
    for prompt in prompts[:2]:
        ids = ",".join(map(str, prompt["prompt"]))
        count = len(prompt["greedy"])
        found = invoke_json(
            "generate", CHECKPOINTS / name, "--prompt-ids", ids, "--max-new-tokens", count,
            "--device", "cpu",
        )  # fmt: skip
        assert found["prompt_ids"] == prompt["prompt"]
        assert found["token_ids"] == prompt["greedy"]


def test_json_has_what_it_cost():
    found = invoke_json(
        "generate", INT4, "--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--device", "cpu"
    )
    assert set(found) == KEYS
    assert found["text"] is None
    assert len(found["token_ids"]) == 5
    layers = json.loads((INT4 / "config.json").read_text())["num_hidden_layers"]
    assert found["experts_bf16_bytes"] == 2 * layers * 4 * 3 * 128 * 64
    assert 0 < found["experts_bytes"] < found["experts_bf16_bytes"]
    assert found["backend"].startswith("torch")
    assert found["device"] == "cpu"
    assert found["load"]["experts"] == {"compressed-tensors int4 g32": layers}
    seconds = found["prefill_seconds"] + found["decode_seconds"]
    assert found["tokens_per_second"] == pytest.approx(5 / seconds)
    assert min(found["prefill_seconds"], found["decode_seconds"]) > 0


def test_one_token_has_no_decode_time():
    found = invoke_json("generate", INT4, "--prompt-ids", "1", "--max-new-tokens", "1")
    assert len(found["token_ids"]) == 1
    assert found["decode_seconds"] == 0
    assert found["tokens_per_second"] > 0


def test_ids_are_printed_where_there_is_no_tokenizer():
    options = ("generate", INT4, "--prompt-ids", "1,2,3", "--max-new-tokens", "4")
    result = invoke(*options)
    assert result.exit_code == 0
    ids = invoke_json(*options)["token_ids"]
    assert result.stdout == ",".join(map(str, ids)) + "\n"


def test_the_summary_says_what_is_packed():
    name = CHECKPOINTS / "llmcompressor-ct-w3-g32-sym-attn"
    layers = json.loads((name / "config.json").read_text())["num_hidden_layers"]
    noun = "layer" if layers == 1 else "layers"
    options = ("--prompt-ids", "1,2,3", "--max-new-tokens", "4", "--device", "cpu")
    result = invoke("generate", name, *options)
    for words in (
        "3 of prompt, 4 new",
        "decode",
        "packed, ",
        f"{layers} {noun} compressed-tensors int3 g32",
        " on cpu",
        f"{4 * layers} linears compressed-tensors int3 g32, packed",
    ):
        assert words in result.stderr


def test_text_is_the_prompt_and_what_follows(packed_folder):
    options = ("generate", packed_folder, "--prompt", "w3 w5", "--max-new-tokens", "4")
    found = invoke_json(*options)
    assert found["prompt_ids"] == [3, 5]
    words = [f"w{token}" for token in found["token_ids"]]
    assert found["text"].split() == words
    assert invoke(*options).stdout.split() == ["w3", "w5", *words]


def test_a_seed_repeats_and_another_differs(packed_folder):
    def tokens(seed: int) -> list[int]:
        options = ("--prompt-ids", "1,2", "--max-new-tokens", "16", "--temperature", "2")
        return invoke_json("generate", packed_folder, *options, "--seed", seed)["token_ids"]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_a_plain_checkpoint_runs_as_it_is_and_quantised(plain_folder):
    options = ("generate", plain_folder, "--prompt-ids", "1,2", "--max-new-tokens", "2")
    plain = invoke_json(*options)
    assert plain["experts_bytes"] == plain["experts_bf16_bytes"]
    assert plain["load"]["host_experts"] == 2
    rounded = invoke_json(*options, "--quantize", "int4-g128")
    assert rounded["experts_bytes"] < plain["experts_bytes"] / 3
    assert rounded["load"]["host_experts"] == 0
    text = invoke(*options).stderr
    assert "2 layers plain, transformers' own" in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations_have_the_type_asked_for(packed_folder, dtype: str):
    options = ("--prompt-ids", "1,2", "--max-new-tokens", "2", "--dtype", dtype)
    assert len(invoke_json("generate", packed_folder, *options)["token_ids"]) == 2


@pytest.mark.slow
def test_json_is_all_that_a_pipe_gets(piped):
    done = piped["generate --json"]
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads(done.stdout)) == KEYS


@pytest.mark.slow
def test_nothing_of_transformers_is_on_a_piped_stderr(piped):
    done = piped["generate"]
    assert done.returncode == 0
    heads = {line.split(" ")[0] for line in done.stderr.splitlines()}
    assert heads <= {"tokens", "speed", "experts", "backend", ""}


@pytest.mark.slow
def test_generate_without_transformers_says_how_to_get_it():
    code = "import sys; sys.modules['transformers'] = None"
    done = run_apart("generate", INT4, "--prompt-ids", "1", code=code)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: transformers: cannot be imported")
    assert "pip install 'firesteel[transformers]'" in line
