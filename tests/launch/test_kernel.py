import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl

from firesteel.errors import InvalidArgumentError
from firesteel.launch import Kernel, LaunchKey, Stride
from firesteel.launch.closure import _tokens

ROOT = Path(__file__).parent.parent.parent
TYPES = {"x_ptr": "*fp32", "M": "i64", "eps": "fp32"}


@triton.jit(do_not_specialize=["M", "eps"], do_not_specialize_on_alignment=["ids_ptr"])
def sample_kernel(
    x_ptr,
    ids_ptr,
    M: tl.int64,
    eps: tl.float32,
    BLOCK: tl.constexpr,
    IS_EVEN: tl.constexpr = False,
):
    tl.store(x_ptr + tl.arange(0, BLOCK), M + eps)


@triton.jit(do_not_specialize=["x_ptr"])
def unspecialised_pointer_kernel(x_ptr):
    tl.store(x_ptr, 0)


@triton.jit(do_not_specialize=["n"])
def short_integer_kernel(x_ptr, n: tl.int32):
    tl.store(x_ptr, n)


SAMPLE = Kernel(sample_kernel)


def _key(types: dict[str, Any] | None = None, constexprs: Any = None, **options: Any) -> LaunchKey:
    constexprs = {"BLOCK": 16} if constexprs is None else constexprs
    return SAMPLE.key({**TYPES, "ids_ptr": "*i32", **(types or {})}, constexprs, **options)


def test_a_key_lists_parameters_in_the_functions_order() -> None:
    key = _key(num_warps=2, num_stages=1, pdl=True, cooperative=True)
    assert key == LaunchKey(
        f"{__name__}.sample_kernel",
        (("x_ptr", "*fp32@16"), ("ids_ptr", "*i32"), ("M", "i64"), ("eps", "fp32")),
        (("BLOCK", 16), ("IS_EVEN", False)),
        2,
        1,
        True,
        True,
    )


def test_an_absent_tensor_is_a_constant() -> None:
    key = _key({"ids_ptr": None})
    assert dict(key.constexprs)["ids_ptr"] is None
    assert "ids_ptr" not in dict(key.arguments)


def test_the_same_question_gives_the_same_object() -> None:
    assert _key() is _key()


@pytest.mark.parametrize(("first", "second"), [(1, True), (True, 1), (0.0, -0.0), (1, 1.0)])
def test_values_that_python_holds_equal_are_not_confused(first: Any, second: Any) -> None:
    kernel = Kernel(sample_kernel)
    types = {**TYPES, "ids_ptr": "*i32"}
    keys = [kernel.key(types, {"BLOCK": 16, "IS_EVEN": value}) for value in (first, second)]
    for key, value in zip(keys, (first, second), strict=True):
        assert repr(dict(key.constexprs)["IS_EVEN"]) == repr(value)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("types", "constexprs", "message"),
    [
        ({"y_ptr": "*fp32"}, None, r"types: .* no such \['y_ptr'\], must be of \['M', "),
        ({"BLOCK": "i32"}, None, r"types: .* no such \['BLOCK'\]"),
        ({}, {"BLOCK": 1, "M": 5}, r"constexprs: .* no such \['M'\], must be of \['BLOCK', 'IS_"),
        ({}, {}, "constexprs: .* needs BLOCK"),
        ({}, {"BLOCK": [16]}, r"BLOCK is \[16\], must be a number, text or None"),
        ({}, {"BLOCK": float("nan")}, "BLOCK is nan, must be a number, text or None"),
        ({"x_ptr": "*int4"}, None, r"x_ptr is '\*int4', must point to one of bf16, "),
        ({"x_ptr": 4}, None, r"x_ptr is 4, must be text, as '\*bf16' or 'i64'"),
        ({"x_ptr": "fp16"}, None, "x_ptr is 'fp16', must be a pointer, i32, i64 or fp32"),
        ({"M": "i32"}, None, "M is i32, must be annotated so and named in do_not_specialize"),
        ({"x_ptr": "i64"}, None, "x_ptr is i64, must be annotated so"),
    ],
)
def test_a_key_that_is_not_the_functions_is_refused(
    types: dict[str, Any], constexprs: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _key(types, constexprs)


def test_a_missing_type_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="needs ids_ptr"):
        SAMPLE.key(TYPES, {"BLOCK": 16})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warps": 3}, "num_warps: .* has 3, must be a power of 2 to 32"),
        ({"num_warps": 64}, "num_warps: .* has 64"),
        ({"num_warps": 0}, "num_warps: .* has 0"),
        ({"num_stages": -1}, "num_stages: .* has -1, must be an integer from 0"),
        ({"num_stages": 2.0}, "num_stages: .* has 2.0"),
        ({"pdl": 1}, "pdl, cooperative: .* must be True or False each"),
        ({"cooperative": None}, "pdl, cooperative: .* must be True or False each"),
        ({"max_registers": 100}, "max_registers: .* must be 0 or a multiple of 8 from 32 to 248"),
    ],
)
def test_options_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    # Of a kernel of its own, and after right ones: what equals them must not be taken for them.
    kernel = Kernel(sample_kernel)
    types = {**TYPES, "ids_ptr": "*i32"}
    with pytest.raises(InvalidArgumentError, match=message):
        kernel.key(types, {"BLOCK": 16}, **options)


