"""Compiled kernels: made by Triton for any target, without a GPU, and described by value."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from firesteel.errors import FiresteelError, InvalidArgumentError, UnsupportedError
from firesteel.launch.compiler import compile_apart, environment
from firesteel.launch.kernel import Kernel
from firesteel.launch.key import ALIGNED, LaunchKey

if TYPE_CHECKING:
    from triton.compiler import ASTSource

__all__ = [
    "Binary",
    "check_wgmma",
    "checked_target",
    "compile_all",
    "has_gluon",
    "identity",
    "supports_dependent_launch",
    "supports_wgmma",
    "triton_source",
    "triton_version",
]

FORMAT = 1
_TARGET = re.compile(r"sm_(\d{2,3})")
_SYMBOL = re.compile(r"[\w$.]+", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Of each number of a header, the most that any GPU or compiler could mean.
_MOST = {"shared_bytes": 1 << 24, "num_warps": 32, "num_hidden": 64}


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
    def from_bytes(cls, data: bytes, digest: str, target: str | None = None) -> Binary:
        """The inverse of `to_bytes`; the hash is checked before anything is read.

        Args:
            data: the whole file.
            digest: that it must have.
            target: that it must be for; any by default.

        Raises
            ValueError: the bytes are corrupt, or of another format, digest or target.
        """
        checksum, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError("its hash does not match its bytes")
        line, _, image = body.partition(b"\n")
        try:
            header = json.loads(line)
        except RecursionError as error:
            raise ValueError("its header is nested too deeply") from error
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        if repr(header.pop("format", None)) != repr(FORMAT):
            raise ValueError(f"it is not of format {FORMAT}")
        if set(header) != {field.name for field in fields(cls)} - {"image"}:
            raise ValueError(f"its fields are {sorted(header)}")
        _check_header(header)
        if header["digest"] != digest:
            raise ValueError(f"it is of {header['digest']}")
        if target not in (None, header["target"]):
            raise ValueError(f"it is for {header['target']}, not {target}")
        return cls(**header, image=image)


def _check_header(header: Mapping[str, object]) -> None:
    for name, allowed in (("digest", _DIGEST), ("target", _TARGET), ("symbol", _SYMBOL)):
        value = header[name]
        if not isinstance(value, str) or allowed.fullmatch(value) is None:
            raise ValueError(f"its {name} is {value!r}")
    for name, most in _MOST.items():
        value = header[name]
        if type(value) is not int or not (name == "num_warps") <= value <= most:
            raise ValueError(f"its {name} is {value!r}, not an integer up to {most}")


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


def has_gluon() -> bool:
    """Whether Triton has the Gluon that kernels are written in: 3.6 or later.

    False without Triton, so that a spec can be made, and whoever plans it says what is missing.
    """
    try:
        major, minor = (int(word) for word in triton_version().split(".")[:2])
    except UnsupportedError:
        return False
    return (major, minor) >= (3, 6)


def supports_wgmma(target: str) -> bool:
    """Whether kernels for a target can use Hopper's own products: sm_90, and Gluon."""
    return checked_target(target) == 90 and has_gluon()


def check_wgmma(wgmma: bool) -> None:
    """Refuse a spec whose kernels may be Hopper's own where Triton has no Gluon for them.

    Raises
        UnsupportedError: wgmma is True, and Triton before 3.6.
    """
    if wgmma and not has_gluon():
        raise UnsupportedError("wgmma: got True, must be False with Triton before 3.6")


