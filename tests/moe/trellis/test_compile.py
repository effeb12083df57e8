"""Keys of EXL3 layers: what is compiled within the budget, and that code reads every constant.

`tests/moe/test_compile.py` compiles them, with all others.
"""

from dataclasses import replace

import pytest

from firesteel.launch import LaunchKey, Plan, plan
from firesteel.launch.key import Constexpr
from firesteel.moe.activation import Activation
from firesteel.moe.trellis.launches import ACT, TRELLIS_KERNELS, WGMMA
from firesteel.moe.trellis.linear import TrellisLinearSpec
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec
from tests.moe.test_compile import TARGETS, first_ir
from tests.moe.trellis.compiled import GLM, PRODUCTS, trellis_keys

pytestmark = pytest.mark.compile

# Long enough to split FC1, with row blocks for more than one of a program.
LONG = TrellisMoeSpec(hidden_size=1536, intermediate_size=512, num_experts=4, top_k=2)
BIASED = StoredTrellis(codebook="mul1", has_bias=True)
SPECS = {
    "mapped": replace(LONG, num_global_experts=32, activation=Activation(name="swigluoai")),
    "relu2": replace(LONG, activation=Activation(name="relu2"), w13=BIASED, w2=BIASED),
    "linear": TrellisLinearSpec(in_features=1536, out_features=2048),
}
TILES = {8: 16, 16: 8, 32: 64, 64: 128, 128: 64}


def another(name: str, value: Constexpr) -> Constexpr:
    """Another value that the kernels accept in the same place."""
    if isinstance(value, bool):
        return not value
    if name == "BLOCK_M":
        return TILES[value]  # type: ignore[index]
    if name == "CODEBOOK":
        return "mul1" if value != "mul1" else "3inst"
    if isinstance(value, str):
        return "silu" if value != "silu" else "situ"
    assert isinstance(value, int | float)
    if name in ("SPAN", "SPLIT_K"):
        return 2 if value == 1 else value // 2
    return value + 1 if name == "STAGES" else value * 2


def forms_of(made: Plan) -> list[LaunchKey]:
    """Of each kernel one key for each choice of pointers."""
    names = {kernel.name for kernel in TRELLIS_KERNELS}
    known: set[object] = set()
    found: list[LaunchKey] = []
    for key in made.keys:
        form = (key.kernel, key.arguments)
        if key.kernel in names and form not in known:
            found.append(key)
            known.add(form)
    return found


@pytest.mark.parametrize("name", SPECS)
def test_every_constant_of_a_key_is_read_by_its_code(name: str) -> None:
    """A value that no compiled code reads must not be in a key: it would only make more keys."""
    flags = {} if name == "linear" else {"ids": ["i32"]}
    made = plan(SPECS[name], 300, flags=flags)
    keys = forms_of(made)
    assert {key.kernel for key in keys} >= PRODUCTS
    if name == "relu2":
        # The others' code knows of no activation.
        keys = [key for key in keys if key.kernel == ACT.name]
    for key in keys:
        kernel, constants = made.kernels[key.kernel], dict(key.constexprs)
        code = first_ir(kernel, key)
        both = (constants.get("SPAN", 1), constants.get("SPLIT_K", 1))
        for constant, value in key.constexprs:
            if constant == "WARPS":
                # Layouts of any other number are refused, so that it makes no key of its own.
                assert value == key.num_warps
                continue
            # One of the two is 1 where the other is not, which the kernel asserts.
            is_fixed = constant in ("SPAN", "SPLIT_K") and value == 1 and both != (1, 1)
            if value is None or is_fixed:
                continue
            changed = tuple({**constants, constant: another(constant, value)}.items())
            ir = first_ir(kernel, replace(key, constexprs=changed))
            assert ir != code, f"{constant} of {key}"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_compiled_covers_what_changes_code(target: str) -> None:
    keys = [key for _, key in trellis_keys(target).values()]
    has_wgmma = target == "sm_90"
    left_out = set() if has_wgmma else {WGMMA.name}
    assert {key.kernel for key in keys} == {kernel.name for kernel in TRELLIS_KERNELS} - left_out
    products = [key for key in keys if key.kernel in PRODUCTS]
    constants = [dict(key.constexprs) for key in products]
    assert {each["CODEBOOK"] for each in constants} == {"mcg", "3inst", "mul1"}
    assert {each["RATES"] for each in constants} >= {0b1000, 0b10000, 0b11100}
    arguments = [dict(key.arguments) for key in products]
    ways = {("topk_ids_ptr" in each, "route_ids_ptr" in each) for each in arguments}
    assert ways == {(True, False), (False, True), (False, False)}
    for name, pointers in {
        "act_kernel": ("bias_ptr", "partials_ptr", "expert_map_ptr"),
        "finish_kernel": ("bias_ptr", "partials_ptr", "expert_map_ptr", "topk_weights_ptr"),
        "rotate_kernel": ("topk_ids_ptr", "expert_map_ptr"),
    }.items():
        found = [dict(key.arguments) for key in keys if key.name == name]
        for pointer in pointers:
            assert {pointer in each for each in found} == {True, False}, (name, pointer)
    dtypes = {dict(key.arguments).get("x_ptr") for key in keys if key.name == "rotate_kernel"}
    assert dtypes == {"*fp16@16", "*bf16@16"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_cut_of_the_reference_plan_is_compiled(target: str) -> None:
    """Every tile, with as many warps and stages and row blocks a program; of splits some."""

    def cut(key: LaunchKey) -> tuple[object, ...]:
        constants, is_direct = dict(key.constexprs), "topk_ids_ptr" in dict(key.arguments)
        names = ("BLOCK_M", "SPAN", "STAGES", "WARPS")
        return (key.name, is_direct, *(constants[name] for name in names))

    made = plan(GLM.for_target(target), 1400, flags={"ids": ["i64"]})
    wanted = {cut(key) for key in made.keys if key.kernel in PRODUCTS}
    assert len(wanted) > 4
    assert wanted <= {
        cut(key) for _, key in trellis_keys(target).values() if key.kernel in PRODUCTS
    }
