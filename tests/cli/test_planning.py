import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from firesteel.cli.keys import distinctions, key_cells, spans
from firesteel.launch import LaunchKey, plan
from firesteel.moe.spec import GEOMETRIES, geometry
from firesteel.moe.tuning_file import write_table
from tests.checkpoints import STORAGES, edit_config, write
from tests.cli.command import (
    CHECKPOINTS,
    INT4,
    ROOT,
    assert_error,
    invoke,
    invoke_json,
    run_in_turn,
)
from tests.moe.tiles import FIXED, FIXED_FILE, keys_of, tile_at

GLM = geometry("glm-5.2", tensor_parallel=4)
LITTLE = ROOT / "examples" / "little_moe"
SEED = ("--model", "glm-5.2", "--tp", 4, "--recipe", "int4-g128")


def test_the_reference_geometry_is_planned():
    result = invoke("plan", *SEED, "--table", FIXED_FILE, "--max-tokens", 64)
    assert result.exit_code == 0
    first, _, *rows = (" ".join(line.split()) for line in result.stdout.splitlines())
    title = "MoE int4-g128 K=6144 N=512 E=256 top_k=8 bf16 silu tiles of fixed"
    assert first == f"{title}: 12 keys for 0..64 tokens"
    assert rows[0] == "key kernel tokens what sets it apart warps stages"
    assert rows[1] == "0 gate_up_stream_kernel 1-4 int32 ids, direct, SPLIT_K 4 4 4"
    assert rows[2] == "1 activate_kernel 1-4 int32 ids 4 3"
    assert rows[3] == "2 down_stream_kernel 1-4 int32 ids, direct, BLOCK_N 64, SPAN 1 4 4"
    assert rows[4] == "3 combine_kernel 1-64 int32 ids 4 3"
    assert rows[6] == "5 gate_up_stream_kernel 5-64 packed, SPLIT_K 1 4 4"
    assert "hidden bf16 512 x 512 524,288" in rows
    made = plan(replace(GLM, table=FIXED), 64)
    # Below the rows of keys stands a blank line.
    assert rows.index("") == 1 + len(made.keys)
    assert f"{made.workspace.num_bytes:,}" in result.stdout
    assert f"digest {made.digest}, " in rows[-1]
    assert result.stderr == ""


def test_help_names_the_commands():
    assert {"plan", "build", "audit"} <= set(invoke("--help").stdout.split())


def test_json_is_the_plan_and_3072_tokens_are_quick():
    start = time.process_time()
    found = invoke_json("plan", *SEED, "--max-tokens", 3072)
    # About a second; ten times that would be another order of work.
    assert time.process_time() - start < 10
    made = plan(GLM, 3072)
    assert found == json.loads(json.dumps(made.as_dict()))
    assert found["flags"] == [{"ids": "i32"}, {"ids": "i64"}]
    # The README runs the same command.
    command = f"firesteel plan {' '.join(map(str, SEED))} --max-tokens 3072"
    quoted = f"$ {command}   # {len(found['keys'])} keys, without a GPU"
    assert quoted in (ROOT / "README.md").read_text().splitlines()


@pytest.mark.parametrize("model", list(GEOMETRIES))
def test_every_model_by_name(model: str):
    found = invoke_json("plan", "--model", model, "--recipe", "int4-g64-asym", "--max-tokens", 8)
    assert found["spec"]["hidden_size"] == GEOMETRIES[model]["hidden_size"]
    assert found["spec"]["w13"]["group_size"] == found["spec"]["w2"]["group_size"] == 64
    assert found["spec"]["w13"]["has_zero_points"]
    assert found["spec"]["w2"]["has_bias"] == (model == "gpt-oss-120b")


def test_ids_narrow_the_plan():
    assert invoke_json("plan", *SEED, "--max-tokens", 4, "--ids", "int64")["flags"] == [
        {"ids": "i64"}
    ]
    both = invoke_json("plan", *SEED, "--max-tokens", 4, "--ids", "int64, int32")
    assert both["flags"] == [{"ids": "i64"}, {"ids": "i32"}]


def tiles_of(found: dict) -> set[int]:
    """The rows of tiles that a plan's keys are compiled for."""
    constexprs = [key["constexprs"] for key in found["keys"]]
    return {values["BLOCK_M"] for values in constexprs if "BLOCK_M" in values}


