"""Peak resident bytes while a checkpoint loads, against the bound that firesteel promises.

    python bench/load_memory.py [--layers 8 --experts 32 --hidden 2048 --intermediate 512]

    peak <= experts packed + one layer's experts in bf16 + what the host itself needs

Two checkpoints of one geometry are written: one quantised, one in bf16 with a single narrow expert
a layer, which stands for the host's own part. A process of its own loads each: firesteel the first,
transformers alone the second. Each imports the same modules, notes what is resident, resets the
kernel's high-water mark, loads, and reads the mark (VmHWM, exact). A thread samples RssAnon and
RssFile on the way to say what the peak is made of. Linux only. Exits with 1 if the bound is broken.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from firesteel.cli.bench.records import context, writer
from firesteel.cli.bench.synthetic import Shape, write_checkpoint, write_plain_checkpoint

_SAMPLE_SECONDS = 0.002
# One expert of one channel block: the host's part of a layer and next to nothing else.
_NARROW = 128


def read_status() -> dict[str, int]:
    """Resident bytes of this process: VmRSS, VmHWM, RssAnon, RssFile."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM", "RssAnon", "RssFile"}:
            found[name] = 1024 * int(value.split()[0])
    return found


class Sampler(threading.Thread):
    """Notes the most of anonymous and file-backed memory that it sees."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = {"RssAnon": 0, "RssFile": 0}
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stop_event.wait(_SAMPLE_SECONDS):
            status = read_status()
            for name in self.peak:
                self.peak[name] = max(self.peak[name], status[name])

    def stop(self) -> None:
        """Stop sampling and wait for the last sample."""
        self._stop_event.set()
        self.join()


def load_here(folder: Path, *, by_firesteel: bool) -> dict[str, int]:
    """Load in this process; bytes above what was resident before."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe import modeling_qwen3_moe
    from transformers.utils import logging

    from firesteel.integrations.transformers import load_model

    del modeling_qwen3_moe
    logging.disable_progress_bar()
    before = read_status()
    # Resets VmHWM to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    sampler = Sampler()
    sampler.start()
    if by_firesteel:
        model = load_model(folder, device="cpu")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    sampler.stop()
    after = read_status()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return {
        "model_bytes": own,
        "before_bytes": before["VmRSS"],
        "peak_bytes": after["VmHWM"] - before["VmRSS"],
        "after_bytes": after["VmRSS"] - before["VmRSS"],
        "peak_anonymous_bytes": sampler.peak["RssAnon"] - before["RssAnon"],
        "peak_file_bytes": sampler.peak["RssFile"] - before["RssFile"],
    }


def load_in_child(folder: Path, *, by_firesteel: bool) -> dict[str, int]:
    """`load_here` in a fresh process."""
    loader = "firesteel" if by_firesteel else "transformers"
    command = [sys.executable, str(Path(__file__)), "--child", loader, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure(shape: Shape, recipe: str) -> dict[str, Any]:
    """The record of one geometry."""
    # Before the run: the commit of the code in memory, and the load that is not ours.
    made_by = context(torch.device("cpu"))
    narrow = replace(shape, num_experts=1, top_k=1, intermediate_size=_NARROW)
    with tempfile.TemporaryDirectory(prefix="firesteel-") as scratch:
        full, host = Path(scratch, "full"), Path(scratch, "host")
        full.mkdir()
        host.mkdir()
        packed = write_checkpoint(full, shape, recipe)
        write_plain_checkpoint(host, narrow)
        ours = load_in_child(full, by_firesteel=True)
        theirs = load_in_child(host, by_firesteel=False)
    # What the one narrow expert takes is not the host's own need.
    host_bytes = theirs["peak_bytes"] - shape.num_layers * narrow.layer_bf16_bytes
    bound = packed + shape.layer_bf16_bytes + host_bytes
    return {
        "bench": "load_memory",
        "recipe": recipe,
        "layers": shape.num_layers,
        "experts": shape.num_experts,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "packed_bytes": packed,
        "layer_bf16_bytes": shape.layer_bf16_bytes,
        "all_bf16_bytes": shape.num_layers * shape.layer_bf16_bytes,
        "host_bytes": host_bytes,
        "bound_bytes": bound,
        "peak_bytes": ours["peak_bytes"],
        "above_packed_and_host_bytes": ours["peak_bytes"] - packed - host_bytes,
        "passed": ours["peak_bytes"] <= bound,
        "firesteel": ours,
        "transformers": theirs,
        **made_by,
    }


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--recipe", default="int4-g128")
    parser.add_argument("--out", type=Path, help="also append the line to a file")
    parser.add_argument("--child", nargs=2, metavar=("LOADER", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measure and print one JSON line; 0 if the bound holds."""
    options = parse()
    if options.child is not None:
        loader, folder = options.child
        print(json.dumps(load_here(Path(folder), by_firesteel=loader == "firesteel")))
        return 0
    shape = Shape(
        num_layers=options.layers,
        num_experts=options.experts,
        top_k=options.top_k,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
    )
    with writer(options.out, as_json=True) as write:
        record = measure(shape, options.recipe)
        write(record)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
