import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.test_moe_plot import titles

PEERS = {"source": "others", "turnkey-8k": 15.7, "one-8k": 8.3}


@pytest.fixture(scope="module")
def plots(tables: ModuleType) -> ModuleType:
    return importlib.import_module("indexer_plot")


def record(case: str, context: int, us: float | None, **changed: object) -> dict:
    launches = [] if us is None else [{"kernel": "a", "us": us / 4}, {"kernel": "b", "us": us / 2}]
    return {
        "case": case,
        "mode": "decode",
        "requests": 8,
        "rows_per_request": 6,
        "heads": 32,
        "context": context,
        "top_k": 2048,
        "cache_dtype": "e4m3",
        "route": "auto",
        "us": us,
        "floor_us": 2.0,
        "fraction_of_floor": None if us is None else 2.0 / us,
        "launches": launches,
        "torch_bf16_us": None,
        "workspace_bytes": 2_000_000,
        "score_error": 2.5e-5,
        "exact": us is not None,
        "date": "2026-01-02T03:04:05Z",
        "commit": "abc",
        "versions": {"firesteel": "0", "torch": "1", "transformers": "2", "python": "3"},
        "machine": {"name": "GPU", "cpus": 2, "threads": 2, "load": None},
        **changed,
    }


def test_one_kind_of_cases_is_drawn_by_context(plots: ModuleType) -> None:
    records = [
        record("turnkey-32k", 32768, 20.0, torch_bf16_us=100.0),
        record("turnkey-8k", 8192, 10.0),
        record("turnkey-131k", 131072, None),
        record("turnkey-8k", 8192, 1.0, cache_dtype="bf16"),
        record("one-8k", 8192, 3.0),
    ]
    found = titles(plots.indexer_picture(records, PEERS, "turnkey"))
    beside = "best scores, then best top-k"
    assert sorted(found) == sorted(
        [
            "firesteel, 8 k of context: 10.0 us",
            "firesteel, 32 k of context: 20.0 us",
            "torch bf16, 32 k of context: 100.0 us",
            f"{beside}, 8 k of context: 15.7 us",
            "firesteel, 8 k of context: 0.20 of the floor",
            "firesteel, 32 k of context: 0.10 of the floor",
            "torch bf16, 32 k of context: 0.02 of the floor",
            f"{beside}, 8 k of context: 0.13 of the floor",
        ]
    )


def test_there_is_no_picture_of_what_was_not_measured(plots: ModuleType) -> None:
    records = [record("one-8k", 8192, 3.0), record("turnkey-8k", 8192, None)]
    assert plots.indexer_picture(records, PEERS, "turnkey") is None
    assert plots.indexer_picture([], PEERS, "turnkey") is None


def write(folder: Path, *records: dict) -> None:
    (folder / "h200").mkdir(exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "h200" / "indexer.jsonl").write_text(lines)


def test_the_table_has_the_last_of_each_case(tables: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        record("turnkey-8k", 8192, 99.0),
        record("turnkey-8k", 8192, 10.0, torch_bf16_us=100.0),
        record("one-8k", 8192, None, score_error=None),
        record("turnkey-8k", 8192, 12.0, cache_dtype="bf16"),
        record("turnkey-8k", 8192, 11.0, route="filtered"),
    )
    text = tables.render("indexer", tmp_path)
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    shape = "8 x 6 rows, 32 heads"
    tail = "2 MB | 2.5e-05 | yes |"
    assert rows == [
        f"| turnkey-8k, e4m3: {shape} | 10.0 | 2.0 | 0.20 | 2.5 + 5.0 | 15.7 | 100.0 | {tail}",
        f"| one-8k, e4m3: {shape} |  | 2.0 |  |  | 8.3 |  | 2 MB |  | NO |",
        f"| turnkey-8k, bf16: {shape} | 12.0 | 2.0 | 0.17 | 3.0 + 6.0 |  |  | {tail}",
        f"| turnkey-8k, e4m3, filtered: {shape} | 11.0 | 2.0 | 0.18 | 2.8 + 5.5 | 15.7 |  | {tail}",
    ]
    assert "](images/indexer-turnkey.svg)" in text


def test_a_table_without_the_picture_s_cases_names_none(tables: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, record("one-8k", 8192, 3.0))
    assert re.search(r"images/", tables.render("indexer", tmp_path)) is None


def test_peers_are_of_cases_that_there_are(tables: ModuleType) -> None:
    from firesteel.cli.bench.indexer_cases import CASES

    peers = tables.read_peers()["indexer"]
    assert set(peers) - {"source"} <= set(CASES)
    assert all(us > CASES[name].floor()[0] for name, us in peers.items() if name != "source")
