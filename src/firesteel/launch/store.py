"""Compiled kernels on disk: a cache that many processes share, and bundles made beforehand.

Both are folders of one file a kernel, named by the digest of what it was compiled from, so that a
file is either exactly what is wanted or of no use. Files are written under a name of their own and
renamed: a reader sees a whole file or none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from firesteel.errors import InvalidArgumentError
from firesteel.launch.binary import FORMAT, Binary, triton_version
from firesteel.settings import MANIFEST

__all__ = ["Bundle", "Cache", "check_out", "write_bundle"]

log = logging.getLogger(__name__)

_MANIFEST_CLASSES = {"format": int, "triton": str, "targets": list, "plans": list, "entries": dict}
_SUFFIX = ".kernel"


class Cache:
    """The folder of kernels that this user's processes have compiled.

    A file that is corrupt is rebuilt, with one warning a cache; so is a folder that cannot be read
    or written worked without.

    Args:
        folder: made when first written to; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_warned = False

    def read(self, digest: str, target: str | None = None) -> Binary | None:
        """The kernel of this digest, or None; one for another target is corrupt."""
        if self._folder is None:
            return None
        path = self._path(self._folder, digest)
        try:
            return Binary.from_bytes(path.read_bytes(), digest, target)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"{path}: {error}; compiled again")
            return None

    def write(self, binary: Binary) -> None:
        """Keep a kernel."""
        if self._folder is None:
            return
        path = self._path(self._folder, binary.digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, binary.to_bytes())
        except (OSError, ValueError) as error:
            # No name of a file holds a NUL, which is a ValueError.
            self._warn(f"{path}: {error}; kernels of this process are not kept")

    @staticmethod
    def _path(folder: Path, digest: str) -> Path:
        return folder / "kernels" / digest[:2] / (digest + _SUFFIX)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            log.warning("kernel cache: %s", message)
        self._has_warned = True


class Bundle:
    """A folder that `write_bundle` made, opened to read.

    Raises
        InvalidArgumentError: the folder has no manifest, or not one of this format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest = _checked_manifest(json.loads((folder / MANIFEST).read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(
                f"bundle: {folder} has no readable {MANIFEST}: {error!r}; "
                "must be a folder that `firesteel build` made"
            ) from error
        if self.manifest["format"] != FORMAT:
            raise InvalidArgumentError(
                f"bundle: {folder} is of format {self.manifest['format']}, not {FORMAT}"
            )
        self._entries: dict[str, str] = self.manifest["entries"]
        self._has_warned = False

    def read(self, digest: str, target: str) -> Binary | None:
        """The kernel of this digest; None, with one warning a bundle, where it cannot be used."""
        name = digest + _SUFFIX
        if digest not in self._entries:
            self._warn(self._why_not(target))
            return None
        try:
            data = (self.folder / name).read_bytes()
            if data.partition(b"\n")[0].decode("ascii", "replace") != self._entries[digest]:
                raise ValueError("its hash is not the manifest's")
            return Binary.from_bytes(data, digest, target)
        except (OSError, ValueError) as error:
            self._warn(f"{name}: {error}")
            return None

    def _why_not(self, target: str) -> str:
        if target not in self.manifest["targets"]:
            return f"it is for {', '.join(self.manifest['targets'])}, this device is {target}"
        if self.manifest["triton"] != triton_version():
            return f"it was made by Triton {self.manifest['triton']}, here is {triton_version()}"
        return "it was made of other sources, another plan, or in another environment"

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            log.warning("bundle %s cannot be used: %s; compiling instead", self.folder, why)
        self._has_warned = True


def _checked_manifest(manifest: Any) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(manifest, dict):
        raise ValueError("it is no object")
    found = cast(dict[str, Any], manifest)
    for name, kind in _MANIFEST_CLASSES.items():
        value = found.get(name)
        if type(value) is not kind:
            raise ValueError(f"its {name} is {value!r}")
        members: list[object] = [*value, *value.values()] if isinstance(value, dict) else []
        members = list(value) if isinstance(value, list) else members
        if not all(isinstance(member, str) for member in members):
            raise ValueError(f"its {name} holds what is no text")
    return found


def check_out(folder: Path) -> None:
    """Refuse a folder that `write_bundle` would refuse, which may be minutes of compiling earlier.

    Raises
        InvalidArgumentError: it is no new or empty folder.
    """
    try:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        raise InvalidArgumentError(f"out: cannot read {folder}: {error}") from error
    if not is_free:
        raise InvalidArgumentError(f"out: {folder} exists, must be new or an empty folder")


def write_bundle(
    folder: Path, binaries: Iterable[Binary], *, plans: Iterable[str], targets: Iterable[str]
) -> int:
    """Write a bundle, whole or not at all; returns its bytes.

    Args:
        folder: must not exist, or be empty.
        binaries: the kernels of every plan and target.
        plans: digests of the plans.
        targets: as "sm_90".

    Raises
        InvalidArgumentError: the folder holds something, or cannot be written.
    """
    check_out(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InvalidArgumentError(f"out: cannot write {folder}: {error}") from error
    total = 0
    try:
        entries: dict[str, str] = {}
        for binary in binaries:
            data = binary.to_bytes()
            (partial / (binary.digest + _SUFFIX)).write_bytes(data)
            entries[binary.digest] = data.partition(b"\n")[0].decode()
            total += len(data)
        manifest = {
            "format": FORMAT,
            "triton": triton_version(),
            "targets": sorted(targets),
            "plans": sorted(plans),
            "entries": entries,
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        partial.chmod(0o755)
        partial.replace(folder)
    except OSError as error:
        raise InvalidArgumentError(f"out: cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return total


def _write_whole(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