def test_a_pointer_in_do_not_specialize_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="use do_not_specialize_on_alignment"):
        Kernel(unspecialised_pointer_kernel).key({"x_ptr": "*fp32"})


@pytest.mark.parametrize("function", [lambda x: x, len, None])
def test_what_is_no_triton_function_is_refused(function: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be decorated by triton\.jit"):
        Kernel(function).key({})


@pytest.mark.parametrize("wrapped", ["autotuned", "heuristic", "both"])
def test_a_function_that_chooses_for_itself_is_refused(wrapped: str) -> None:
    function: Any = sample_kernel
    if wrapped != "autotuned":
        function = triton.heuristics({"IS_EVEN": lambda _: True})(function)
    if wrapped != "heuristic":
        function = triton.autotune([triton.Config({"BLOCK": 16})], key=[])(function)
    with pytest.raises(
        InvalidArgumentError, match=r"must be the triton\.jit function inside it: pa"
    ):
        Kernel(function).key({})


@triton.jit
def keyword_kernel(x_ptr, *, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0)


@triton.jit(debug=True)
def asserting_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (keyword_kernel, r"function: .*keyword_kernel\.BLOCK is keyword-only, must be positional"),
        (asserting_kernel, "function: .*asserting_kernel has debug=True, must be False"),
    ],
)
def test_what_would_be_compiled_otherwise_than_written_is_refused(
    function: object, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Kernel(function)


def _launch(**changes: Any) -> Any:
    arguments = {"x_ptr": "x", "ids_ptr": "ids", "M": 3, "eps": 0.5, **changes}
    return SAMPLE.launch(_key(), (1, 1, 1), {k: v for k, v in arguments.items() if v is not None})


def test_arguments_stand_in_the_keys_order() -> None:
    assert _launch(M=Stride("x")).arguments == ("x", "ids", Stride("x"), 0.5)
    assert _launch(eps=1).arguments[3] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"M": None}, r"was given \['eps', 'ids_ptr', 'x_ptr'\], must be \['M', "),
        ({"BLOCK": 4}, "was given .*BLOCK"),
        ({"x_ptr": 4096}, "x_ptr is 4096, must be the name of a tensor"),
        ({"x_ptr": Stride("x")}, "x_ptr is Stride.*, must be the name of a tensor"),
        ({"M": "x"}, "M is 'x', must be an integer or a stride"),
        ({"M": True}, "M is True, must be an integer or a stride"),
        ({"M": 2.0}, "M is 2.0, must be an integer or a stride"),
        ({"eps": "x"}, "eps is 'x', must be a number"),
        ({"eps": Stride("x")}, "eps is Stride.*, must be a number"),
        ({"eps": False}, "eps is False, must be a number"),
    ],
)
def test_a_launch_with_wrong_arguments_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        _launch(**changes)


def test_a_launch_of_another_kernels_key_is_refused() -> None:
    kernel = Kernel(short_integer_kernel)
    with pytest.raises(InvalidArgumentError, match=r"key: got one of .*sample_kernel, must be of"):
        kernel.launch(_key(), (1, 1, 1), {})


def test_a_stride_cannot_be_cut_to_32_bits() -> None:
    # One of 2**31 elements would be passed as a negative number, and nothing would say so.
    kernel = Kernel(short_integer_kernel)
    key = kernel.key({"x_ptr": "*fp32", "n": "i32"})
    assert kernel.launch(key, (1, 1, 1), {"x_ptr": "x", "n": 7}).arguments == ("x", 7)
    with pytest.raises(InvalidArgumentError, match=r"n is Stride.*, must be an integer"):
        kernel.launch(key, (1, 1, 1), {"x_ptr": "x", "n": Stride("x")})


MODULE = '''
import triton
import triton.language as tl
import constants
from callees import double, length

SCALE = tl.constexpr(3)
UNUSED = tl.constexpr(1)


def made(offset):
    @triton.jit
    def add(x):
        return x + offset

    return add


first = made(tl.constexpr(1))
second = made(tl.constexpr(2))


@triton.jit
def local(x):
    return x + 1


@triton.jit
def scale_kernel(x_ptr, BLOCK: tl.constexpr):
    """Scales."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if SCALE > 2:
        x = double(local(x)) * constants.FACTOR * length(BLOCK)
    tl.store(x_ptr + at, second(first(x)) * SCALE)
'''
CALLEES = """
import triton

# The oldest Triton has none, and calls plain functions.
constexpr_function = getattr(triton, "constexpr_function", lambda function: function)


@triton.jit
def double(x):
    return x * 2


@constexpr_function
def length(size):
    return halve(size)


def halve(size):
    return size // 2


@triton.jit
def unused(x):
    return x
"""
CONSTANTS = """
import triton.language as tl

FACTOR = tl.constexpr(5)
OTHER = tl.constexpr(6)
"""


