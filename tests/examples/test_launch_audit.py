"""The double-derived table fails, firesteel's own plan does not, and the page says so."""

import contextlib
import importlib.util
import io
import json
import re
import sys

import pytest

from firesteel.cli.auditing import read_traffic
from firesteel.moe.plan import select
from firesteel.moe.spec import geometry
from tests.cli.command import ROOT, invoke
from tests.moe.tiles import gate_up_cuts, keys_of

FOLDER = ROOT / "examples" / "launch_audit"
PAGE = (ROOT / "docs" / "launch_audit.md").read_text()
DECODE, PREFILL = ("decode_32", "decode_64"), ("prefill_3072", "prefill_8192")
IDS = (("ids", "i32"),)
LAYER = geometry("glm-5.2", tensor_parallel=4)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("double_derived", FOLDER / "double_derived.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def servers(example):
    return {server.name: server for server in example.SERVERS}


def constexpr(key, name: str) -> object:
    return dict(key.constexprs)[name]


@pytest.mark.parametrize(
    ("name", "num_tokens", "blocks"),
    [
        ("prefill_3072", 65, 268),
        ("prefill_3072", 128, 268),
        ("prefill_3072", 512, 316),
        ("prefill_3072", 1024, 380),
        ("prefill_3072", 2048, 508),
        ("prefill_3072", 3072, 636),
        ("decode_64", 64, 288),
        ("decode_64", 33, 288),
        ("decode_64", 1, 8),
        ("decode_64", 32, 256),
        ("prefill_8192", 8192, 1276),
    ],
)
def test_block_counts_are_those_that_were_reported(example, servers, name, num_tokens, blocks):
    (key,) = example.run_time_keys(servers[name], num_tokens)
    assert constexpr(key, "MAX_M_BLOCKS") == blocks


def test_warm_up_takes_the_capacity_and_the_pinned_tiles(example, servers):
    blocks = {}
    for server in example.SERVERS:
        (key,) = example.prewarmed_keys(server)
        blocks[server.name] = constexpr(key, "MAX_M_BLOCKS")
        assert (constexpr(key, "FC1_TILE_K"), constexpr(key, "FC2_TILE_N")) == (64, 256)
    assert blocks == {
        "decode_32": 256,
        "decode_64": 288,
        "prefill_3072": 636,
        "prefill_8192": 1276,
    }


@pytest.mark.parametrize("name", DECODE)
def test_decode_reaches_none_of_its_prewarmed_keys(example, servers, name):
    found = example.audit_double_derived(servers[name])
    assert (len(found.prewarmed), len(found.reached)) == (1, 0)
    missed = sum(found.launches[miss.key] for miss in found.misses)
    assert missed == sum(found.launches.values()) == len(servers[name].traffic())
    for miss in found.misses:
        assert any(text.startswith("FC1_TILE_K: 128, nearest has 64") for text in miss.differences)


def test_at_the_capacity_of_decode_only_the_tiles_differ(example, servers):
    found = example.audit_double_derived(servers["decode_64"])
    last = found.misses[-1]
    assert constexpr(last.key, "MAX_M_BLOCKS") == 288
    assert [text.partition(":")[0] for text in last.differences] == [
        "FC1_TILE_K",
        "FC1_TILE_N",
        "FC2_TILE_K",
        "FC2_TILE_N",
    ]


@pytest.mark.parametrize("name", PREFILL)
def test_prefill_reaches_one_key_and_every_other_size_misses(example, servers, name):
    server = servers[name]
    found = example.audit_double_derived(server)
    (reached,) = found.reached
    assert constexpr(reached, "MAX_M_BLOCKS") == server.capacity_blocks
    assert found.launches[reached] == server.traffic().count(server.max_tokens)
    assert len(found.misses) == len(found.launches) - 1 == 5
    for miss in found.misses:
        assert [text.partition(":")[0] for text in miss.differences] == ["MAX_M_BLOCKS"]


@pytest.mark.parametrize("name", [*DECODE, *PREFILL])
def test_firesteels_own_plan_misses_nothing_and_reaches_what_the_traffic_needs(
    example, servers, name
):
    server = servers[name]
    traffic = server.traffic()
    if name in PREFILL:
        traffic += servers["decode_64"].traffic()
    found = example.audit_planned(server.max_tokens, traffic)
    assert (found.misses, found.too_long) == ((), ())
    keys = tuple(keys_of(LAYER, server.max_tokens, ["i32"]))
    assert found.prewarmed == keys
    # All but those that only other counts launch, if there are any.
    needed = {launch.key for n in traffic for launch in select(LAYER, n, IDS)}
    assert found.reached == tuple(key for key in keys if key in needed)
    assert found.never_reached == tuple(key for key in keys if key not in needed)
    # One of few routes or more, then those of sorted ones, as more and more tokens reach them.
    tiles = [constexpr(key, "BLOCK_M") for key in keys if key.name.startswith("gate_up")]
    assert tiles == [
        rows for _, _, rows, *_ in gate_up_cuts(LAYER, range(1, server.max_tokens + 1))
    ]
    launches = sum(len(select(LAYER, num_tokens, IDS)) for num_tokens in traffic)
    assert sum(found.launches.values()) == launches


def test_a_plan_that_ends_too_soon_is_found(example, servers):
    found = example.audit_planned(64, servers["prefill_3072"].traffic())
    assert 3072 in found.too_long


def test_traffic_stays_within_its_plan(servers):
    for name, server in servers.items():
        counts = read_traffic(FOLDER / f"{name}.txt")
        assert min(counts) >= 1
        assert max(counts) == server.max_tokens


@pytest.fixture(scope="module")
def written(example, tmp_path_factory):
    """What the example prints, and the folder that it writes to."""
    folder = tmp_path_factory.mktemp("launch_audit")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["double_derived.py", "--out", str(folder)])
        example.main()
    return printed.getvalue(), folder


