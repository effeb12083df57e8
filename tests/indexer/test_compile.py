"""One key of each kernel compiles for both targets, within a committed budget.

    python -m tests.indexer.test_compile

prints what each takes, and with `--write` makes that the budget. Needs no GPU.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from firesteel.indexer.launches import HOPPER, KERNELS
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import Kernel, LaunchKey, plan
from firesteel.launch.binary import Binary, compile_all
from tests.moe.sass import Instruction, disassemble
from tests.moe.test_compile import TARGETS, resources

pytestmark = pytest.mark.compile

BUDGET = Path(__file__).parent / "compile_budget.json"
# Of a matrix product of e4m3: Hopper's for a warp group, and that of one warp.
MATRIX = {"sm_90": "QGMMA", "sm_120": "QMMA"}
MATRIX_16 = {"sm_90": "HGMMA", "sm_120": "HMMA"}
# What reads or writes memory that other launches do.
GLOBAL = ("LDG", "STG", "LDGSTS", "ATOMG")
# Tells the loop of a kernel that matters: its products, or else the sums of a search.
OF_LOOP = ("QGMMA", "QMMA", "HGMMA", "HMMA", "REDUX")
Usage = dict[str, int]


def shipped(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """The last key of each kernel in plans of the turnkey decode, GLM-5.2's prefill, and pages.

    Those that read or write 16-bit keys have their type behind the name, selections of few rows
    and of many their warps.
    """
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    turnkey = DecodeSpec(num_heads=32, top_k=2048, rows=6, width=2048)
    prefill = PrefillSpec(num_heads=32, top_k=2048, num_keys=131072)
    for spec in (
        PageWriterSpec(dtype="fp32", cache_dtype="bf16"),
        replace(turnkey, cache_dtype="bf16", page_stride=0),
        PageWriterSpec(dtype="fp32"),
        replace(turnkey, is_filtered=False),
        *(turnkey, prefill),
        *(replace(turnkey, wgmma=False), replace(prefill, wgmma=False)),
    ):
        own = spec.for_target(target)
        if not getattr(spec, "wgmma", True):
            own = replace(own, wgmma=False)
        # Of prefill so many rows that all selections of few and of many are there.
        made = plan(own, 160 if isinstance(spec, PrefillSpec) else 8)
        for key in made.keys:
            has_keys = "values_ptr" in dict(key.arguments)
            end = f" {spec.cache_dtype}" if has_keys and spec.cache_dtype != "e4m3" else ""
            if key.name in ("filter_kernel", "range_select_kernel"):
                end = f" {key.num_warps} warps"
            found[key.name + end] = (made.kernels[key.kernel], key)
    return found


def measure(target: str, folder: Path) -> dict[str, tuple[Usage, list[Instruction]]]:
    """What each key takes, and its instructions."""
    keys = shipped(target)
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(keys.values()), target, threads=2, done=binaries.__setitem__)
    found = {name: binaries[key] for name, (_, key) in keys.items()}
    codes = disassemble([each.image for each in found.values()], target, folder)
    usages = {}
    for (name, each), code in zip(found.items(), codes, strict=True):
        usage = resources(each.image, folder) | {"shared_bytes": each.shared_bytes}
        usages[name] = (usage | {"loop_instructions": loop_instructions(code)}, code)
    return usages


def loop_instructions(code: list[Instruction]) -> int:
    """Of the first, innermost loop that has one of OF_LOOP; 0 where there is none."""
    loops = [
        [each for each in code if last.target <= each.address <= last.address]
        for last in code
        if last.target is not None and last.target <= last.address
    ]
    for kind in OF_LOOP:
        sizes = [
            len(loop) for loop in loops if any(each.name.partition(".")[0] == kind for each in loop)
        ]
        if sizes:
            return min(sizes)
    return 0


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_compiles_within_the_budget(target: str, tmp_path: Path) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))[target]
    found = measure(target, tmp_path)
    kernels = set(KERNELS) - (set(HOPPER) if target != "sm_90" else set())
    assert {kernel.name.rpartition(".")[2] for kernel in kernels} == {
        name.partition(" ")[0] for name in found
    }
    assert set(found) == set(budget)
    for name, (usage, code) in found.items():
        assert all(usage[field] <= budget[name][field] for field in usage), (name, usage)
        names = [each.name for each in code]
        kinds = [each.partition(".")[0] for each in names]
        # A product of e4m3 that was widened first would be another instruction.
        is_half, is_product = (
            name.endswith("bf16"),
            name.startswith(("decode_scores", "range_scores")),
        )
        for instruction, is_own in ((MATRIX, not is_half), (MATRIX_16, is_half)):
            assert (instruction[target] in kinds) == (is_own and is_product), name
        # The next launch may come early, and so each waits before it reads or writes anything.
        first = next(at for at, kind in enumerate(kinds) if kind in GLOBAL)
        assert kinds.index("PREEXIT") < kinds.index("ACQBULK") < first, name
        # relu keeps a NaN, so that its key is never selected; no maximum of numbers drops one.
        maxima = [each for each in names if each.startswith("FMNMX")]
        if is_product:
            assert bool(maxima) == is_half, name
            assert all("NAN" in each.split(".") for each in maxima), name
        # Products that the assembler has serialised would each have a wait of their own.
        if name.endswith("_wgmma_kernel"):
            assert kinds.count("QGMMA") == 16, name
            assert names.count("WARPGROUP.DEPBAR.LE") == 4, name


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
