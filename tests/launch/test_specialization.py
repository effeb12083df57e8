"""The proof that a plan is complete: Triton itself would compile nothing else.

Every launch that `run` makes, at every token count and under all flags, is read back from the
driver. Its arguments are given to Triton's own binder, which says what `kernel[grid](*arguments)`
would compile; that must be what the planned key is compiled from, to the last attribute.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from examples.scale_rows.scale_rows import ScaleRows
from firesteel.errors import InvalidArgumentError
from firesteel.indexer.spec import DecodeSpec, PageWriterSpec, PrefillSpec
from firesteel.launch import Kernel, LaunchKey, plan
from firesteel.launch.binary import has_gluon, triton_source
from firesteel.launch.key import DTYPES
from firesteel.launch.spec import Spec
from firesteel.launch.stub import StubDriver
from firesteel.moe.spec import MoeSpec, StoredWeights, geometry
from firesteel.moe.trellis.spec import StoredTrellis, TrellisMoeSpec
from tests.launch.rig import call_of, ready_on_stub, tensors_of

BACKEND: Any = make_backend(GPUTarget("cuda", 90, 32))
# Read in batches that the stub's ring of 4096 launches holds.
BATCH = 500

TINY = MoeSpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
SPECS: dict[str, tuple[Spec, int]] = {
    "scale-rows": (ScaleRows(k=96), 300),
    "moe": (TINY, 600),
    "moe-batch-invariant": (replace(TINY, batch_invariant=True), 300),
    "moe-expert-map-weight-on-input": (
        replace(TINY, num_global_experts=32, weight_on_input=True),
        300,
    ),
    "moe-asymmetric-biased": (
        replace(
            TINY,
            w13=StoredWeights(group_size=32, has_zero_points=True, has_bias=True),
            w2=StoredWeights(group_size=64, has_zero_points=True, has_bias=True, scale="fp16"),
        ),
        300,
    ),
    "moe-nvfp4": (
        replace(TINY, w13=StoredWeights.fp4("nvfp4"), w2=StoredWeights.fp4("nvfp4", has_bias=True)),
        300,
    ),
    "moe-nf3": (replace(TINY, w13=StoredWeights.nf3(), w2=StoredWeights.nf3()), 300),
    "moe-mxfp4": (replace(TINY, w13=StoredWeights.fp4("mxfp4")), 300),
    "indexer-decode": (
        DecodeSpec(num_heads=32, top_k=2048, rows=6, width=16384, has_slots=True, has_scores=True),
        20,
    ),
    "indexer-16-bit": (
        DecodeSpec(num_heads=64, top_k=512, width=512, cache_dtype="bf16", is_filtered=False),
        20,
    ),
    "indexer-prefill": (PrefillSpec(num_heads=64, top_k=512, num_keys=100_000), 300),
    "indexer-paged-prefill": (PrefillSpec(num_heads=64, top_k=512, width=99, has_slots=True), 300),
    "indexer-pages": (PageWriterSpec(page_stride=8464), 40),
    "glm-5.2-tp4": (geometry("glm-5.2", tensor_parallel=4), 3072),
}
if has_gluon():
    from firesteel.moe.trellis.linear import TrellisLinearSpec

    # Split sums, whole ones, and every tile; sizes that are no whole blocks.
    SPECS["trellis-moe"] = (
        TrellisMoeSpec(
            hidden_size=760,
            intermediate_size=200,
            num_experts=4,
            top_k=2,
            w13=StoredTrellis(rates=(2, 3), has_bias=True),
            w2=StoredTrellis(codebook="mul1"),
            num_global_experts=16,
        ),
        120,
    )
    SPECS["trellis-linear"] = (TrellisLinearSpec(in_features=768, out_features=136), 60)


class Pointer:
    """A tensor as Triton's binder sees one."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


def triton_would_compile(
    kernel: Kernel, key: LaunchKey, params: tuple[int, ...]
) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Signature, constants and attributes that Triton's binder finds for these arguments."""
    function = kernel.function
    binder = _binder(function)
    given: dict[str, Any] = dict(key.constexprs)
    for (name, kind), value in zip(key.arguments, params, strict=False):
        element = kind.removeprefix("*").partition("@")[0]
        if kind.startswith("*"):
            given[name] = Pointer(value, DTYPES[element])
        elif kind in ("i32", "i64"):
            # The integer as a caller of `kernel[grid]` would pass it.
            bits = 32 if kind == "i32" else 64
            value &= (1 << bits) - 1
            given[name] = value - (1 << bits) if value >> (bits - 1) else value
    arguments = [given[parameter.name] for parameter in kernel.parameters]
    bound, specialization, options = binder(*arguments)
    _, signature, constants, attributes = function._pack_args(
        BACKEND, {}, bound, specialization, options
    )
    # An empty list says nothing of a parameter.
    return signature, constants, {place: found for place, found in attributes.items() if found}


@cache
def _binder(function: Any) -> Any:
    """Triton's binder for sm_90, made without a GPU."""
    return create_function_from_signature(function.signature, function.params, BACKEND)


def planned(kernel: Kernel, key: LaunchKey) -> tuple[Any, Any, Any]:
    source = triton_source(kernel, key)
    return source.signature, source.constants, source.attrs


