"""One key of each kernel compiles for both targets, within a committed budget.

    python -m tests.indexer.test_compile

prints what each takes, and with `--write` makes that the budget. Needs no GPU.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from firesteel.indexer.launches import KERNELS
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import Kernel, LaunchKey, plan
from firesteel.launch.binary import Binary, compile_all
from tests.moe.sass import Instruction, disassemble
from tests.moe.test_compile import TARGETS, resources

pytestmark = pytest.mark.compile

BUDGET = Path(__file__).parent / "compile_budget.json"
# Of a matrix product of e4m3: Hopper's for a warp group, and that of one warp.
MATRIX = {"sm_90": "QGMMA", "sm_120": "QMMA"}
Usage = dict[str, int]


def shipped(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """The last key of each kernel in plans of the turnkey decode, GLM-5.2's prefill, and pages."""
    specs = (
        PageWriterSpec(),
        DecodeSpec(num_heads=32, top_k=2048, rows=6, width=2048),
        PrefillSpec(num_heads=32, top_k=2048, num_keys=131072),
    )
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    for spec in specs:
        made = plan(spec.for_target(target), 8)
        found |= {key.name: (made.kernels[key.kernel], key) for key in made.keys}
    return found


def measure(target: str, folder: Path) -> dict[str, tuple[Usage, list[Instruction]]]:
    """What each key takes, and its instructions."""
    keys = shipped(target)
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(keys.values()), target, threads=2, done=binaries.__setitem__)
    found = {name: binaries[key] for name, (_, key) in keys.items()}
    codes = disassemble([each.image for each in found.values()], target, folder)
    return {
        name: (resources(each.image, folder) | {"shared_bytes": each.shared_bytes}, code)
        for (name, each), code in zip(found.items(), codes, strict=True)
    }


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_compiles_within_the_budget(target: str, tmp_path: Path) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))[target]
    found = measure(target, tmp_path)
    assert {kernel.name.rpartition(".")[2] for kernel in KERNELS} == set(found) == set(budget)
    for name, (usage, code) in found.items():
        assert all(usage[field] <= budget[name][field] for field in usage), (name, usage)
        # A product of e4m3 that was widened first would be another instruction.
        has_product = any(each.name.startswith(f"{MATRIX[target]}.") for each in code)
        assert has_product == name.startswith(("decode_scores", "stream")), name


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
