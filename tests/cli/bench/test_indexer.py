"""`firesteel bench indexer` as a command, with an operation and times that are pretended."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from firesteel.cli.bench import indexer, indexer_exact
from firesteel.cli.bench.indexer import IndexerRequest, run
from firesteel.cli.bench.indexer_cases import CASES
from firesteel.cli.bench.indexer_checks import DOT_ROUNDING
from firesteel.errors import UnsupportedError
from tests.cli.bench.indexer_fake import CPU, FakeOperation
from tests.cli.command import assert_error, invoke

SMALL = ("--requests", 2, "--rows", 2, "--heads", 8, "--context", 600, "--top-k", 512)
PREFILL = ("--mode", "prefill", "--rows", 5, "--heads", 8, "--context", 600, "--top-k", 512)
Functions = Sequence[Callable[[], object]]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU for a GPU; the numbers of functions that were timed. The nth graph takes 10 n us."""
    timed: list[int] = []

    def graph_us(functions: Functions, *, seconds: float) -> list[float]:
        assert seconds < 10
        functions[0]()
        timed.append(len(functions))
        us = 10.0 * len(timed)
        return [us - 1, us, us, us, us + 2]

    def captured(functions: Functions) -> SimpleNamespace:
        (function,) = functions
        return SimpleNamespace(replay=function)

    monkeypatch.setattr(indexer, "_gpu", lambda _: CPU)
    monkeypatch.setattr(indexer, "free_bytes", lambda _: 10**9)
    monkeypatch.setattr(indexer, "calls_to_rotate", lambda _: 3)
    monkeypatch.setattr(indexer, "Operation", FakeOperation)
    monkeypatch.setattr(indexer, "graph_us", graph_us)
    monkeypatch.setattr(indexer_exact, "captured", captured)
    return timed