def test_batch_invariant_is_another_spec():
    # So many tokens reach every tile of a plan whose rows may differ.
    usual = invoke_json("plan", *SEED, "--max-tokens", 2000)
    counts = {tile_at(GLM, num_tokens)[1].rows for num_tokens in range(1, 2001)}
    assert tiles_of(usual) == counts
    assert len(counts) > 1
    found = invoke_json("plan", *SEED, "--max-tokens", 1280, "--batch-invariant")
    assert found["spec"]["batch_invariant"] is True
    assert tiles_of(found) == {GLM.tiles.batch_invariant.rows}
    (gate_up,) = (key for key in found["keys"] if key["kernel"].endswith("gate_up_kernel"))
    assert not any("wgmma" in key["kernel"] for key in found["keys"])
    assert gate_up["tokens"] == [[1, 1280]]


def test_max_tokens_is_the_operators(monkeypatch):
    monkeypatch.setenv("FIRESTEEL_MAX_TOKENS", "12")
    assert invoke_json("plan", *SEED)["max_tokens"] == 12
    assert invoke_json("plan", *SEED, "--max-tokens", 3)["max_tokens"] == 3
    monkeypatch.setenv("FIRESTEEL_MAX_TOKENS", "0")
    assert_error(invoke("plan", *SEED), "FIRESTEEL_MAX_TOKENS", "'0'")


@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        (("--model", "gpt-oss-120b", "--recipe", "mxfp4"), "mxfp4-bias"),
        (("--model", "glm-5.2", "--tp", 4, "--recipe", "nvfp4"), "nvfp4-divisor"),
        (("--checkpoint", CHECKPOINTS / "llmcompressor-mxfp4a16-w4-g32-sym"), "mxfp4"),
        (
            ("--checkpoint", CHECKPOINTS / "llmcompressor-nvfp4a16-w4-g16-sym-attn"),
            "nvfp4-divisor",
        ),
        (("--checkpoint", CHECKPOINTS / "modelopt-nvfp4-w4-g16-sym"), "nvfp4-multiplier"),
        (("--checkpoint", LITTLE / "bf16", "--recipe", "nvfp4"), "nvfp4-divisor"),
        (("--model", "glm-5.2", "--tp", 4, "--recipe", "nf3"), "nf3"),
        (("--model", "gpt-oss-120b", "--recipe", "int3-g64"), "int3-g64-bias"),
        (("--checkpoint", LITTLE / "bf16", "--recipe", "int3-g32"), "int3-g32"),
    ],
)
def test_others_than_int4_are_planned_by_name_and_from_checkpoints(arguments: tuple, stored: str):
    found = invoke_json("plan", *arguments, "--max-tokens", 4, "--ids", "int32")
    assert found["title"].startswith(f"MoE {stored} K=")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["--model, --checkpoint: got neither, must be exactly one"]),
        (("--model", "glm-5.2", "--checkpoint", LITTLE), ["got both"]),
        (("--model", "glm-9"), ["model: got 'glm-9'", "glm-5.2", "mixtral-8x7b"]),
        (("--model", "glm-5.2", "--recipe", "int8-g128"), ["'int8-g128'", "int3 and int4"]),
        (
            ("--model", "glm-5.2", "--recipe", "int4-g256"),
            ["kernels exist for int3 and int4 with -g32"],
        ),
        (("--model", "glm-5.2", "--recipe", "int8-channel"), ["mxfp4, nvfp4, nf3, and exl3"]),
        (("--model", "glm-5.2", "--recipe", "nvfp4-g16"), ["recipe: got 'nvfp4-g16', must be"]),
        (("--model", "glm-5.2", "--recipe", "int4"), ["recipe: got 'int4', must be"]),
        (
            ("--model", "gpt-oss-120b"),
            ["--recipe: got int4-g128, must be one of int4-g32, int4-g64 for gpt-oss-120b"],
        ),
        (("--model", "glm-5.2", "--ids", "int16"), ["ids: got 'int16'", "int32 or int64"]),
        (("--model", "glm-5.2", "--ids", ""), ["ids: got ''"]),
        (("--model", "glm-5.2", "--max-tokens", -1), ["max_tokens: got -1"]),
        (("--model", "glm-5.2", "--max-tokens", 2**30), ["max_tokens: got"]),
        (("--checkpoint", "nowhere"), ["nowhere", "must be a folder"]),
        (("--checkpoint", LITTLE / "bf16"), ["layers 0, 1, 2, 3", "stored plain", "--recipe"]),
        (("--checkpoint", LITTLE / "int4-g128", "--recipe", "int4-g32"), ["quantised already"]),
        (
            ("--checkpoint", LITTLE / "bf16", "--recipe", "int8-g128"),
            ["int8, must be one of int3, int4"],
        ),
        (("--checkpoint", CHECKPOINTS / "llmcompressor-ct-w8-g32-sym-attn-sharded"), ["int8"]),
    ],
)
def test_errors_are_named(arguments: tuple, words: list[str]):
    assert_error(invoke("plan", *arguments), *words)


