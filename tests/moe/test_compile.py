"""Shipped tables compile for both targets, within a committed budget.

The budget is what one compile gave, with a little room: a change that spills, or that takes more
registers or instructions, has to change it here, in sight. `tests/moe/compile_budget.py` prints
what each key takes, and writes the budget.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from firesteel.launch import Kernel, LaunchKey
from firesteel.launch.binary import Binary, compile_all, supports_wgmma, triton_source
from firesteel.launch.key import Constexpr
from firesteel.moe.activate import activate_kernel
from firesteel.moe.activation import Activation
from firesteel.moe.plan import KERNELS
from firesteel.moe.products import PRODUCT_KERNELS
from firesteel.moe.spec import GEOMETRIES, MoeSpec, StoredWeights, geometry
from firesteel.moe.tuning import Row, TileTable, recipe_name
from firesteel.moe.tuning_file import shipped_tables
from tests.moe.sass import TOOLS, Instruction, disassemble, waits_of, weigh
from tests.moe.tiles import keys_of
from tests.moe.trellis.compiled import PRODUCTS, trellis_keys

pytestmark = pytest.mark.compile

TARGETS = ("sm_90", "sm_120")
# Of a block, at most.
SHARED_KIB = {"sm_90": 227, "sm_120": 99}
# Rows that spill a few registers, none of them in a loop that multiplies: once a row block, or once
# a program. On sm_90 the products take tiles that were measured for groups of 128, which leave no
# register for the scales of more groups; on sm_120 sums of 16 spans are all loaded before any is
# added, which nobody has measured.
SPILLING = {
    "sm_90": (
        "gpt-oss-120b 14 down_wgmma_kernel",
        "int4-g32-asym-fp16 14 down_wgmma_kernel",
        "gpt-oss-120b 12 scatter_kernel",
        "int4-g32-asym-fp16 12 scatter_kernel",
    ),
    "sm_120": ("exl3 glm-5.2 M=1 2 act_kernel", "exl3 linear M=8 2 finish_kernel"),
}
# What a name ends in where a layer does without the kernels of one target alone: of tables every
# shape, since theirs hide rows for the others; of the rest one, for what reads no weights.
PLAIN = " no wgmma"
PLAIN_OF = "glm-5.2"
BUDGET = Path(__file__).parent / "compile_budget.json"
MAX_TOKENS = 8192
KERNEL_OF = {kernel.name: kernel for kernel in KERNELS}
MATRIX_KERNELS = {each.name for each in PRODUCT_KERNELS} - {
    f"{activate_kernel.__module__}.activate_kernel"
}
# What is limited; the last of the products of layers alone.
LIMITED = ("registers", "spilled_bytes", "shared_bytes", "instructions_a_weight")


@cache
def _compiled(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """All that is compiled for a target, by its name in the budget."""
    return {**_shipped(target), **trellis_keys(target)}


@cache
def _shipped(target: str) -> dict[str, tuple[Kernel, LaunchKey]]:
    """What is compiled for a target, by its name in the budget.

    Every row of every table that ships, for the shape that it was measured for; every key of three
    plans that differ in all that changes code; of two of FP4 the products, of one of NF3 those of
    small tiles; and of the other named geometries the products of the largest tile, which take the
    most registers. Where the target has kernels of its own, one also as it is without them, since
    not all weights are read by those.
    """
    stored = StoredWeights(group_size=32, has_zero_points=True, scale="fp16")
    fp16 = MoeSpec(
        hidden_size=2048,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        w13=stored,
        w2=stored,
        dtype="fp16",
    )
    whole = {
        "glm-5.2": (geometry("glm-5.2", tensor_parallel=4), "i64"),
        "gpt-oss-120b": (geometry("gpt-oss-120b", group_size=64), "i64"),
        "int4-g32-asym-fp16": (fp16, "i32"),
        "gpt-oss-120b mxfp4": (geometry("gpt-oss-120b", element="mxfp4"), "i32"),
        "glm-5.2 nvfp4": (geometry("glm-5.2", tensor_parallel=4, element="nvfp4"), "i32"),
        "glm-5.2 nf3": (geometry("glm-5.2", tensor_parallel=4, element="nf3"), "i32"),
    }
    for table in shipped_tables().values():
        whole |= {name: (spec, "i64") for name, spec in _specs_of(table).items()}
    others = {name: (geometry(name), "i64") for name in GEOMETRIES if name not in whole}
    found: dict[str, tuple[Kernel, LaunchKey]] = {}
    known: set[LaunchKey] = set()
    for name, (spec, ids) in _variants({**whole, **others}, target).items():
        keys = keys_of(spec, MAX_TOKENS, [ids])
        constants = {key: dict(key.constexprs) for key in keys}
        largest = max(each.get("BLOCK_M", 0) for each in constants.values())
        for number, key in enumerate(keys):
            is_largest = constants[key].get("BLOCK_M") == largest
            # What reads no weights is the same in every table.
            is_wanted = is_matrix(key) or "fp4" not in name
            if name.endswith("nf3"):
                is_wanted = constants[key].get("BLOCK_M") in ((8, 64) if spec.wgmma else (8,))
            is_whole = name.removesuffix(PLAIN) in whole
            if key not in known and (is_wanted if is_whole else is_largest):
                found[f"{name} {number} {key.name}"] = (KERNEL_OF[key.kernel], key)
                known.add(key)
    return found


def _variants(
    specs: Mapping[str, tuple[MoeSpec, str]], target: str
) -> dict[str, tuple[MoeSpec, str]]:
    """The layers as they are on a target; after them without the kernels that only it has."""
    found = {name: (spec.for_target(target), ids) for name, (spec, ids) in specs.items()}
    of_tables = tuple(f"{name} K=" for name in shipped_tables())
    plain = {
        f"{name}{PLAIN}": (replace(spec, wgmma=False), ids)
        for name, (spec, ids) in found.items()
        if spec.wgmma and (name == PLAIN_OF or name.startswith(of_tables))
    }
    return {**found, **plain}


def _specs_of(table: TileTable) -> dict[str, MoeSpec]:
    """Of each shape of a table, a layer whose plan reaches every row, and one that is batch
    invariant."""
    found: dict[str, MoeSpec] = {}
    for shape in table.shapes:
        size, _, asym = shape.recipe.removeprefix("int4-g").partition("-")
        if shape.recipe.startswith("int4"):
            stored = StoredWeights(group_size=int(size), has_zero_points=bool(asym))
        else:
            stored = StoredWeights.fp4(shape.recipe)
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
        found[title] = spec
        found[f"{title} batch_invariant"] = replace(spec, batch_invariant=True)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_of_every_table_is_compiled(target: str) -> None:
    keys = [key for _, key in _shipped(target).values()]
    for table in shipped_tables().values():
        for row in table.rows:
            if row.mode == "wgmma" and not supports_wgmma(target):
                continue
            fitting = [key for key in keys if is_matrix(key) and _fits(key, row)]
            cuts = {_cut(key) for key in fitting}
            # Which of Hopper's own kernels, their rows say.
            kind = "" if row.mode != "wgmma" else "_stream" if row.tile.rows <= 16 else "_wgmma"
            columns, *gate_up = row.tile.gate_up
            rows, span, *down = row.tile.down
            assert (f"gate_up{kind}_kernel", columns, None, *gate_up) in cuts, row
            assert (f"down{kind}_kernel", rows, span, *down) in cuts, row


def _fits(key: LaunchKey, row: Row) -> bool:
    """Whether a product is of a row's shape, mode and rows."""
    constants, arguments = dict(key.constexprs), dict(key.arguments)
    element = str(constants.get("ELEMENT", "int4"))
    group_size = constants["GROUP_SIZE"]
    assert isinstance(group_size, int)
    recipe = recipe_name(element, group_size, "zero_points_ptr" in arguments)
    is_mode = row.mode == "wgmma" or ("topk_ids_ptr" in arguments) == (row.mode == "direct")
    sizes = (constants["K"], constants["N"], constants["BLOCK_M"])
    return is_mode and (*sizes, recipe) == (*row.shape[:2], row.tile.rows, row.shape.recipe)


