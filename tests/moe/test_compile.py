"""Shipped tables compile for both targets, within a committed budget.

The budget is what one compile gave, with a little room: a change that spills, or that takes more
registers or instructions, has to change it here, in sight.
"""

import json
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from firesteel.launch import Kernel, LaunchKey, Plan, plan
from firesteel.launch.binary import Binary, compile_all, triton_source
from firesteel.launch.key import Constexpr
from firesteel.moe.activation import Activation
from firesteel.moe.plan import KERNELS, TILES
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry

pytestmark = pytest.mark.compile

TARGETS = ("sm_90", "sm_120")
BUDGET = Path(__file__).parent / "compile_budget.json"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_TOKENS = 8192


@cache
def _shipped() -> dict[str, tuple[Kernel, LaunchKey]]:
    """What is compiled, by its name in the budget.

    Every row of three tables that differ in all that changes code, the products of two of FP4, and
    of the other named geometries those of the largest tile, which take the most registers.
    """
    stored = StoredWeights(group_size=32, has_zero_points=True)
    spec = MoeSpec(
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        w13=stored,
        w2=stored,
        dtype="fp16",
    )
    plans = {
        "glm-5.2": _plan(geometry("glm-5.2", tensor_parallel=4), "i64"),
        "gpt-oss-120b": _plan(geometry("gpt-oss-120b", group_size=64), "i64"),
        "int4-g32-asym-fp16": _plan(spec, "i32"),
        "gpt-oss-120b mxfp4": _plan(geometry("gpt-oss-120b", element="mxfp4"), "i32"),
        "glm-5.2 nvfp4": _plan(geometry("glm-5.2", tensor_parallel=4, element="nvfp4"), "i32"),
    }
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    for name in dict.fromkeys((*plans, *GEOMETRIES)):
        made = plans.get(name) or _plan(geometry(name), "i64")
        for number, key in enumerate(made.keys):
            constants = dict(key.constexprs)
            is_largest = constants.get("BLOCK_M") == TILES[-1][1].rows
            # What reads no weights is the same in every table.
            if (name in plans or is_largest) and ("ELEMENT" in constants or "fp4" not in name):
                found[f"{name} {number} {key.name}"] = (made.kernels[key.kernel], key)
    return found


def _plan(spec: MoeSpec, ids: str) -> Plan:
    return plan(spec, MAX_TOKENS, flags={"ids": [ids]})


def _usage(image: bytes, folder: Path) -> dict[str, int]:
    """Registers, spilled bytes, shared memory and instructions of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    text = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", "--dump-sass", path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    registers = re.search(r"REG:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    local = re.search(r"LOCAL:(\d+)", text)
    assert registers is not None
    assert stack is not None
    assert local is not None
    return {
        "registers": int(registers[1]),
        "spilled_bytes": int(stack[1]) + int(local[1]),
        "matrix_instructions": len(re.findall(r"\b(?:HGMMA|HMMA|QGMMA)\b", text)),
    }


def measure(target: str, folder: Path) -> dict[str, dict[str, int]]:
    """What each compiled key of `_shipped` takes, by its name in the budget."""
    shipped = _shipped()
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(shipped.values()), target, threads=2, done=binaries.__setitem__)
    assert set(binaries) == {key for _, key in shipped.values()}
    found: dict[str, dict[str, int]] = {}
    for name, (_, key) in shipped.items():
        found[name] = _usage(binaries[key].image, folder)
        found[name]["shared_bytes"] = binaries[key].shared_bytes
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_tables_compile_within_the_budget(target: str, tmp_path: Path) -> None:
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))[target]
    found = measure(target, tmp_path)
    assert set(found) == set(budget)
    over = {
        f"{row} {field}": (usage[field], budget[row][field])
        for row, usage in found.items()
        for field in ("registers", "spilled_bytes", "shared_bytes")
        if usage[field] > budget[row][field]
    }
    assert not over
    for row, usage in found.items():
        is_matrix = row.endswith(("gate_up_kernel", "down_kernel"))
        assert bool(usage["matrix_instructions"]) == is_matrix, row


def test_the_budget_lets_nothing_spill() -> None:
    rows = json.loads(BUDGET.read_text(encoding="utf-8"))
    assert set(rows) == set(TARGETS)
    for row in (row for table in rows.values() for row in table.values()):
        assert row["spilled_bytes"] == 0
        # The least that a GPU of either target has.
        assert row["shared_bytes"] <= 99 * 1024


# Of groups that every element's code takes.
STORED = StoredWeights(group_size=32)
SMALL = MoeSpec(
    hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, w13=STORED, w2=STORED
)
NVFP4 = StoredWeights.fp4("nvfp4")
# Long enough that direct programs split its sums.
LONG = replace(SMALL, hidden_size=2048)
KEY_SPECS = {
    "limited": replace(SMALL, activation=Activation(limit=2.0)),
    "mapped": replace(LONG, num_global_experts=32, weight_on_input=True),
    "swigluoai": replace(LONG, activation=Activation(name="swigluoai")),
    "relu2": replace(LONG, activation=Activation(name="relu2")),
    "nvfp4": replace(LONG, w13=NVFP4, w2=NVFP4),
}


@pytest.mark.parametrize("name", KEY_SPECS)
def test_every_constant_of_a_key_is_read_by_its_code(name: str) -> None:
    """A value that no compiled code reads must not be in a key: it would only make more keys."""
    made = plan(KEY_SPECS[name], 2000, flags={"ids": ["i32"]})
    for key in made.keys:
        kernel = made.kernels[key.kernel]
        code = _ir(kernel, key)
        for constant, value in key.constexprs:
            if value is None:
                continue
            constants = {**dict(key.constexprs), constant: _another(value)}
            changed = replace(key, constexprs=tuple(constants.items()))
            assert _ir(kernel, changed) != code, f"{constant} of {key}"


def _another(value: object) -> Constexpr:
    """Another value that the kernels accept in the same place."""
    if isinstance(value, bool):
        return not value
    if value in ("int4", "nvfp4"):
        return "mxfp4"
    if isinstance(value, str):
        return "silu" if value != "silu" else "situ"
    assert isinstance(value, int | float)
    return value * 2


def _ir(kernel: Kernel, key: LaunchKey) -> str:
    """Triton's first representation of a key: what its code says, before any optimisation."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": key.num_warps, "num_stages": key.num_stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = triton_source(kernel, key).make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    return str(module)


def test_what_is_compiled_covers_what_changes_code() -> None:
    keys = [key for _, key in _shipped().values()]
    assert {key.kernel for key in keys} == {kernel.name for kernel in KERNELS}
    products = [key for key in keys if key.name in ("gate_up_kernel", "down_kernel")]
    for name in ("gate_up_kernel", "down_kernel"):
        found = [key for key in products if key.name == name]
        constants = [dict(key.constexprs) for key in found]
        arguments = [dict(key.arguments) for key in found]
        assert {each["BLOCK_M"] for each in constants} == {tile.rows for _, tile in TILES}
        assert {each["GROUP_SIZE"] for each in constants} >= {32, 64, 128}
        for pointer in ("zero_points_ptr", "bias_ptr", "route_ids_ptr"):
            assert {pointer in each for each in arguments} == {True, False}
        # Of fp16 and bf16, and of FC2's input as of FC1's.
        inputs = {each.get("x_ptr", each.get("hidden_ptr")) for each in arguments}
        assert inputs == {"*fp16@16", "*bf16@16"}
    assert {"partials_ptr" in dict(key.arguments) for key in products} == {True, False}