def test_without_triton_one_line_says_so():
    two = (*SEED, "--max-tokens", 2)
    commands = [
        ("plan", *two),
        ("audit", *two, "--traffic", ROOT / "examples/launch_audit/decode_32.txt"),
        ("bench", "launch", *two, "--device", "cpu"),
    ]
    for done in run_in_turn(
        *commands, code="sys.modules['triton'] = None; import firesteel.cli.planning"
    ):
        assert (done.returncode, done.stdout) == (2, ""), done.args
        assert done.stderr.splitlines()[-1] == "error: triton: not installed, kernels need it"
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_line():
    plan_two = ("plan", *SEED, "--max-tokens", 2)
    commands = [plan_two, (*plan_two, "--json")]
    for done in run_in_turn(*commands, code="import firesteel.cli.planning", out="/dev/full"):
        assert done.returncode == 2, done.args
        assert done.stderr == "error: stdout: cannot be written: No space left on device\n"


def test_a_checkpoint_is_planned_from_its_headers(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("firesteel.checkpoint.files.Reader.tensor", refuse)
    spec = invoke_json("plan", "--checkpoint", INT4, "--max-tokens", 4)["spec"]
    config = json.loads((INT4 / "config.json").read_text())
    assert spec["hidden_size"] == config["hidden_size"]
    assert spec["intermediate_size"] == config["moe_intermediate_size"]
    assert spec["top_k"] == config["num_experts_per_tok"]
    assert (spec["dtype"], spec["w13"]["scale"], spec["w13"]["group_size"]) == ("bf16", "bf16", 32)


def test_a_plain_checkpoint_is_planned_as_if_quantised_on_load():
    folder = LITTLE / "bf16"
    found = invoke_json("plan", "--checkpoint", folder, "--recipe", "int4-g64", "--max-tokens", 4)
    assert found["spec"]["w2"]["group_size"] == 64


def test_biases_and_constants_come_from_the_checkpoint(tmp_path):
    written = write(tmp_path / "gpt", "gpt_oss", STORAGES["ct-w4-g32"])
    edit_config(written.path, swiglu_limit=5.0)
    spec = invoke_json("plan", "--checkpoint", written.path, "--max-tokens", 2)["spec"]
    assert spec["w13"]["has_bias"]
    assert (spec["activation"]["name"], spec["activation"]["limit"]) == ("swigluoai", 5.0)


def test_layers_that_differ_are_planned_apart(tmp_path):
    written = write(tmp_path / "mixed", "qwen3_moe", STORAGES["ct-w4-g32"], plain_layers=(1,))
    result = invoke("plan", "--checkpoint", written.path, "--max-tokens", 2, "--json")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["spec"]["num_experts"] > 0
    assert result.stderr.startswith("layer 1: no kernel for these experts: they are stored plain")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts_per_tok": None}, ["num_experts_per_tok is None"]),
        ({"num_experts_per_tok": "2"}, ["num_experts_per_tok is '2'"]),
        ({"dtype": None, "torch_dtype": None}, ["dtype is 'None'"]),
        ({"dtype": "float32"}, ["dtype: got torch.float32, must be bfloat16 or float16"]),
        ({"hidden_act": "gelu"}, ["activation: got 'gelu'"]),
    ],
)
def test_a_config_that_cannot_be_planned(tmp_path, fields: dict, words: list[str]):
    shutil.copytree(INT4, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, **fields)
    assert_error(invoke("plan", "--checkpoint", tmp_path), *words)


def key(kernel: str, *, warps: int = 4, arguments: tuple = (), **constexprs) -> LaunchKey:
    return LaunchKey(f"m.{kernel}", arguments, tuple(constexprs.items()), num_warps=warps)


@pytest.mark.parametrize("model", list(GEOMETRIES))
def test_no_two_keys_of_a_plan_read_alike(model: str):
    for target in ("sm_90", "sm_120"):
        spec = geometry(model, group_size=64).for_target(target)
        keys = keys_of(spec, 2048)
        shown = list(zip([k.kernel for k in keys], distinctions(keys), strict=True))
        assert len(set(shown)) == len(keys)
        tiles = {dict(k.constexprs).get("BLOCK_M") for k in keys} - {None}
        assert tiles == {tile_at(spec, num_tokens)[1].rows for num_tokens in range(1, 2049)}
        # Enough of them to be confused.
        assert len(tiles) > 2


