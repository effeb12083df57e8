"""Shipped tables compile for both targets, within a committed budget.

The budget is what one compile gave, with a little room: a change that spills, or that takes more
registers or instructions, has to change it here, in sight. `tests/moe/compile_budget.py` prints
what each key takes, and writes the budget.
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
from firesteel.moe.plan import KERNELS
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import TileTable
from firesteel.moe.tuning_file import shipped_tables
from tests.moe.sass import weigh

pytestmark = pytest.mark.compile

TARGETS = ("sm_90", "sm_120")
BUDGET = Path(__file__).parent / "compile_budget.json"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_TOKENS = 8192
# What is limited; the last of matrix kernels alone.
LIMITED = ("registers", "spilled_bytes", "shared_bytes", "instructions_a_weight")


@cache
def _shipped() -> dict[str, tuple[Kernel, LaunchKey]]:
    """What is compiled, by its name in the budget.

    Every row of every table that ships, for the shape that it was measured for; every key of three
    plans that differ in all that changes code; of two of FP4 the products; and of the other named
    geometries the products of the largest tile, which take the most registers.
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
    for table in shipped_tables().values():
        plans |= _plans_of(table)
    known: set[LaunchKey] = set()
    for name in dict.fromkeys((*plans, *GEOMETRIES)):
        made = plans.get(name) or _plan(geometry(name), "i64")
        assert isinstance(made.spec, MoeSpec)
        largest = max(tile.rows for _, tile in made.spec.tiles.sorted)
        for number, key in enumerate(made.keys):
            constants = dict(key.constexprs)
            is_largest = constants.get("BLOCK_M") == largest
            # What reads no weights is the same in every table.
            is_wanted = name in plans and ("ELEMENT" in constants or "fp4" not in name)
            if key not in known and (is_wanted or is_largest):
                found[f"{name} {number} {key.name}"] = (made.kernels[key.kernel], key)
                known.add(key)
    return found


def _plans_of(table: TileTable) -> dict[str, Plan]:
    """Of each shape of a table, a plan that reaches every sorted row and the direct one, and one
    that is batch invariant."""
    found: dict[str, Plan] = {}
    for shape in table.shapes:
        size, _, asym = shape.recipe.removeprefix("int4-g").partition("-")
        stored = StoredWeights(group_size=int(size), has_zero_points=bool(asym))
        spec = MoeSpec(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=256,
            top_k=8,
            w13=stored,
            w2=stored,
            table=table,
        )
        title = f"{table.name} K={shape.hidden_size} N={shape.intermediate_size} {shape.recipe}"
        found[title] = _plan(spec, "i64")
        found[f"{title} batch_invariant"] = _plan(replace(spec, batch_invariant=True), "i64")
    return found


def test_every_row_of_every_table_is_compiled() -> None:
    keys = [key for _, key in _shipped().values()]
    for table in shipped_tables().values():
        for row in table.rows:
            (k, n, recipe), tile = row.shape, row.tile
            fitting = [
                key
                for key in keys
                if (constants := dict(key.constexprs)).get("BLOCK_M") == tile.rows
                and (constants["K"], constants["N"]) == (k, n)
                and f"int4-g{constants['GROUP_SIZE']}" == recipe.removesuffix("-asym")
                and (constants["E"] is not None) == (row.mode == "direct")
            ]
            cuts = {
                (key.name, dict(key.constexprs)["BLOCK_N"], key.num_warps, key.num_stages)
                for key in fitting
            }
            gate_up, down = tile.gate_up, tile.down
            assert ("gate_up_kernel", *gate_up) in cuts, row
            assert ("down_kernel", down.rows, down.warps, down.stages) in cuts, row


def _plan(spec: MoeSpec, ids: str) -> Plan:
    return plan(spec, MAX_TOKENS, flags={"ids": [ids]})


def is_matrix(key: LaunchKey) -> bool:
    return key.name in ("gate_up_kernel", "down_kernel")


def _usage(image: bytes, key: LaunchKey, folder: Path) -> dict[str, float]:
    """Registers, spilled bytes and instructions of a cubin."""
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
    found: dict[str, float] = {
        "registers": int(registers[1]),
        "spilled_bytes": int(stack[1]) + int(local[1]),
        "matrix_instructions": len(re.findall(r"\b(?:HGMMA|HMMA|QGMMA)\b", text)),
    }
    if is_matrix(key):
        turn = weigh(text, key)
        found["turn_instructions"] = turn.instructions
        found["turn_blocks"] = turn.blocks
        found["instructions_a_weight"] = turn.instructions_a_weight
    return found


def measure(target: str, folder: Path, prefix: str = "") -> dict[str, dict[str, float]]:
    """What each compiled key of `_shipped` takes, by its name in the budget; those of a prefix."""
    shipped = {name: each for name, each in _shipped().items() if name.startswith(prefix)}
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(shipped.values()), target, threads=2, done=binaries.__setitem__)
    assert set(binaries) == {key for _, key in shipped.values()}
    found: dict[str, dict[str, float]] = {}
    for name, (_, key) in shipped.items():
        found[name] = _usage(binaries[key].image, key, folder)
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
        for field in LIMITED
        if field in usage and usage[field] > budget[row][field]
    }
    assert not over
    for row, (_, key) in _shipped().items():
        assert bool(found[row]["matrix_instructions"]) == is_matrix(key), row


def test_the_budget_limits_each_row_and_lets_nothing_spill() -> None:
    rows = json.loads(BUDGET.read_text(encoding="utf-8"))
    assert set(rows) == set(TARGETS)
    keys = {name: key for name, (_, key) in _shipped().items()}
    for name, row in ((name, row) for table in rows.values() for name, row in table.items()):
        assert tuple(row) == LIMITED[: None if is_matrix(keys[name]) else -1]
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
    products = [key for key in keys if is_matrix(key)]
    for name in ("gate_up_kernel", "down_kernel"):
        found = [key for key in products if key.name == name]
        constants = [dict(key.constexprs) for key in found]
        arguments = [dict(key.arguments) for key in found]
        tiles = geometry("glm-5.2", tensor_parallel=4).tiles
        assert {each["BLOCK_M"] for each in constants} >= {tile.rows for _, tile in tiles.sorted}
        assert {each["GROUP_SIZE"] for each in constants} >= {32, 64, 128}
        for pointer in ("zero_points_ptr", "bias_ptr", "route_ids_ptr"):
            assert {pointer in each for each in arguments} == {True, False}
        # Of fp16 and bf16, and of FC2's input as of FC1's.
        inputs = {each.get("x_ptr", each.get("hidden_ptr")) for each in arguments}
        assert inputs == {"*fp16@16", "*bf16@16"}
    assert {"partials_ptr" in dict(key.arguments) for key in products} == {True, False}