@pytest.mark.parametrize("name", [*DECODE, *PREFILL])
def test_the_command_finds_in_the_files_what_the_example_finds(example, servers, written, name):
    _, folder = written
    result = invoke(
        *("audit", "--plan", folder / f"{name}.plan.json", "--json"),
        *("--prewarmed", folder / f"{name}.prewarmed.json"),
        *("--traffic", FOLDER / f"{name}.txt"),
    )
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    expected = example.audit_double_derived(servers[name]).as_dict()
    assert {key: found[key] for key in expected} == expected


def quoted() -> list[tuple[str, list[str]]]:
    """Each command of the page and the lines that it shows as its output."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        command = " ".join(lines[0].removeprefix("$ ").split())
        found.append((command, lines[1:]))
    return found


def squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_page_quotes_what_its_commands_print(written):
    printed, folder = written
    blocks = quoted()
    assert len(blocks) == 4
    for command, lines in blocks:
        program, *words = command.split()
        if program == "python":
            output = printed
        else:
            assert program == "firesteel"
            result = invoke(*(w.replace("build/launch_audit", str(folder)) for w in words))
            # The page ends with firesteel's own plan, which misses nothing.
            assert result.exit_code == (1 if "--plan" in words else 0)
            output = result.stdout
        known, shown = squeezed(output), squeezed("\n".join(lines))
        assert shown
        if "..." not in shown:
            assert shown == known
        for start in shown:
            # A line that the page cuts ends in dots; dots alone stand for lines that it leaves out.
            if start.endswith(" ..."):
                assert any(other.startswith(start[:-4]) for other in known), start
            elif start != "...":
                assert start in known


def test_the_page_says_how_many_keys_serve_decode_and_prefill():
    num_keys = len(keys_of(LAYER, 3072, ["i32"]))
    assert f"one plan of {num_keys} keys serves decode and prefill" in " ".join(PAGE.split())


@pytest.mark.parametrize("number", [268, 316, 380, 508, 636, 288, 140])
def test_the_page_names_the_figures(number: int):
    assert re.search(rf"\b{number}\b", PAGE)


def test_run_time_can_look_up_far_more_keys_than_were_compiled(example, servers):
    keys = {name: len(example.run_time_plan(server)["keys"]) for name, server in servers.items()}
    assert keys == {"decode_32": 6, "decode_64": 7, "prefill_3072": 140, "prefill_8192": 14}
