"""Fail on files that do not belong in the repository.

Machine paths, files above 1 MiB without a reason, pickles, and `print` in src/.
Looks at every file that git tracks or would add.
"""

import ast
import fnmatch
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 2**20

# Glob of a file that may be larger, and why it must be here.
LARGE_FILES = {
    "examples/little_moe/*.safetensors": "the trained model that `make demo` runs",
}

MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:work|root|home/[\w.-]+)/")
PICKLE_SUFFIXES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
PICKLE_START = re.compile(rb"\x80[\x02-\x05]")


def list_files(root: Path) -> list[str]:
    """Paths from the root of what git tracks or would add, without what is deleted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in output.split("\0") if name and (root / name).is_file()})


def is_pickle(name: str, content: bytes) -> bool:
    """Whether loading the file could run code: a pickle, bare or inside a zip file."""
    if Path(name).suffix in PICKLE_SUFFIXES:
        return True
    if content.startswith(b"PK"):
        stream = io.BytesIO(content)
        return zipfile.is_zipfile(stream) and any(
            member.endswith(".pkl") for member in zipfile.ZipFile(stream).namelist()
        )
    return bool(PICKLE_START.match(content)) and content.endswith(b".")


def check_text(name: str, text: str) -> Iterator[str]:
    """Messages on one text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := MACHINE_PATH.search(line):
            yield f"{name}:{number}: machine path {match.group()}"
    if name.startswith("src/") and name.endswith(".py"):
        for node in ast.walk(ast.parse(text, filename=name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                yield f"{name}:{node.lineno}: print in src; use the logger, or rich in cli"


def check_file(name: str, content: bytes) -> Iterator[str]:
    """Messages on one file, named by its path from the root."""
    if is_pickle(name, content):
        yield f"{name}: a pickle; loading one can run code"
    allowed = any(fnmatch.fnmatch(name, pattern) for pattern in LARGE_FILES)
    if len(content) > MAX_BYTES and not allowed:
        yield f"{name}: {len(content)} bytes, at most {MAX_BYTES}; LARGE_FILES takes exceptions"
    if b"\0" not in content[:8192]:
        yield from check_text(name, content.decode("utf-8", errors="replace"))


def main(root: Path) -> int:
    messages = [
        message
        for name in list_files(root)
        for message in check_file(name, (root / name).read_bytes())
    ]
    for message in messages:
        print(message)
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent.parent))
