import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def record(recipe: str, bits: float, date: str = "2026-01-02T03:04:05Z") -> dict:
    return {
        "recipe": recipe,
        "window": 512,
        "stride": 256,
        "tokens": 10,
        "perplexity": 3.5,
        "bits_per_byte": bits,
        "experts_bytes": 1000,
        "experts_bf16_bytes": 4000,
        "file_bytes": 1000,
        "weight_error": 0.01,
        "divergence": 0.002,
        "date": date,
        "commit": "abc",
        "versions": {"firesteel": "0", "torch": "1", "transformers": "2", "python": "3"},
        "machine": {"name": "CPU", "cpus": 2, "threads": 2, "load": 0.5},
    }


def write(folder: Path, *records: dict) -> None:
    (folder / "cpu").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "cpu" / "quality.jsonl").write_text(lines)


def test_the_newest_result_of_a_recipe_counts(tables, tmp_path):
    write(tmp_path, record("bf16", 2.0), record("int4", 9.0), record("int4", 2.1))
    text = tables.render("quality", tmp_path)
    assert "| `bf16` | 4.00 | 1 kB | 0.01000 | 0.00200 | 3.5000 | 2.0000 | +0.00 % |" in text
    assert "| `int4` | 4.00 | 1 kB | 0.01000 | 0.00200 | 3.5000 | 2.1000 | +5.00 % |" in text
    assert "9.0000" not in text
    assert "Measured 2026-01-02, CPU (2 CPUs, 2 threads), commit abc, firesteel 0" in text


def test_the_largest_comes_first_and_a_checkpoint_made_for_the_table_is_named_by_its_recipe(
    tables, tmp_path
):
    small = record("build/quality/exl3-2.0-mcg", 2.2)
    large = {**record("elsewhere/int4", 2.1), "file_bytes": 2000, "weight_error": None}
    write(tmp_path, small, record("bf16", 2.0) | {"file_bytes": 4000}, large)
    lines = tables.render("quality", tmp_path).splitlines()
    assert [line.split(" | ")[:4] for line in lines[2:5]] == [
        ["| `bf16`", "16.00", "4 kB", "0.01000"],
        ["| `elsewhere/int4`", "8.00", "2 kB", ""],
        ["| `exl3-2.0-mcg`", "4.00", "1 kB", "0.01000"],
    ]


def test_a_decode_row_has_eager_and_graph_and_says_what_has_no_time(tables, tmp_path):
    def step(experts: str, graph: bool, us: float | None, reason: str | None = None) -> dict:
        return {
            **record("int4-g128", 0.0),
            "model": "m",
            "layers": 4,
            "batch": 8,
            "context": 64,
            "experts": experts,
            "graph": graph,
            "step_us": us,
            "layer_us": us and us / 4,
            "tokens_per_s": us and 8e6 / us,
            "experts_us_a_layer": us and us / 8,
            "experts_share": us and 0.5,
            "relative_difference": us and 0.0125,
            "reason": reason,
        }

    rows = [
        step("firesteel", False, 2000.0),
        step("firesteel", True, 999.0),
        step("transformers eager", False, 4000.0),
        step("transformers eager", True, None, "capture: a step waits for the GPU 9 times"),
        step("firesteel", True, 1000.0),
    ]
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "decode.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = tables.render("decode", tmp_path)
    stack = "| 4 layers of m int4-g128, 8, "
    assert (
        f"{stack}firesteel | 2.000 | 1.000 | 4000 | 8000 | 0.250 | 0.125 | 50 % | 0.0125 |" in text
    )
    assert f"{stack}transformers eager | 4.000 |  | 2000 |  |  |  |  | 0.0125 |" in text
    assert "- m, 8, transformers eager, graph: capture: a step waits for the GPU 9 times\n" in text


def test_a_document_is_rewritten_between_the_marks_only(tables, tmp_path):
    write(tmp_path, record("bf16", 2.0))
    before = "head\n<!-- results quality -->\nold\n<!-- end -->\ntail\n"
    after = tables.rewrite(before, tmp_path)
    assert after.startswith("head\n<!-- results quality -->\n| experts |")
    assert after.endswith("<!-- end -->\ntail\n")
    assert "old" not in after
    assert tables.rewrite(after, tmp_path) == after


def test_without_results_the_document_says_so(tables, tmp_path):
    assert tables.render("cpu", tmp_path) == "Not measured yet.\n"


def test_the_docs_are_fresh(tables):
    for name in tables.DOCS:
        text = (ROOT / "docs" / name).read_text()
        assert tables.rewrite(text, ROOT / "bench" / "results") == text


def test_the_pictures_are_fresh(tables):
    folder = ROOT / "docs" / "images"
    committed = {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert tables.pictures(ROOT / "bench" / "results") == committed


def test_a_picture_stands_in_the_docs(tables):
    text = "".join((ROOT / "docs" / name).read_text() for name in tables.DOCS)
    for name in tables.pictures(ROOT / "bench" / "results"):
        assert f"](images/{name})" in text


def layer(m: int, us: float, **changed) -> dict:
    key = {"shape": "a", "recipe": "int4", "routing": "uniform", "batch_invariant": False}
    return {**key, "m": m, "us": us, **changed}


def test_a_layer_s_rows_are_by_size_and_keep_the_last_baseline(tables):
    keys, _ = tables.BENCHES["moe"]
    records = [
        layer(8, 3.0, torch_bf16_us=9.0),
        layer(1, 2.0, shape="b"),
        layer(8, 2.5),
        layer(1, 1.0, torch_bf16_us=7.0),
        layer(1, 1.5, torch_bf16_us=6.0),
    ]
    found = [
        (r["shape"], r["m"], r["us"], r["torch_bf16_us"]) for r in tables.layers(records, *keys)
    ]
    assert found == [("a", 1, 1.5, 6.0), ("a", 8, 2.5, 9.0), ("b", 1, 2.0, None)]
