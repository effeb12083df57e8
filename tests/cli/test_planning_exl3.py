"""`firesteel plan` of EXL3 layers, by a model's name and from checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from firesteel.cli import planning
from firesteel.errors import UnsupportedError
from firesteel.formats.trellis import TrellisCode
from firesteel.formats.trellis_matrix import TrellisScheme
from firesteel.launch import plan
from firesteel.moe.products import HOPPER
from firesteel.moe.trellis.spec import trellis_geometry
from tests.checkpoints import STORAGES, Storage, write
from tests.cli.command import ROOT, assert_error, invoke, invoke_json
from tests.cli.tune.test_run import pretend_device

if not HOPPER:
    pytest.skip("needs Triton 3.6 or later, which has this Gluon", allow_module_level=True)

SEED = ("--model", "glm-5.2", "--tp", 4, "--recipe", "exl3-3.0-mcg")
GLM = trellis_geometry("glm-5.2", TrellisCode(3.0, "mcg"), tensor_parallel=4)


def test_the_reference_geometry_is_planned():
    result = invoke("plan", *SEED, "--max-tokens", 64)
    assert result.exit_code == 0
    made = plan(GLM, 64)
    first, _, *rows = (" ".join(line.split()) for line in result.stdout.splitlines())
    title = "MoE exl3-3-mcg K=6144 N=512 E=256 top_k=8 bf16 silu"
    assert first == f"{title}: {len(made.keys)} keys for 0..64 tokens"
    assert rows.index("") == 1 + len(made.keys)
    # No two keys read alike: kernel and what sets it apart, without number and tokens.
    assert len(set(rows[1 : 1 + len(made.keys)])) == len(made.keys)
    assert {row.split()[1] for row in rows[1 : 1 + len(made.keys)]} == {
        *("rotate_kernel", "trellis_stream_kernel", "act_kernel", "finish_kernel", "place_kernel")
    }
    assert "hidden fp16 512 x 512 524,288" in rows
    assert f"digest {made.digest}, " in rows[-1]
    assert result.stderr == ""


def test_json_is_the_plan():
    found = invoke_json("plan", *SEED, "--max-tokens", 300)
    assert found == json.loads(json.dumps(plan(GLM, 300).as_dict()))
    assert found["spec"]["w13"] == {"rates": [3], "codebook": "mcg", "has_bias": False}
    invariant = invoke_json("plan", *SEED, "--max-tokens", 300, "--batch-invariant")
    made = plan(replace(GLM, batch_invariant=True), 300)
    assert invariant["digest"] == made.digest != found["digest"]


@pytest.mark.parametrize(
    ("recipe", "stored"),
    [("exl3-4.0-mul1", "exl3-4-mul1"), ("exl3-2.0-3inst", "exl3-2-3inst")],
)
def test_every_model_and_codebook_by_name(recipe: str, stored: str):
    choice = ("--recipe", recipe, "--max-tokens", 2, "--ids", "int32")
    found = invoke_json("plan", "--model", "qwen3-30b-a3b", *choice)
    assert found["title"].startswith(f"MoE {stored}")
    biased = invoke_json("plan", "--model", "gpt-oss-120b", *choice)
    assert biased["title"].startswith(f"MoE {stored}")
    assert "-bias K=2880 N=2880" in biased["title"]


def planned(folder: Path, storage: Storage) -> dict:
    path = write(folder / "in", "qwen3_moe", storage).path
    return invoke_json("plan", "--checkpoint", path, "--max-tokens", 4)


def test_a_checkpoint_is_planned_from_its_headers(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-3-mcg"]).path
    monkeypatch.setattr("firesteel.checkpoint.files.Reader.tensor", refuse)
    spec = invoke_json("plan", "--checkpoint", path, "--max-tokens", 4)["spec"]
    config = json.loads((path / "config.json").read_text())
    assert spec["hidden_size"] == config["hidden_size"]
    assert spec["intermediate_size"] == config["moe_intermediate_size"]
    assert spec["top_k"] == config["num_experts_per_tok"]
    assert spec["w13"] == spec["w2"] == {"rates": [3], "codebook": "mcg", "has_bias": False}


def test_matrices_of_several_rates_are_one_plan(tmp_path):
    # Of seven, so that no layer has its matrices' rates in the order of another.
    mixed = Storage("exl3", "2-mcg 3-mcg 4-mcg 3-mcg 3-mcg 2-mcg 5-mcg")
    spec = planned(tmp_path, mixed)["spec"]
    assert spec["w13"]["rates"] == spec["w2"]["rates"] == [2, 3, 4, 5]


def test_linears_of_a_checkpoint_are_planned_with_its_experts(tmp_path):
    path = write(tmp_path / "in", "qwen3_moe", STORAGES["exl3-whole-mcg"], linears=True).path
    result = invoke("plan", "--checkpoint", path, "--max-tokens", 4)
    assert result.exit_code == 0
    titles = [line for line in result.stdout.splitlines() if line.startswith(("MoE", "linear"))]
    assert titles[0].startswith("MoE exl3-2,3,4,5-mcg")
    assert all(title.startswith("linear exl3-2,3,4,5-mcg K=") for title in titles[1:])
    assert len(titles) > 1
    assert len(set(titles)) == len(titles)


def test_linears_that_are_left_out_are_counted(tmp_path, monkeypatch):
    # Two blocks of columns, for two ranks.
    sizes = {"moe_intermediate_size": 256}
    storage = STORAGES["exl3-whole-mcg"]
    path = write(tmp_path / "in", "qwen3_moe", storage, linears=True, **sizes).path
    made = planning.trellis_linear_spec_of
    refused = []

    def refuse_three(scheme: TrellisScheme, **given):
        if scheme.code.bits == 3:
            refused.append(scheme)
            raise UnsupportedError("bits: got 3 of a test")
        return made(scheme, **given)

    monkeypatch.setattr(planning, "trellis_linear_spec_of", refuse_three)
    result = invoke("plan", "--checkpoint", path, "--max-tokens", 4)
    assert result.exit_code == 0
    assert len(refused) > 1
    assert result.stderr.splitlines() == [f"{len(refused)} linears: bits: got 3 of a test"]
    for option in ("--tp", "--ep"):
        result = invoke("plan", "--checkpoint", path, "--max-tokens", 4, option, 2)
        assert result.exit_code == 0
        told = f" linears: {option}: got 2, linears are planned whole, with 1\n"
        assert result.stderr.endswith(told)
        assert "linear exl3" not in result.stdout


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (STORAGES["exl3-2.5-mul1"], ["bits: got 2.5, kernels read whole numbers of bits"]),
        (
            Storage("exl3", "3-mcg 3-mul1"),
            ["codebooks: got", "in one stack, kernels read one"],
        ),
    ],
)
def test_a_checkpoint_without_kernels_says_why(tmp_path, storage: Storage, words: list[str]):
    path = write(tmp_path / "in", "qwen3_moe", storage).path
    assert_error(invoke("plan", "--checkpoint", path), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--recipe", "exl3-2.5-mcg"), ["bits: got 2.5, kernels read whole numbers of bits"]),
        (("--recipe", "exl3-9.0-mcg"), ["recipe: got 'exl3-9.0-mcg', must be"]),
        (
            ("--recipe", "exl3-3.0-mcg", "--tp", 32),
            ["--tp: got 32 ranks, 2048 columns of 128 each make at most 16 parts"],
        ),
        (
            ("--recipe", "exl3-3.0-mcg", "--table", "h200"),
            ["--table: got 'h200', no table of tiles cuts EXL3's kernels"],
        ),
    ],
)
def test_errors_are_named(arguments: tuple, words: list[str]):
    assert_error(invoke("plan", "--model", "glm-5.2", *arguments), *words)


def test_a_plain_checkpoint_is_planned_as_if_quantised_on_load():
    folder = ROOT / "examples" / "little_moe" / "bf16"
    choice = ("--recipe", "exl3-3.0-mul1", "--max-tokens", 4)
    spec = invoke_json("plan", "--checkpoint", folder, *choice)["spec"]
    assert spec["w13"] == spec["w2"] == {"rates": [3], "codebook": "mul1", "has_bias": False}


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "launch", *SEED, "--device", "cpu", "--max-tokens", 2),
        ("tune", "--shape", "glm-5.2-tp4", "--recipe", "exl3-3.0-mcg", "--out", "h200.json"),
    ],
    ids=["bench-launch", "tune"],
)
def test_what_takes_tiles_of_a_table_refuses_exl3(command: tuple, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if command[0] == "tune":
        pretend_device(monkeypatch, "NVIDIA H200", "sm_90")
    words = "recipe: MoE exl3-3-mcg K=6144 N=512 E=256 top_k=8 bf16 silu, must be of integers, FP4"
    assert_error(invoke(*command), words, "no table of tiles cuts EXL3's kernels")
