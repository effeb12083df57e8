"""What a kernel is made of: the code and values that the compiler would look up, and no more."""

import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl

from firesteel.errors import InvalidArgumentError
from firesteel.launch import Kernel
from firesteel.launch.binary import has_gluon, identity

_numbers = itertools.count()


def imported(folder: Path, text: str, name: str = "closure_module") -> ModuleType:
    path = folder / f"{next(_numbers)}" / f"{name}.py"
    path.parent.mkdir()
    path.write_text(f"import triton\nimport triton.language as tl\n{text}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(folder: Path, text: str) -> str:
    return Kernel(imported(folder, text).kernel).source_digest


KERNEL = """
@triton.jit
def kernel(x_ptr):
    at = tl.arange(0, 32)
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, {0})
"""

# In each, "2" stands for what must change the digest.
REACHED = {
    "default of a called function": """
G = 2
@triton.jit
def scaled(x, FACTOR: tl.constexpr = G):
    return x * FACTOR
""",
    "name in a comprehension": "G = tl.constexpr(2)",
    "constant that holds a function": """
@triton.jit
def times(x):
    return x * 2
OP = tl.constexpr(times)
""",
    "tuple of functions": """
@triton.jit
def times(x):
    return x * 2
OPS = (times,)
""",
    "lambda in a plain function": """
G = 2
def factor():
    inner = lambda z: z * G
    return inner(1)
""",
    "attribute of an object": """
class Config:
    FACTOR = 2
config = Config()
""",
    "attribute of a class": """
class Config:
    FACTOR = 2
""",
    "property of a class": """
class Config:
    @property
    def factor(self):
        return 2
""",
    "method of a base": """
class Base:
    @staticmethod
    def factor():
        return 2
class Config(Base):
    pass
""",
    "object in a module": """
import types
config = types.ModuleType("config")
config.inner = types.SimpleNamespace(FACTOR=tl.constexpr(2))
""",
    "wrapper": """
import functools
def doubled(function):
    @functools.wraps(function)
    def wrapper():
        return 2 * function()
    return wrapper
@doubled
def factor():
    return 1
""",
    "cached function": """
import functools
@functools.lru_cache
def factor():
    return 2
""",
    "table": "TABLE = {'a': [1, 2]}",
    "enumeration": """
from enum import IntEnum
class Mode(IntEnum):
    FAST = 2
""",
    "keyword default": """
def factor(*, by=2):
    return by
""",
    "name that is set too": "G = tl.constexpr(2)",
    "dtype": "DTYPE = tl.pointer_type(tl.float16, 2)",
}
READS = {
    "default of a called function": "scaled(x)",
    "name in a comprehension": "[a * G for a in (x, x)][0]",
    "constant that holds a function": "OP(x)",
    "tuple of functions": "OPS[0](x)",
    "lambda in a plain function": "x * factor()",
    "attribute of an object": "x * config.FACTOR",
    "attribute of a class": "x * Config.FACTOR",
    "property of a class": "x * Config().factor",
    "method of a base": "x * Config().factor()",
    "object in a module": "x * config.inner.FACTOR",
    "wrapper": "x * factor()",
    "cached function": "x * factor()",
    "table": "x * TABLE['a'][1]",
    "enumeration": "x * Mode.FAST",
    "keyword default": "x * factor()",
    "name that is set too": "G * [G for G in (x, x)][0]",
    "dtype": "x.to(DTYPE)",
}


@pytest.mark.parametrize("case", REACHED)
def test_what_is_reached_changes_the_digest(tmp_path: Path, case: str) -> None:
    assert REACHED[case].count("2") == 1
    code = KERNEL.format(READS[case])
    first = digest(tmp_path, REACHED[case] + code)
    assert digest(tmp_path, REACHED[case] + code) == first
    assert digest(tmp_path, REACHED[case].replace("2", "3") + code) != first


AGGREGATE = """
from triton.language.core import _aggregate

@_aggregate
class Pair:
    value: tl.tensor

    @INIT
    def __init__(self, value):
        self.value = value

    @triton.jit
    def scaled(self):
        return self.value * 2
"""


def test_the_methods_of_an_aggregate_are_reached(tmp_path: Path) -> None:
    has_functions = hasattr(triton, "constexpr_function")
    text = AGGREGATE.replace("@INIT", "@triton.constexpr_function" if has_functions else "")
    code = KERNEL.format("Pair(x).scaled()")
    first = digest(tmp_path, text + code)
    assert digest(tmp_path, text + code) == first
    assert digest(tmp_path, text.replace("* 2", "* 3") + code) != first
    assert digest(tmp_path, text.replace("self.value = value", "self.value = -value") + code) != (
        first
    )


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FACTOR = gl.constexpr(5)

@gluon.constexpr_function
def width(warps):
    return 7 * warps

@gluon.constexpr_function
def layout(warps):
    return gl.BlockedLayout([1], [32], [width(warps) // 7], [0])

@triton.jit
def negated(x):
    return -x

@gluon.jit
def scaled(x):
    return negated(x) * 2

@gluon.jit
def kernel(x_ptr, WARPS: gl.constexpr):
    at = gl.arange(0, 128, layout=layout(WARPS))
    gl.store(x_ptr + at, scaled(gl.load(x_ptr + at)) * FACTOR)
"""


@pytest.mark.skipif(not has_gluon(), reason="needs Triton 3.6 or later")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("negated(x) * 2", "negated(x) * 3"),
        ("[1], [32]", "[2], [32]"),
        ("7 * warps", "7 * warps + 7"),
        ("constexpr(5)", "constexpr(6)"),
        ("return -x", "return x"),
    ],
)
def test_what_a_kernel_in_gluon_reaches_changes_its_identity(
    tmp_path: Path, old: str, new: str
) -> None:
    """Helpers, functions of constants at any depth, constants, and helpers in plain Triton."""

    def made(text: str) -> tuple[str, str]:
        kernel = Kernel(imported(tmp_path, text).kernel)
        key = kernel.key({"x_ptr": "*fp32"}, {"WARPS": 4})
        return kernel.source_digest, identity(kernel, key, "sm_90")

    assert GLUON.count(old) == 1
    first = made(GLUON)
    assert made("# elsewhere\n" + GLUON) == first
    changed = made(GLUON.replace(old, new))
    assert changed[0] != first[0]
    assert changed[1] != first[1]


def test_functions_that_change_places_change_the_digest(tmp_path: Path) -> None:
    text = "@triton.jit\ndef f(x):\n    return x\n@triton.jit\ndef g(x):\n    return -x\n"
    code = KERNEL.format("OPS[0](x) + f(x) + g(x)")
    first = digest(tmp_path, text + "OPS = (f, g)\n" + code)
    assert digest(tmp_path, text + "OPS = (g, f)\n" + code) != first


def test_a_global_counts_with_the_value_that_it_has_now(tmp_path: Path) -> None:
    module: Any = imported(tmp_path, "G = tl.constexpr(2)" + KERNEL.format("x * G"))
    kernel = Kernel(module.kernel)
    first = kernel.source_digest
    module.G = tl.constexpr(3)
    assert kernel.source_digest != first
    module.G = tl.constexpr(2)
    assert kernel.source_digest == first


def test_source_counts_as_it_was_imported(tmp_path: Path) -> None:
    text = "def factor():\n    return 2\n" + KERNEL.format("x * factor() * 5")
    module = imported(tmp_path, text)
    kernel = Kernel(module.kernel)
    assert module.__file__ is not None
    Path(module.__file__).write_text(text.replace("2", "3").replace("5", "7"))
    # Nothing was hashed before the file changed.
    assert kernel.source_digest == digest(tmp_path, text)


class Opaque:
    def __init__(self) -> None:
        self.inner = SimpleNamespace()

    def method(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("read", "value", "name"),
    [
        ("x * G.inner", Opaque(), r"G\.inner"),
        ("x * len(G)", Opaque(), "G"),
        ("x * G[0]", (1, object()), r"G\[1\]"),
        ("x * G['a']", {"a": object()}, r"G\['a'\]"),
        ("x * G.method()", Opaque(), r"G\.method.__self__"),
        ("x * G", object(), "G"),
    ],
)
def test_a_global_that_cannot_be_hashed_is_refused_by_name(
    tmp_path: Path, read: str, value: object, name: str
) -> None:
    module: Any = imported(tmp_path, KERNEL.format(read))
    kernel = Kernel(module.kernel)
    assert kernel.source_digest
    module.G = value
    with pytest.raises(
        InvalidArgumentError,
        match=rf"^closure_module\.kernel: its global {name} is of <class '.*'>, must be a number",
    ):
        _ = kernel.source_digest


def test_a_function_without_source_is_refused_by_name(tmp_path: Path) -> None:
    module: Any = imported(tmp_path, KERNEL.format("x * factor()"))
    exec("def factor():\n    return 2\n", vars(module))
    with pytest.raises(
        InvalidArgumentError, match=r"closure_module\.kernel: factor has no source of its own"
    ):
        _ = Kernel(module.kernel).source_digest


@pytest.mark.parametrize(
    "text",
    [
        "x_ptr = object()" + KERNEL.format("x"),
        "x = object()" + KERNEL.format("x"),
        "def x():\n    return G\nG = object()" + KERNEL.format("x"),
        "G = object()" + KERNEL.format("[G for G in (x, x)][0]"),
        "T = object()" + KERNEL.format("x").replace("(x_ptr)", "(x_ptr: 'T')"),
        "import math, functools"
        + KERNEL.format("x * math.sqrt(2.0) * functools.reduce(max, (1,))"),
        "import torch" + KERNEL.format("x * torch.finfo(torch.float16).max"),
        "from triton.language.extra import libdevice" + KERNEL.format("libdevice.exp(tl.sum(x))"),
    ],
)
def test_what_is_not_read_or_comes_with_python_or_triton_is_no_matter(
    tmp_path: Path, text: str
) -> None:
    assert digest(tmp_path, text) == digest(tmp_path, text + "\nOTHER = 1\n")


SCRIPT = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, 1)

from firesteel.launch import Kernel
from firesteel.launch.binary import identity
made = Kernel(kernel)
print(__name__, identity(made, made.key({"x_ptr": "*fp32"}), "sm_90"))
if __name__ == "__main__":
    import ops
"""


def test_a_module_that_is_run_has_the_identity_of_one_that_is_imported(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "ops.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == {"__main__", "ops"}
    assert found["__main__"] == found["ops"]
    assert len(found["ops"]) == 64
