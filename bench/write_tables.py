"""Write the newest measured numbers into the docs, so that none is copied by hand.

    python bench/write_tables.py

Reads `bench/results/<device>/*.jsonl` and rewrites what stands between `<!-- results NAME -->` and
`<!-- end -->` in docs/quality.md, docs/performance.md and docs/indexer.md, and the pictures in
docs/images. The last line of each recipe, model, geometry or case counts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from indexer_plot import indexer_picture
from moe_plot import moe_picture

from firesteel.cli.console import format_bytes

ROOT = Path(__file__).parents[1]
DOCS = ("quality.md", "performance.md", "indexer.md")
# What docs/images/moe-<shape>.svg shows.
PICTURES = (("glm-5.2-tp4", "int4-g128"),)
# The cases that docs/images/indexer-<kind>.svg shows.
INDEXER_PICTURE = "turnkey"
# Where docs/quality.md has `firesteel quantize` put checkpoints, each named by its recipe.
QUANTIZED = "build/quality/"
_BLOCK = re.compile(r"(<!-- results (\w+) -->\n).*?(<!-- end -->)", re.S)
_NOTHING = "Not measured yet.\n"


def read_results(folder: Path, name: str) -> list[dict[str, Any]]:
    """Every record of one benchmark, oldest first."""
    lines = (
        line
        for path in sorted(folder.glob(f"*/{name}.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    return [json.loads(line) for line in lines if line]


def newest(records: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The last record of each combination of keys, in the order in which these came first."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:
        found[tuple(json.dumps(record[key]) for key in keys)] = record
    return list(found.values())


def layers(records: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """`newest` by size; where the last run had no baseline, with that of the last that had one."""
    records = list(records)
    known = newest((r for r in records if r.get("torch_bf16_us") is not None), *keys)
    baseline = {tuple(r[key] for key in keys): r["torch_bf16_us"] for r in known}
    found = [
        {"torch_bf16_us": baseline.get(tuple(r[key] for key in keys)), **r}
        for r in newest(records, *keys)
    ]
    # A size that came later stands where its shape does.
    places = {_shape(r): number for number, r in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda r: (places[_shape(r)], r["m"]))


def _shape(record: dict[str, Any]) -> tuple[object, ...]:
    return tuple(record[key] for key in ("shape", "recipe", "routing", "batch_invariant"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns after the first are right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sources(records: Sequence[dict[str, Any]]) -> str:
    """Where, when and with what the records were measured."""
    found: dict[str, None] = {}
    for record in records:
        versions, machine = record["versions"], record["machine"]
        names = ", ".join(
            f"{name} {versions[name]}" for name in ("firesteel", "torch", "transformers", "python")
        )
        found[
            f"{record['date'][:10]}, {machine['name']} ({machine['cpus']} CPUs, "
            f"{machine['threads']} threads), commit {record['commit']}, {names}."
        ] = None
    loads = [r["machine"]["load"] for r in records if r["machine"]["load"] is not None]
    low, high = (min(loads), max(loads)) if loads else (None, None)
    span = f"{low}" if low == high else f"{low} to {high}"
    busy = f" Load average {span}." if loads else ""
    return "\n" + "\n".join(f"Measured {line}{busy}" for line in found) + "\n"


def quality_table(records: Sequence[dict[str, Any]]) -> str:
    """Perplexity by recipe, the largest first."""
    plain = next((r["bits_per_byte"] for r in records if r["recipe"] == "bf16"), None)
    rows = [
        [
            f"`{r['recipe'].removeprefix(QUANTIZED)}`",
            f"{16 * r['file_bytes'] / r['experts_bf16_bytes']:.2f}",
            format_bytes(r["file_bytes"]),
            _share(r["weight_error"]),
            _share(r["divergence"]),
            f"{r['perplexity']:.4f}",
            f"{r['bits_per_byte']:.4f}",
            "" if plain is None else f"{100 * (r['bits_per_byte'] / plain - 1):+.2f} %",
        ]
        for r in sorted(records, key=lambda r: -r["file_bytes"])
    ]
    head = [
        *("experts", "bits a weight", "bytes", "error of weights", "divergence"),
        *("perplexity a token", "bits a byte", "against bf16"),
    ]
    return markdown(head, rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def cpu_table(records: Sequence[dict[str, Any]]) -> str:
    """Speed by model and phase."""
    rows = [
        [
            f"`{r['model']}`, {phase} {r[count]}",
            f"{r['firesteel'][f'{phase}_tokens_per_second']:.1f}",
            f"{r['transformers'][f'{phase}_tokens_per_second']:.1f}",
            f"{r[f'{phase}_ratio']:.2f}",
            format_bytes(r["experts_bytes"]),
            format_bytes(r["experts_bf16_bytes"]),
        ]
        for r in records
        for phase, count in (("prefill", "prefill_tokens"), ("decode", "decode_steps"))
    ]
    head = ["", "firesteel, tokens/s", "transformers bf16, tokens/s", "ratio", "packed", "bf16"]
    return markdown(head, rows)


def load_memory_table(records: Sequence[dict[str, Any]]) -> str:
    """The terms of the bound by geometry."""
    rows = [
        [
            f"{r['layers']} layers, {r['experts']} experts, {r['hidden_size']} x "
            f"{r['intermediate_size']}, {r['recipe']}",
            format_bytes(r["packed_bytes"]),
            format_bytes(r["layer_bf16_bytes"]),
            format_bytes(r["host_bytes"]),
            format_bytes(r["bound_bytes"]),
            format_bytes(r["peak_bytes"]),
            "yes" if r["passed"] else "NO",
        ]
        for r in records
    ]
    head = ["", "packed", "one layer bf16", "host", "bound", "measured peak", "holds"]
    return markdown(head, rows)


def launch_table(records: Sequence[dict[str, Any]]) -> str:
    """Host time by size, its parts, and what was checked in the same run."""
    host = [
        [
            f"{r['driver'].partition(':')[0]}, {row['tokens']} tokens",
            str(row["launches"]),
            f"{row['host_ns'] / 1000:.2f}",
            _us(row["floor_ns"]),
            _us(row["goal_ns"]),
            {True: "yes", False: "NO", None: ""}[row["is_met"]],
        ]
        for r in records
        for row in r["host"]
    ]
    head = ["driver", "launches", "host, us", "bare launch, us", "goal, us", "met"]
    parts = [
        [r["driver"].partition(":")[0], *(_us(r["components"][name]) for name in _PARTS)]
        for r in records
    ]
    text = markdown(head, host) + "\n" + markdown(["driver", *_PARTS.values()], parts) + "\n"
    for record in records:
        text += "".join(f"- {line}\n" for line in _launch_facts(record))
    return text


_PARTS = {
    "resolve_ns": "resolve, us",
    "stream_ns": "stream, us",
    "check_ns": "checks, us",
    "patch_and_look_up_ns": "look up and patch, us",
    "launch_ns_each": "one launch, us",
    "triton_jit_launch_ns": "Triton's own launch, us",
}


def _us(nanoseconds: float | None) -> str:
    return "" if nanoseconds is None else f"{nanoseconds / 1000:.2f}"


def _launch_facts(record: dict[str, Any]) -> list[str]:
    """What one run checked, in sentences."""
    traffic, driver = record["traffic"], record["driver"].partition(":")[0]
    found = [
        f"{driver}: {traffic['calls']} calls, every count of 0..{record['plan']['max_tokens']} in "
        f"random order with each type of ids: {traffic['compiles']} compiles, "
        f"{traffic['environment_reads']} environment reads, {traffic['allocations']} allocations, "
        f"{traffic['host_syncs']} host syncs; {traffic['keys_launched']} of "
        f"{traffic['keys_planned']} planned keys reached, {traffic['launched_unplanned']} launched "
        f"outside the plan."
    ]
    if "capture" in record:
        capture, prewarm = record["capture"], record["prewarm"]
        found += [
            f"{driver}: captured as the first use of a layer at {capture['first_use_captured']} "
            f"counts, replay equal to eager bit for bit at {capture['equal_to_eager']}.",
            f"{driver}: prewarm of {prewarm['cold_compiled']} keys from nothing "
            f"{prewarm['cold_seconds']:.2f} s on {record['machine']['cpus']} CPUs, from a bundle "
            f"of {format_bytes(prewarm['bundle_bytes'])} {prewarm['bundle_seconds']:.3f} s.",
        ]
    for row in record.get("dependent_launch", ()):
        found.append(
            f"{driver}: {row['tokens']} tokens in a graph, {row['off_us']:.1f} us without and "
            f"{row['on_us']:.1f} us with programmatic dependent launch."
        )
    return found


def read_peers() -> dict[str, Any]:
    """What other kernels took for the same layers."""
    return json.loads((ROOT / "bench" / "peers.json").read_text(encoding="utf-8"))


def moe_table(records: Sequence[dict[str, Any]]) -> str:
    """Time of a layer by shape and size, beside peers measured on the same kind of GPU."""
    peers = read_peers()
    rows: list[list[str]] = []
    for r in records:
        known = peers.get(f"{r['shape']} {r['recipe']}", {}) if r["routing"] == "uniform" else {}
        others = [(us[str(r["m"])], name) for name, us in known.items() if str(r["m"]) in us]
        best = min(others, default=None)
        torch_us = r.get("torch_bf16_us")
        kind = ", batch invariant" if r["batch_invariant"] else ""
        rows.append(
            [
                f"{r['shape']} {r['recipe']}, {r['routing']}{kind}, {r['m']}",
                f"{r['us']:.1f}",
                f"{r['floor_us']:.1f}",
                f"{r['fraction_of_floor']:.2f}",
                f"{r['tflops']:.0f}",
                "" if best is None else f"{best[0]:g} ({best[1]})",
                "" if torch_us is None else f"{torch_us:.0f}",
                f"{r['host_us']:.1f}",
                f"{r['rel_err']:.4f}",
            ]
        )
    head = ["layer, routing, tokens", "us", "floor, us", "of floor", "TFLOP/s", "best peer, us",
            "torch bf16, us", "host, us", "rel. error"]  # fmt: skip
    return markdown(head, rows) + f"\nPeers: {peers['source']}.\n"


def counters_table(records: Sequence[dict[str, Any]]) -> str:
    """What of a GPU each kernel of a layer kept busy."""
    rows = [
        [
            f"{r['shape']} {r['recipe']}, {r['m']}, {r['kernel'].removesuffix('_kernel')}",
            f"{r['us']:.1f}",
            *(f"{r[name]:.0f}" for name in _PERCENTS),
            f"{r['sm_mhz']:.0f}",
        ]
        for r in records
    ]
    head = ["layer, tokens, kernel", "us", "memory, %", "L2, %", "busiest unit, %",
            "issue slots, %", "occupancy, %", "MHz"]  # fmt: skip
    return markdown(head, rows)


_PERCENTS = (
    "dram_percent",
    "l2_percent",
    "matrix_or_busiest_percent",
    "issue_percent",
    "occupancy_percent",
)


def decode_table(records: Sequence[dict[str, Any]]) -> str:
    """A step by layer stack, batch and experts, eager beside its graph, and what has no time."""
    pairs: dict[tuple[str, str], dict[bool, dict[str, Any]]] = {}
    for r in records:
        stack = f"{r['layers']} layers of {r['model']} {r['recipe']}, {r['batch']}"
        pairs.setdefault((stack, r["experts"]), {})[r["graph"]] = r
    rows: list[list[str]] = []
    for (stack, experts), kinds in pairs.items():
        eager, graph = kinds.get(False, {}), kinds.get(True, {})
        share = graph.get("experts_share")
        rows.append(
            [
                f"{stack}, {experts}",
                _ms(eager.get("step_us")),
                _ms(graph.get("step_us")),
                _whole(eager.get("tokens_per_s")),
                _whole(graph.get("tokens_per_s")),
                _ms(graph.get("layer_us")),
                _ms(graph.get("experts_us_a_layer")),
                "" if share is None else f"{100 * share:.0f} %",
                _fraction((graph if share is not None else eager).get("relative_difference")),
            ]
        )
    head = ["layers, batch, experts", "eager step, ms", "graph step, ms", "eager tokens/s",
            "graph tokens/s", "graph, ms a layer", "experts of it", "share",
            "logits' difference"]  # fmt: skip
    text = markdown(head, rows) + "\n"
    for r in records:
        if r["reason"] is not None:
            kind = "graph" if r["graph"] else "eager"
            text += f"- {r['model']}, {r['batch']}, {r['experts']}, {kind}: {r['reason']}\n"
    return text


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1000:.3f}"


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def _fraction(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}"


def indexer_table(records: Sequence[dict[str, Any]]) -> str:
    """A call by case, and where its time goes; with the picture, where there is one."""
    peers = read_peers()["indexer"]
    rows: list[list[str]] = []
    for r in records:
        shape = f"{r['requests']} x {r['rows_per_request']} rows, {r['heads']} heads"
        route = "" if r["route"] == "auto" else f", {r['route']}"
        known = peers if r["cache_dtype"] == "e4m3" else {}
        rows.append(
            [
                f"{r['case']}, {r['cache_dtype']}{route}: {shape}",
                _tenth(r["us"]),
                _tenth(r["floor_us"]),
                "" if r["us"] is None else f"{r['fraction_of_floor']:.2f}",
                " + ".join(_tenth(each["us"]) for each in r["launches"]),
                f"{known[r['case']]:g}" if r["case"] in known else "",
                _tenth(r["torch_bf16_us"]),
                format_bytes(r["workspace_bytes"]),
                "" if r["score_error"] is None else f"{r['score_error']:.1e}",
                "yes" if r["exact"] else "NO",
            ]
        )
    head = ["case", "us", "floor, us", "of floor", "each launch adds, us",
            "best scores, then best top-k, us", "torch bf16, us", "workspace", "score error",
            "exact"]  # fmt: skip
    text = markdown(head, rows) + f"\nBest scores, then best top-k: {peers['source']}.\n"
    if indexer_picture(records, peers, INDEXER_PICTURE) is not None:
        text += (
            "\n![Two charts against the context: microseconds, and the fraction of the floor. The "
            f"table has the numbers.](images/indexer-{INDEXER_PICTURE}.svg)\n"
        )
    return text


def _tenth(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


BENCHES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[dict[str, Any]]], str]]] = {
    "quality": (("recipe", "window", "stride", "tokens"), quality_table),
    "cpu": (("model", "prefill_tokens", "decode_steps"), cpu_table),
    "launch": (("model", "driver"), launch_table),
    "moe": (("shape", "recipe", "batch_invariant", "routing", "m"), moe_table),
    "counters": (("shape", "recipe", "m", "kernel"), counters_table),
    "indexer": (("case", "cache_dtype", "route"), indexer_table),
    "decode": (
        ("model", "layers", "recipe", "batch", "context", "experts", "graph"),
        decode_table,
    ),
    "load_memory": (
        ("layers", "experts", "hidden_size", "intermediate_size", "recipe"),
        load_memory_table,
    ),
}


def render(name: str, results: Path) -> str:
    """The text of one block."""
    keys, table = BENCHES[name]
    pick = layers if name == "moe" else newest
    records = pick(read_results(results, name), *keys)
    if not records:
        return _NOTHING
    return table(records) + sources(records)


def rewrite(text: str, results: Path) -> str:
    """The document with every block written anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}{render(m[2], results)}{m[3]}", text)


def pictures(results: Path) -> dict[str, str]:
    """The SVG text of each picture by its file's name."""
    records = layers(read_results(results, "moe"), *BENCHES["moe"][0])
    peers = read_peers()
    found = {
        f"moe-{shape}.svg": moe_picture(records, peers, shape, recipe) for shape, recipe in PICTURES
    }
    measured = newest(read_results(results, "indexer"), *BENCHES["indexer"][0])
    picture = indexer_picture(measured, peers["indexer"], INDEXER_PICTURE)
    return found if picture is None else {**found, f"indexer-{INDEXER_PICTURE}.svg": picture}


def main(root: Path) -> int:
    """Rewrite the documents and pictures of the checkout at `root`."""
    for name in DOCS:
        path = root / "docs" / name
        path.write_text(
            rewrite(path.read_text(encoding="utf-8"), root / "bench" / "results"), encoding="utf-8"
        )
    for name, text in pictures(root / "bench" / "results").items():
        path = root / "docs" / "images" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(ROOT))