@pytest.fixture
def driver() -> StubDriver:
    made = StubDriver.open()
    made.reset()
    return made


@pytest.mark.parametrize("name", SPECS)
def test_triton_would_compile_exactly_the_planned_keys(name: str, driver: StubDriver) -> None:
    spec, max_tokens = SPECS[name]
    made = plan(spec, max_tokens)
    ready = ready_on_stub(made, driver)
    by_handle = {ready.function(key)[0].handle: key for key in made.keys}
    expected = {key: planned(made.kernels[key.kernel], key) for key in made.keys}
    reached: set[LaunchKey] = set()
    for flags in made.tables:
        bound = ready.bind(tensors_of(spec, flags), ready.arena(), **dict(flags))
        whole = call_of(spec, flags, max_tokens)
        for start in range(0, max_tokens + 1, BATCH):
            driver.reset()
            asked: list[LaunchKey] = []
            for num_tokens in range(start, min(start + BATCH, max_tokens + 1)):
                bound.run(*(tensor[:num_tokens] for tensor in whole))
                asked += [
                    launch.key for launch in spec.select(num_tokens, flags) if all(launch.grid)
                ]
            launches = driver.launches()
            assert [by_handle[launch.function] for launch in launches] == asked
            for launch, key in zip(launches, asked, strict=True):
                kernel = made.kernels[key.kernel]
                found = triton_would_compile(kernel, key, launch.params)
                assert found == expected[key], f"{key}\n{found}\n{expected[key]}"
                reached.add(key)
    assert reached == set(made.keys)
    assert not ready.audit.misses


@triton.jit
def unmarked_kernel(x_ptr, M, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), M)


@triton.jit(do_not_specialize=["M"])
def unannotated_kernel(x_ptr, M, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), M)


@triton.jit
def annotated_only_kernel(x_ptr, M: tl.int64, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), M)


@triton.jit(do_not_specialize=["M"])
def marked_kernel(x_ptr, M: tl.int64, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), M)


def _forms(function: Any, values: tuple[int, ...], addresses: tuple[int, ...] = (256,)) -> int:
    """How many forms Triton would compile for these integers and addresses."""
    kernel, found = Kernel(function), set()
    for value in values:
        for address in addresses:
            bound, specialization, options = _binder(function)(
                Pointer(address, torch.float32), value, 16
            )
            packed = function._pack_args(BACKEND, {}, bound, specialization, options)
            found.add(repr(packed[1:]))
    assert kernel.parameters
    return len(found)


@pytest.mark.parametrize("function", [unmarked_kernel, unannotated_kernel, annotated_only_kernel])
def test_an_integer_that_triton_would_specialise_is_refused(function: Any) -> None:
    # Triton does have more than one form of it,
    assert _forms(function, (1, 16, 7, 1 << 31)) > 1
    # so it cannot be planned.
    with pytest.raises(InvalidArgumentError, match="M is i64, must be annotated so and named"):
        Kernel(function).key({"x_ptr": "*fp32", "M": "i64"}, {"BLOCK": 16})


def test_a_marked_integer_has_one_form() -> None:
    assert _forms(marked_kernel, (1, 16, 7, 1 << 31)) == 1
    key = Kernel(marked_kernel).key({"x_ptr": "*fp32", "M": "i64"}, {"BLOCK": 16})
    assert key.arguments == (("x_ptr", "*fp32@16"), ("M", "i64"))


def test_an_unaligned_pointer_is_another_form_and_is_refused_at_run_time(
    driver: StubDriver,
) -> None:
    assert _forms(marked_kernel, (7,), (256, 264)) == 2
    made = plan(ScaleRows(k=96), 8)
    ready = ready_on_stub(made, driver)
    flags = (("dtype", "fp32"),)
    bound = ready.bind(tensors_of(made.spec, flags), ready.arena(), dtype="fp32")
    x, out = call_of(made.spec, flags, 8)
    shifted = torch.zeros(8 * 96 + 8)
    start = (-shifted.data_ptr() % 16 + 4) // 4
    with pytest.raises(InvalidArgumentError, match=r"x: starts at .* multiple of 16"):
        bound.run(shifted[start : start + 8 * 96].view(8, 96), out)
    assert bound.run(x, out) == 1


def test_a_key_of_another_compiled_form_would_be_noticed(driver: StubDriver) -> None:
    """The proof above can fail: a key that claims too much, or too little, is told apart."""
    made = plan(ScaleRows(k=96), 8)
    (key, *_), (kernel, *_) = made.keys, made.kernels.values()
    params = (0x1000, 0x2000, 0x3000, 5)
    assert triton_would_compile(kernel, key, params) == planned(kernel, key)
    unaligned = (0x1008, *params[1:])
    assert triton_would_compile(kernel, key, unaligned) != planned(kernel, key)
    claims_less = replace(key, arguments=(("x_ptr", "*fp16"), *key.arguments[1:]))
    assert triton_would_compile(kernel, key, params) != planned(kernel, claims_less)
    other_block = replace(key, constexprs=(("K", 96), ("BLOCK", 256)))
    assert triton_would_compile(kernel, key, params) != planned(kernel, other_block)