def gate_ups_of(target: str) -> list[tuple[str, str, str]]:
    """FC1's keys of a large plan: kernel, what sets it apart, and stages."""
    spec = replace(GLM, table=FIXED).for_target(target)
    made = plan(spec, 3072, flags={"ids": ("i32",)})
    cells = [(name, apart, stages) for name, apart, _, stages in key_cells(made.keys)]
    return [cell for cell in cells if cell[0].startswith("gate_up")]


def test_keys_of_a_large_plan_are_told_apart_by_how_they_cut_the_layer():
    assert gate_ups_of("sm_120") == [
        ("gate_up_kernel", "int32 ids, direct, BLOCK_M 8, SPLIT_K 4", "4"),
        ("gate_up_kernel", "packed, BLOCK_M 8, SPLIT_K 1", "3"),
        ("gate_up_kernel", "packed, BLOCK_M 16, SPLIT_K 1", "3"),
        ("gate_up_kernel", "packed, BLOCK_M 32, SPLIT_K 1", "3"),
        ("gate_up_kernel", "packed, BLOCK_M 64, SPLIT_K 1, JOINT", "3"),
    ]
    # Their stages are constants, and are shown as those of the others.
    assert gate_ups_of("sm_90") == [
        ("gate_up_stream_kernel", "int32 ids, direct, SPLIT_K 4", "4"),
        ("gate_up_stream_kernel", "packed, SPLIT_K 1", "4"),
        ("gate_up_kernel", "", "3"),
        ("gate_up_wgmma_kernel", "BLOCK_M 64, BLOCK_N 64", "3"),
        ("gate_up_wgmma_kernel", "BLOCK_M 128, BLOCK_N 128", "4"),
    ]


def test_stages_and_warps_of_kernels_in_gluon_tell_keys_apart_once():
    keys = [
        key("a", WARPS=4, STAGES=3),
        key("a", WARPS=4, STAGES=4),
        key("a", warps=8, WARPS=8, STAGES=4),
    ]
    assert distinctions(keys) == [
        "num_warps 4, num_stages 3",
        "num_warps 4, num_stages 4",
        "num_warps 8, num_stages 4",
    ]


def test_a_key_is_told_apart_by_what_varies_and_no_more():
    keys = [
        key("a", BLOCK=16, K=64),
        key("a", BLOCK=32, K=64),
        key("a", BLOCK=32, K=64, warps=8),
        key("b", BLOCK=99),
    ]
    assert distinctions(keys) == [
        "BLOCK 16, num_warps 4",
        "BLOCK 32, num_warps 4",
        "BLOCK 32, num_warps 8",
        "",
    ]


def test_a_constant_that_is_true_is_its_name_and_one_that_is_false_is_left_out():
    keys = [
        key("a", BLOCK=1, JOINT=True),
        key("a", BLOCK=2, JOINT=True),
        key("a", BLOCK=2, JOINT=False),
    ]
    assert distinctions(keys) == ["BLOCK 1, JOINT", "BLOCK 2, JOINT", "BLOCK 2"]


def test_a_tensor_that_is_absent_tells_keys_apart():
    keys = [key("a", arguments=(("bias_ptr", "*bf16"),)), key("a", bias_ptr=None)]
    assert distinctions(keys) == ["bias_ptr *bf16", "bias_ptr absent"]


def test_many_ranges_are_cut():
    assert spans([(1, 4), (6, 6)]) == "1-4, 6"
    assert spans([(i, i) for i in range(6)]) == "0, 1, 2, 3, and 2 more"


def test_a_table_of_the_users_is_another_plan(tmp_path):
    (shape,) = FIXED.shapes
    tiles = replace(FIXED.tiles(shape), split_k=2)
    write_table(tmp_path / "mine.json", replace(FIXED, name="mine", rows=tiles.rows(shape)))
    usual, named, mine = (
        invoke_json("plan", *SEED, "--max-tokens", 4, *more)
        for more in ((), ("--table", "h200"), ("--table", tmp_path / "mine.json"))
    )
    assert usual == named
    assert usual["spec"]["table"]["name"] == "h200"
    assert mine["spec"]["table"]["name"] == "mine"
    assert mine["digest"] != usual["digest"]
    assert {key["constexprs"].get("SPLIT_K") for key in mine["keys"]} == {None, 2}
    assert_error(invoke("plan", *SEED, "--table", "h100"), "table: got 'h100', must be a file, or")
    assert_error(invoke("plan", *SEED, "--table", INT4 / "config.json"), "config.json: table: got")