def identity(kernel: Kernel, key: LaunchKey, target: str) -> str:
    """SHA-256 of what the machine code depends on.

    That is the source, the key, the target, Triton's version, and those variables of the
    environment that change what Triton makes. Neither the module's name nor its place: a module
    that is run and one that is imported have the same kernels.

    Raises
        InvalidArgumentError: the code reads a global that cannot be hashed.
    """
    parts = {
        "format": FORMAT,
        "source": kernel.source_digest,
        "key": {**key.as_dict(), "kernel": key.name},
        "target": target,
        "triton": triton_version(),
        "environment": environment(checked_target(target)),
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

    Where one fails, what other threads have begun still ends and is handed over, then the error of
    the first is raised. Nothing of Triton's own cache is read or written.

    Raises
        UnsupportedError: Triton cannot compile a kernel for the target.
        InvalidArgumentError: no temporary file can be written.
    """
    if not wanted:
        return
    ends = threading.Event()

    def compile_one(kernel: Kernel, key: LaunchKey) -> Binary | None:
        if ends.is_set():
            return None
        try:
            return _compile(kernel, key, target)
        except BaseException:
            ends.set()
            raise

    failure: BaseException | None = None
    with ThreadPoolExecutor(threads) as pool:
        futures = {pool.submit(compile_one, kernel, key): key for kernel, key in wanted}
        try:
            for future in as_completed(futures):
                error = future.exception()
                if error is not None:
                    failure = failure or error
                elif (binary := future.result()) is not None:
                    done(futures[future], binary)
        except BaseException:
            ends.set()
            raise
    if failure is not None:
        raise failure


def triton_source(kernel: Kernel, key: LaunchKey) -> ASTSource:
    """What Triton is given to compile: signature, constants and the alignment of pointers."""
    from triton.compiler import ASTSource

    source: Any = ASTSource
    if getattr(kernel.function, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource
    names = [parameter.name for parameter in kernel.parameters]
    types = {name: kind.removesuffix(ALIGNED) for name, kind in key.arguments}
    return source(
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
    from triton.backends.compiler import GPUTarget
    from triton.errors import TritonError

    if kernel.target not in (None, target):
        raise UnsupportedError(
            f"target: got {target}, {key.name} is for {kernel.target} alone; a plan of a spec made "
            "for the target (`MoeSpec.for_target`) does without it"
        )
    # Before, so that a global that changes the while leaves code of a digest that nothing asks for.
    digest = identity(kernel, key, target)
    source: Any = triton_source(kernel, key)
    arch = checked_target(target)
    # Named, though some are Triton's defaults: the environment can change those. A version of
    # Triton passes over those that it does not have.
    options: dict[str, object] = {
        "num_warps": key.num_warps,
        "num_stages": key.num_stages,
        "num_ctas": 1,
        "arch": f"sm{arch}",
        "enable_fp_fusion": True,
        "enable_reflect_ftz": True,
        "default_dot_input_precision": "tf32",
        "instrumentation_mode": "",
        "ptx_options": "",
        "launch_pdl": key.pdl,
        "launch_cooperative_grid": key.cooperative,
        "maxnreg": key.max_registers or None,
        "debug": False,
        "sanitize_overflow": False,
    }
    try:
        compiled = compile_apart(source, GPUTarget("cuda", arch, 32), options)
    except FiresteelError:
        raise
    except (TritonError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{key}: Triton cannot compile it for {target}: {error}") from error
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if metadata.get(name):
            raise UnsupportedError(
                f"{key.name}: Triton asks for {name} = {metadata[name]}, must be 0: "
                "it would be allocated at each launch"
            )
    symbol = metadata["name"]
    return Binary(
        digest=digest,
        target=target,
        symbol=symbol,
        shared_bytes=metadata["shared"],
        num_warps=metadata["num_warps"],
        num_hidden=_num_parameters(compiled.ptx, symbol) - len(key.arguments),
        image=compiled.cubin,
    )


def _num_parameters(ptx: str, symbol: str) -> int:
    """Parameters of the entry, counted where they are declared: Triton's versions add 1 or 2."""
    found = re.search(rf"\.entry\s+{re.escape(symbol)}\s*\((.*?)\)", ptx, re.DOTALL)
    assert found is not None, symbol
    return found[1].count(".param")
