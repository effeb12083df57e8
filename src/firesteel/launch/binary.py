"""Compiled kernels: made by Triton for any target, without a GPU, and described by value."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch.kernel import Kernel
from firesteel.launch.key import ALIGNED, LaunchKey

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "Binary",
    "checked_target",
    "compile_all",
    "identity",
    "supports_dependent_launch",
    "triton_source",
    "triton_version",
]

FORMAT = 1
_triton_cache = threading.Lock()
_TARGET = re.compile(r"sm_(\d{2,3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A kernel compiled for one target.

    Fields
        digest         of what it was compiled from: see `identity`
        target         "sm_90"
        symbol         name of the function in the image
        shared_bytes   dynamic shared memory of a program
        num_warps      warps of a program
        num_hidden     parameters that Triton adds after ours; null pointers
        image          the cubin
    """

    digest: str
    target: str
    symbol: str
    shared_bytes: int
    num_warps: int
    num_hidden: int
    image: bytes

    def to_bytes(self) -> bytes:
        """One file: SHA-256 of the rest in hex, the fields as one line of JSON, the image."""
        header = {key: value for key, value in asdict(self).items() if key != "image"}
        header["format"] = FORMAT
        body = json.dumps(header, sort_keys=True).encode() + b"\n" + self.image
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, digest: str) -> Binary:
        """The inverse of `to_bytes`; the hash is checked before anything is read.

        Raises
            ValueError: the bytes are corrupt, or of another format, or of another digest.
        """
        checksum, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError("its hash does not match its bytes")
        line, _, image = body.partition(b"\n")
        header = json.loads(line)
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        if header.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if set(header) != {field.name for field in fields(cls)} - {"image"}:
            raise ValueError(f"its fields are {sorted(header)}")
        if header["digest"] != digest:
            raise ValueError(f"it is of {header['digest']}")
        return cls(**header, image=image)


def triton_version() -> str:
    """The version of the Triton that would compile.

    Raises
        UnsupportedError: Triton is not installed.
    """
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError("triton: not installed, kernels need it") from error
    return str(triton.__version__)


def checked_target(target: str) -> int:
    """90 from "sm_90".

    Raises
        InvalidArgumentError: no such target.
    """
    found = _TARGET.fullmatch(target)
    if found is None or int(found[1]) < 80:
        raise InvalidArgumentError(f"target: got {target!r}, must be sm_80 or later, as in sm_90")
    return int(found[1])


def supports_dependent_launch(target: str) -> bool:
    """Whether kernels for a target can wait for the one before: sm_90, and Triton 3.5, or later."""
    major, minor = (int(word) for word in triton_version().split(".")[:2])
    return checked_target(target) >= 90 and (major, minor) >= (3, 5)


def identity(kernel: Kernel, key: LaunchKey, target: str) -> str:
    """SHA-256 of what the machine code depends on: source, key, target and Triton's version."""
    parts = {
        "format": FORMAT,
        "source": kernel.source_digest,
        "key": key.as_dict(),
        "target": target,
        "triton": triton_version(),
    }
    # Not sorted: the order of arguments is part of the key.
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile_all(
    wanted: Sequence[tuple[Kernel, LaunchKey]],
    target: str,
    *,
    threads: int,
    done: Callable[[LaunchKey, Binary], None],
) -> None:
    """Compile each, `threads` at once; `done` is called for each as it ends, on this thread.

    Nothing of Triton's own cache is read or written.
    """
    if not wanted:
        return
    with _own_triton_cache(), ThreadPoolExecutor(threads) as pool:
        futures = [(key, pool.submit(_compile, kernel, key, target)) for kernel, key in wanted]
        try:
            for key, future in futures:
                done(key, future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _own_triton_cache() -> Generator[None]:
    """A folder of Triton's own that lasts as long as the compiles.

    Triton writes intermediate files into its cache even where nothing reads them; a home that is
    full or read-only would end the compile.
    """
    from triton import knobs as triton_knobs

    knobs: Any = triton_knobs
    # Of the whole process, so one at a time; `scope` puts back the environment too.
    with _triton_cache, TemporaryDirectory(prefix="firesteel-") as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield


def triton_source(kernel: Kernel, key: LaunchKey) -> ASTSource:
    """What Triton is given to compile: signature, constants and the alignment of pointers."""
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.parameters]
    types = {name: kind.removesuffix(ALIGNED) for name, kind in key.arguments}
    return ASTSource(
        kernel.function,
        {name: types.get(name, "constexpr") for name in names},
        dict(key.constexprs),
        {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in key.arguments
            if kind.endswith(ALIGNED)
        },
    )


def _compile(kernel: Kernel, key: LaunchKey, target: str) -> Binary:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.errors import TritonError

    source: Any = triton_source(kernel, key)
    # Named, though some are Triton's defaults: the environment can change those.
    options = {
        "num_warps": key.num_warps,
        "num_stages": key.num_stages,
        "num_ctas": 1,
        "enable_fp_fusion": True,
        "launch_pdl": key.pdl,
        "launch_cooperative_grid": key.cooperative,
        "debug": False,
        "sanitize_overflow": False,
    }
    gpu = GPUTarget("cuda", checked_target(target), 32)
    try:
        compiled: Any = triton.compile(source, target=gpu, options=options)
    except (TritonError, RuntimeError) as error:
        raise UnsupportedError(f"{key}: Triton cannot compile it for {target}: {error}") from error
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            raise UnsupportedError(
                f"{key.name}: Triton asks for {name} = {getattr(metadata, name)}, must be 0: "
                "it would be allocated at each launch"
            )
    return Binary(
        digest=identity(kernel, key, target),
        target=target,
        symbol=metadata.name,
        shared_bytes=metadata.shared,
        num_warps=metadata.num_warps,
        num_hidden=_num_parameters(compiled.asm["ptx"], metadata.name) - len(key.arguments),
        image=compiled.asm["cubin"],
    )


def _num_parameters(ptx: str, symbol: str) -> int:
    """Parameters of the entry, counted where they are declared: Triton's versions add 1 or 2."""
    found = re.search(rf"\.entry\s+{re.escape(symbol)}\s*\((.*?)\)", ptx, re.DOTALL)
    assert found is not None, symbol
    return found[1].count(".param")
