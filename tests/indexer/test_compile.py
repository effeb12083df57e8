"""One key of each kernel compiles for both targets, within a committed budget.

    python -m tests.indexer.test_compile

prints what each takes, and with `--write` makes that the budget. Needs no GPU.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from firesteel.indexer.launches import KERNELS
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import Kernel, LaunchKey, plan
from firesteel.launch.binary import Binary, compile_all
from tests.moe.test_compile import CUOBJDUMP, TARGETS

pytestmark = pytest.mark.compile

BUDGET = Path(__file__).parent / "compile_budget.json"
# Of a matrix product of e4m3: Hopper's for a warp group, and that of one warp.
MATRIX = {"sm_90": "QGMMA", "sm_120": "QMMA"}
MATRIX_16 = {"sm_90": "HGMMA", "sm_120": "HMMA"}
Usage = dict[str, int]


def shipped(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """The last key of each kernel in plans of the turnkey decode, GLM-5.2's prefill, and pages.

    Those that read or write 16-bit keys have their type behind the name.
    """
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    turnkey = DecodeSpec(num_heads=32, top_k=2048, rows=6, width=2048)
    for spec in (
        PageWriterSpec(dtype="fp32", cache_dtype="bf16"),
        replace(turnkey, cache_dtype="bf16", page_stride=0),
        PageWriterSpec(dtype="fp32"),
        turnkey,
        PrefillSpec(num_heads=32, top_k=2048, num_keys=131072),
    ):
        made = plan(spec.for_target(target), 8)
        for key in made.keys:
            has_keys = "values_ptr" in dict(key.arguments)
            end = f" {spec.cache_dtype}" if has_keys and spec.cache_dtype != "e4m3" else ""
            found[key.name + end] = (made.kernels[key.kernel], key)
    return found


def usage_of(image: bytes, folder: Path) -> tuple[Usage, str]:
    """Registers and spilled bytes of a cubin, and its instructions."""
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    text = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    numbers = {name: re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK")}
    registers, stack = (int(found[1]) if found else -1 for found in numbers.values())
    return {"registers": registers, "spilled_bytes": stack}, text


def measure(target: str, folder: Path) -> dict[str, tuple[Usage, str]]:
    """What each key takes, and its instructions."""
    keys = shipped(target)
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(keys.values()), target, threads=2, done=binaries.__setitem__)
    found = {}
    for name, (_, key) in keys.items():
        usage, text = usage_of(binaries[key].image, folder)
        found[name] = (usage | {"shared_bytes": binaries[key].shared_bytes}, text)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_compiles_within_the_budget(target: str, tmp_path: Path) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))[target]
    found = measure(target, tmp_path)
    assert {kernel.name.rpartition(".")[2] for kernel in KERNELS} == {
        name.partition(" ")[0] for name in found
    }
    assert set(found) == set(budget)
    for name, (usage, text) in found.items():
        assert all(usage[field] <= budget[name][field] for field in usage), (name, usage)
        # A product of e4m3 that was widened first would be another instruction.
        is_half = name.endswith("bf16")
        for instruction, is_own in ((MATRIX, not is_half), (MATRIX_16, is_half)):
            has_product = re.search(rf"\b{instruction[target]}\b", text) is not None
            assert has_product == (is_own and name.startswith(("decode_scores", "stream"))), name
        # The next launch may come early, and so each waits before it reads or writes anything.
        first = re.search(r"\b(LDG|STG|LDGSTS|ATOMG)\b", text)
        assert first is not None
        assert text.index("PREEXIT") < text.index("ACQBULK") < first.start(), name
        # relu keeps a NaN, so that its key is never selected; no maximum of numbers drops one.
        if name.startswith(("decode_scores", "stream")):
            assert re.search(r"\bFMNMX\.NAN\b", text), name
            assert not re.search(r"\bFMNMX\b(?!\.NAN)", text), name


def main() -> int:
    tables: dict[str, dict[str, Usage]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for target in TARGETS:
            measured = measure(target, Path(folder))
            tables[target] = {name: usage for name, (usage, _) in measured.items()}
    text = json.dumps(tables, indent=1) + "\n"
    sys.stdout.write(text)
    if "--write" in sys.argv[1:]:
        BUDGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