class Sources:
    """Modules that a test writes anew, and the digest of their kernel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        self._texts = {"constants": CONSTANTS, "callees": CALLEES, "module": MODULE}
        self._count = 0

    def digest(self, name: str = "module", *changes: tuple[str, str]) -> str:
        texts = dict(self._texts)
        for before, after in changes:
            assert texts[name].count(before) == 1, before
            texts[name] = texts[name].replace(before, after)
        return self.digest_of(texts)

    def digest_of(self, texts: dict[str, str]) -> str:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        for name, text in texts.items():
            self._monkeypatch.setitem(sys.modules, name, _imported(name, folder, text))
        return Kernel(sys.modules["module"].scale_kernel).source_digest


def _imported(name: str, folder: Path, text: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    return Sources(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([("    at = ", "    # Comment.\n    at = ")], id="comment"),
        pytest.param([("@triton.jit\ndef scale", "@triton.jit()\ndef scale")], id="decorator"),
        pytest.param([("    x = tl.load", "\n\n    x = tl.load")], id="blank lines"),
        pytest.param([("(x_ptr + at)", "(x_ptr   +  at)  # load")], id="spaces"),
        pytest.param([("SCALE = tl", "\n\nnothing = 0\n\nSCALE = tl")], id="place in the file"),
        pytest.param([("UNUSED = tl.constexpr(1)", "UNUSED = tl.constexpr(2)")], id="unused"),
        pytest.param([("second(first(x)) * SCALE)\n", "second(first(x)) * SCALE)")], id="last end"),
        pytest.param(
            [("second(first(x)) * SCALE)\n", "second(first(x)) * SCALE)\n\n\nafter = 1\n")],
            id="code after it",
        ),
    ],
)
def test_what_does_not_matter_leaves_the_source_digest(
    sources: Sources, changes: list[tuple[str, str]]
) -> None:
    assert sources.digest("module", *changes) == sources.digest()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("module", "SCALE > 2", "SCALE > 1", id="code"),
        pytest.param(
            "module",
            "@triton.jit\ndef local",
            "@triton.jit(noinline=True)\ndef local",
            id="decorator",
        ),
        pytest.param("module", "return x + 1", "return x + 3", id="called function"),
        pytest.param("callees", "x * 2", "x * 3", id="called function of another module"),
        pytest.param("callees", "halve(size)\n\n\ndef", "size\n\n\ndef", id="constexpr function"),
        pytest.param("callees", "size // 2", "size // 4", id="function that it calls"),
        pytest.param("module", "SCALE = tl.constexpr(3)", "SCALE = tl.constexpr(4)", id="global"),
        pytest.param("module", "SCALE = tl.constexpr(3)", "SCALE = tl.constexpr(3.0)", id="class"),
        pytest.param("constants", "FACTOR = tl.constexpr(5)", "FACTOR = tl.constexpr(7)", id="far"),
        pytest.param("module", "made(tl.constexpr(1))", "made(tl.constexpr(7))", id="closure"),
        pytest.param("module", "made(tl.constexpr(2))", "made(tl.constexpr(7))", id="2nd closure"),
    ],
)
def test_what_matters_changes_the_source_digest(
    sources: Sources, name: str, before: str, after: str
) -> None:
    assert sources.digest(name, (before, after)) != sources.digest()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("callees", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("constants", "OTHER = tl.constexpr(6)", "OTHER = tl.constexpr(7)"),
    ],
)
def test_what_is_not_reached_in_another_module_does_not_matter(
    sources: Sources, name: str, before: str, after: str
) -> None:
    assert sources.digest(name, (before, after)) == sources.digest()


@pytest.mark.parametrize(
    "strings",
    [
        ('f"a{b}c {d!r:>{w}} {{}}"',),
        ("f\"{x[f'{y}']}\"", "+", 'f"é{z}"'),
        ('f"""q{\n a}"""',),
        ('"plain"', "'text'"),
    ],
)
def test_tokens_are_those_of_every_python_version(strings: tuple[str, ...]) -> None:
    # Python 3.12 has other tokens for an f-string than 3.11; a bundle of one serves the other.
    found = _tokens(f"x = {' '.join(strings)}  # why\n\n")
    assert found.split("\0") == ["x", "=", *strings, "\n", ""]