def _cut(key: LaunchKey) -> tuple[object, ...]:
    """How a product cuts the layer: kernel, columns, span, warps and stages."""
    constants = dict(key.constexprs)
    stages = constants.get("STAGES", key.num_stages)
    return (key.name, constants["BLOCK_N"], constants.get("SPAN"), key.num_warps, stages)


def is_matrix(key: LaunchKey) -> bool:
    return key.kernel in MATRIX_KERNELS


def is_weighed(key: LaunchKey) -> bool:
    """Whether it multiplies by a layer's weights; EXL3's other kernels do by Hadamard matrices."""
    return is_matrix(key) or key.kernel in PRODUCTS


def resources(image: bytes, folder: Path) -> dict[str, int]:
    """Registers and spilled bytes of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", path]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return {"registers": found["REG"], "spilled_bytes": found["STACK"] + found["LOCAL"]}


def _instructions(code: Sequence[Instruction], key: LaunchKey) -> dict[str, float]:
    """How many a kernel has of those that multiply, and of all in a turn of its main loop."""
    names = [each.name.partition(".")[0] for each in code]
    found: dict[str, float] = {
        "matrix_instructions": sum(name in ("HGMMA", "HMMA", "QGMMA") for name in names)
    }
    if key.name.endswith("_wgmma_kernel"):
        found["waits"], found["matrix_instructions"] = waits_of(code)
    if is_weighed(key):
        turn = weigh(code, key)
        found["turn_instructions"] = turn.instructions
        found["turn_blocks"] = turn.blocks
        found["turn_spills"] = turn.spills
        found["instructions_a_weight"] = turn.instructions_a_weight
    return found


def measure(target: str, folder: Path, prefix: str = "") -> dict[str, dict[str, float]]:
    """What each compiled key of `_compiled` takes, by its name in the budget; those of a prefix."""
    shipped = {name: each for name, each in _compiled(target).items() if name.startswith(prefix)}
    binaries: dict[LaunchKey, Binary] = {}
    compile_all(list(shipped.values()), target, threads=2, done=binaries.__setitem__)
    assert set(binaries) == {key for _, key in shipped.values()}
    keys = {name: key for name, (_, key) in shipped.items()}
    codes = disassemble([binaries[key].image for key in keys.values()], target, folder)
    return {
        name: {
            **resources(binaries[key].image, folder),
            **_instructions(code, key),
            "shared_bytes": binaries[key].shared_bytes,
        }
        for (name, key), code in zip(keys.items(), codes, strict=True)
    }


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
    for row, (_, key) in _compiled(target).items():
        multiplies = is_matrix(key) or row.startswith("exl3")
        assert bool(found[row]["matrix_instructions"]) == multiplies, row
        assert not found[row].get("turn_spills"), row
        # Products that ptxas has serialised would each have a wait; the source has one for two.
        if "waits" in found[row]:
            assert 0 < 2 * found[row]["waits"] <= found[row]["matrix_instructions"], row
    assert any("waits" in usage for usage in found.values()) == supports_wgmma(target)


def test_the_budget_limits_each_row_and_lets_only_what_is_named_spill() -> None:
    rows = json.loads(BUDGET.read_text(encoding="utf-8"))
    assert set(rows) == set(TARGETS)
    for target, table in rows.items():
        keys = {name: key for name, (_, key) in _compiled(target).items()}
        for name, row in table.items():
            assert tuple(row) == LIMITED[: None if is_weighed(keys[name]) else -1]
            may_spill = name in SPILLING[target]
            assert (row["spilled_bytes"] > 0) == may_spill, name
            assert row["shared_bytes"] <= 1024 * SHARED_KIB[target]
            # What any GPU may run has no more than the least of them.
            if "_wgmma_" not in name:
                assert row["shared_bytes"] <= 1024 * min(SHARED_KIB.values())


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


@cache
def _forms() -> Mapping[object, tuple[Kernel, LaunchKey]]:
    """Of the plans of all of these one key for each form.

    Keys of a form have the same pointers and differ in sizes, such as those of a tile, of which
    neither or both are 1: their code takes the same branches.
    """
    found: dict[object, tuple[Kernel, LaunchKey]] = {}
    for spec in KEY_SPECS.values():
        for target in TARGETS:
            # Of more than 4096 routes two more kernels sort them.
            for key in keys_of(spec.for_target(target), 2100, ["i32"]):
                kinds = tuple(
                    (name, value == 1 if type(value) in (int, float) else value)
                    for name, value in key.constexprs
                )
                form = (key.kernel, key.arguments, kinds)
                found.setdefault(form, (KERNEL_OF[key.kernel], key))
    return found


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.rpartition(".")[2])
def test_every_constant_of_a_key_is_read_by_its_code(kernel: Kernel) -> None:
    """A value that no compiled code reads must not be in a key: it would only make more keys."""
    keys = [key for known, key in _forms().values() if known is kernel]
    assert keys
    for key in keys:
        code = first_ir(kernel, key)
        for constant, value in key.constexprs:
            if constant == "WARPS":
                # Layouts of any other number are refused, so that it makes no key of its own.
                assert value == key.num_warps
                continue
            if value is None:
                continue
            constants = {**dict(key.constexprs), constant: _another(value)}
            changed = replace(key, constexprs=tuple(constants.items()))
            assert first_ir(kernel, changed) != code, f"{constant} of {key}"


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


def first_ir(kernel: Kernel, key: LaunchKey) -> str:
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


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_covers_what_changes_code(target: str) -> None:
    keys = [key for _, key in _shipped(target).values()]
    kernels = {kernel.name for kernel in KERNELS}
    if not supports_wgmma(target):
        kernels -= {name for name in kernels if name.endswith(("_stream_kernel", "_wgmma_kernel"))}
    assert {key.kernel for key in keys} == kernels
    products = [key for key in keys if is_matrix(key)]
    tiles = geometry("glm-5.2", tensor_parallel=4).tiles
    hoppers = {tile.rows for *_, tile in tiles.wgmma}
    rows_of = {
        "": {tile.rows for _, tile in tiles.sorted},
        "_stream": {rows for rows in hoppers if rows <= 16},
        "_wgmma": {rows for rows in hoppers if rows > 16},
    }
    for name in sorted({key.name for key in products}):
        found = [key for key in products if key.name == name]
        constants = [dict(key.constexprs) for key in found]
        arguments = [dict(key.arguments) for key in found]
        kind = name.removeprefix("gate_up").removeprefix("down").removesuffix("_kernel")
        assert {each["BLOCK_M"] for each in constants} >= rows_of[kind]
        assert {each["GROUP_SIZE"] for each in constants} >= {32, 64, 128}
        # Only the kernels of larger tiles take sorted routes alone.
        pointers = ("zero_points_ptr", "bias_ptr", *(["route_ids_ptr"] * (kind != "_wgmma")))
        for pointer in pointers:
            assert {pointer in each for each in arguments} == {True, False}, (name, pointer)
        # Of fp16 and bf16, and of FC2's input as of FC1's.
        inputs = {each.get("x_ptr", each.get("hidden_ptr")) for each in arguments}
        assert inputs == {"*fp16@16", "*bf16@16"}
    elements = {dict(key.constexprs).get("ELEMENT") for key in products}
    assert elements >= {"int4", "mxfp4", "nvfp4", "nf3"}
    assert {"partials_ptr" in dict(key.arguments) for key in products} == {True, False}