@pytest.mark.parametrize(
    ("options", "mode", "requests", "rows"),
    [(SMALL, "decode", 2, 2), (PREFILL, "prefill", 1, 5)],
    ids=["decode", "prefill"],
)
def test_a_record_has_every_field(
    pretended: list[int], tmp_path: Path, options: tuple, mode: str, requests: int, rows: int
) -> None:
    out = tmp_path / "indexer.jsonl"
    result = invoke("bench", "indexer", *options, "--json", "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_text() == result.stdout
    row = json.loads(result.stdout)
    said = {
        "bench": "indexer",
        "case": f"{mode}-{requests}x{rows}-h8-k512-600",
        "mode": mode,
        "requests": requests,
        "rows_per_request": rows,
        "heads": 8,
        "context": 600,
        "top_k": 512,
        "cache_dtype": "e4m3",
        "route": "auto",
        "exact": True,
        "differs": None,
        "dot_rounding": DOT_ROUNDING["e4m3"],
        "workspace_bytes": 1234,
        "rotated": 3,
        "us": 10.0,
        "floor": "keys read once at 4.3 TB/s",
        # The whole is timed first, then the launches up to each, then torch.
        "launches": [
            {"kernel": "decode_scores", "grid": [1, 1, 1], "us": 20.0},
            {"kernel": "select", "grid": [1, 1, 1], "us": 10.0},
        ],
        "torch_bf16_us": 40.0,
        "torch_bf16_reason": None,
        "torch_bf16_differs": None,
        "device": "cpu",
    }
    assert {name: row[name] for name in said} == said
    assert pretended == [3, 3, 3, 3]
    assert row["floor_us"] == pytest.approx(requests * 600 * 132 / 4.3e6)
    assert row["fraction_of_floor"] == pytest.approx(row["floor_us"] / 10)
    assert row["us_p20"] < row["us"] < row["us_p80"]
    assert 0 < row["score_error"] < 2.0**-23
    assert row["tied_rows"] > 0
    assert {"date", "commit", "versions", "machine"} <= set(row)
    assert row["versions"]["torch"] == torch.__version__


def test_a_table_is_printed(pretended: list[int]) -> None:
    result = invoke("bench", "indexer", *SMALL)
    assert result.exit_code == 0, result.output
    head, columns, row = result.stdout.splitlines()
    assert head == "Indexer, top_k 512, e4m3 keys"
    assert columns.split()[:2] == ["case", "us"]
    assert "decode-2x2-h8-k512-600" in row
    assert "decode_scores 20.0 + select 10.0" in row
    assert row.split()[-1] == "yes"


def test_what_is_wrong_has_no_time_and_ends_in_an_error(
    pretended: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(operation: FakeOperation, *given: object) -> None:
        if operation.spec.num_heads == 8:
            indices = given[-1]["indices"].view(-1, 512)
            indices[0, :2] = indices[0, :2].flip(0)

    monkeypatch.setattr(indexer, "Operation", partial(FakeOperation, spoil=spoil))
    small = indexer.Case(name="wrong", requests=1, rows=1, heads=8, context=600, top_k=512)
    right = indexer.Case(name="right", requests=1, rows=1, heads=16, context=600, top_k=512)
    out = tmp_path / "indexer.jsonl"
    with pytest.raises(indexer.FiresteelError, match="selections are wrong: wrong: exact inputs: "):
        run(IndexerRequest(cases=(small, right)), as_json=True, out=out)
    wrong, other = map(json.loads, out.read_text().splitlines())
    assert (wrong["exact"], wrong["us"], wrong["launches"]) == (False, None, [])
    assert wrong["torch_bf16_us"] is wrong["score_error"] is wrong["fraction_of_floor"] is None
    assert wrong["differs"].startswith("exact inputs: row 0, place 0: got ")
    # The others are measured all the same.
    assert (other["exact"], other["us"]) == (True, 10.0)


def test_a_wrong_case_in_the_table(pretended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(operation: FakeOperation, run: int, inputs: object, outputs: dict) -> None:
        outputs["indices"].fill_(3)

    monkeypatch.setattr(indexer, "Operation", partial(FakeOperation, spoil=spoil))
    result = invoke("bench", "indexer", *SMALL)
    assert result.exit_code == 2
    assert result.stdout.splitlines()[-1].split()[-1] == "NO"
    assert "error: indexer: selections are wrong: decode-2x2" in result.stderr


def test_torch_is_left_out_where_memory_is_short_and_it_is_said(
    pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "free_bytes", lambda _: 1000)
    result = invoke("bench", "indexer", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["torch_bf16_us"] is None
    assert row["torch_bf16_reason"].startswith("it takes about ")
    assert row["torch_bf16_reason"].endswith(" MB, of which 1 kB are free")
    assert f"torch was not timed: {row['torch_bf16_reason']}" in result.stderr
    assert len(pretended) == 3


def test_torch_runs_one_call_alone_where_that_fills_the_cache(
    pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "COLD_BYTES", 1000)
    assert invoke("bench", "indexer", *SMALL, "--json").exit_code == 0
    assert pretended == [3, 3, 3, 1]


def test_torch_is_left_out_where_it_is_not_wanted(pretended: list[int]) -> None:
    row = json.loads(invoke("bench", "indexer", *SMALL, "--no-baseline", "--json").stdout)
    assert row["torch_bf16_us"] is None
    assert row["torch_bf16_reason"] == "--no-baseline"


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the indexer is timed on a CUDA device"):
        run(IndexerRequest(device="cpu"), as_json=True, out=tmp_path / "indexer.jsonl")
    result = invoke("bench", "indexer", "--device", "cpu", "--json")
    assert_error(result, "device: got cpu, the indexer is timed on a CUDA device")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--case", "turnkey-9k"), "--case: got 'turnkey-9k', must be one of turnkey-8k"),
        (("--case", "one-8k", "--top-k", 512), "must not be given with --top-k"),
        (("--mode", "mixed"), "--mode: got 'mixed'"),
        (("--cache-dtype", "fp4"), "--cache-dtype: got 'fp4', must be one of e4m3"),
        (("--heads", 80), "num_heads: got 80"),
        (("--top-k", 100), "top_k: got 100"),
        (("--rows", 9), "rows: got 9"),
        (("--context", 0), "--context: got 0, must be 1 or more"),
    ],
)
def test_wrong_options_are_named(options: tuple, words: str) -> None:
    assert_error(invoke("bench", "indexer", *options), words)


def test_all_cases_are_measured_where_none_is_named() -> None:
    assert IndexerRequest().cases == tuple(CASES.values())
