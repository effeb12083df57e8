"""Fail on files, functions and parameter lists above the limits in CONTRIBUTING.md.

Usage: python tools/check_sizes.py PATH...   (files, or folders searched for *.py)
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_POSITIONAL = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: Function) -> bool:
    """Whether a decorator is `jit`, `triton.jit`, `gluon.jit` or a call of one."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(target) in {"jit", "triton.jit", "gluon.jit"}:
            return True
    return False


def count_positional(function: Function) -> int:
    """Parameters that a caller may pass by position, without `self` and `cls`."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def check_function(function: Function) -> Iterator[str]:
    """Messages on one function, without its file. A kernel's parameters are not counted."""
    kernel = is_kernel(function)
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
    if lines > limit:
        kind = "kernel" if kernel else "function"
        yield f"{function.lineno}: {kind} {function.name}: {lines} lines, at most {limit}"
    positional = count_positional(function)
    if not kernel and positional > MAX_POSITIONAL:
        yield (
            f"{function.lineno}: function {function.name}: {positional} positional parameters, "
            f"at most {MAX_POSITIONAL}; make the rest keyword-only"
        )


def check_source(source: str) -> list[str]:
    """Messages on one file's text, in line order."""
    lines = len(source.splitlines())
    found: list[str] = []
    if lines > MAX_FILE_LINES:
        found.append(f"1: file: {lines} lines, at most {MAX_FILE_LINES}")
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    for function in sorted(functions, key=lambda node: node.lineno):
        found.extend(check_function(function))
    return found


def find_sources(paths: list[Path]) -> list[Path]:
    """The given files, and every *.py below the given folders."""
    found: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"path: got {path}, must be a file or folder")
        found.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(found)


def main(arguments: list[str]) -> int:
    messages = [
        f"{path}:{message}"
        for path in find_sources([Path(argument) for argument in arguments])
        for message in check_source(path.read_text(encoding="utf-8"))
    ]
    for message in messages:
        print(message)
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
