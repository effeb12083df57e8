"""Quantises a plain checkpoint into another folder, a shard at a time, so that it can go on.

Work in progress is in `<out>.partial`; a shard of experts there is whole, for it is written under
another name first. What is there is taken when the same is asked for again, and refused when it is
not. In the end the folder is renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from firesteel.checkpoint.families import expert_name
from firesteel.checkpoint.files import INDEX, PICKLES, Checkpoint, Reader, read_headers
from firesteel.checkpoint.layers import Contents, ExpertLayer, scan
from firesteel.checkpoint.sources import RoundedSource, StoredBias
from firesteel.errors import CheckpointError, InvalidArgumentError
from firesteel.formats.base import TensorHeader
from firesteel.formats.quantize import ALL_BUT_EXPERTS, Recipe
from firesteel.formats.registry import format_named

__all__ = ["Rounding", "quantize_checkpoint"]

EXPERTS_A_SHARD = 64

_STATE = "firesteel-quantize.json"
_LOCK = ".firesteel-quantize.lock"


@dataclass(frozen=True, slots=True)
class Rounding:
    """What was done.

    Fields
        layers, matrices  of experts, in all
        kept              matrices that an earlier run had done
        bytes_before, bytes_after  of the tensors of both checkpoints
    """

    layers: int
    matrices: int
    kept: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class _Shard:
    """Some experts of one layer."""

    layer: ExpertLayer
    experts: range
    file: str

    def sources(self) -> Iterator[tuple[int, int, RoundedSource]]:
        """Expert, part and source of each matrix."""
        for expert in self.experts:
            for part, sources in enumerate(self.layer.sources):
                source = sources[expert]
                assert isinstance(source, RoundedSource)
                yield expert, part, source

    def headers(self) -> dict[str, TensorHeader]:
        """Of every tensor of weights that the file must have."""
        found: dict[str, TensorHeader] = {}
        for expert, part, source in self.sources():
            name = source.stored_name(self.layer.prefix, expert, part)
            tensors = format_named(source.scheme.format).tensors(source.scheme)
            found.update({f"{name}.{suffix}": header for suffix, header in tensors.items()})
        return found


def quantize_checkpoint(
    path: Path, recipe: Recipe, out: Path, *, progress: Callable[[int], Callable[[], None]]
) -> Rounding:
    """Round the experts of the plain checkpoint in folder `path` into the new folder `out`.

    All else is copied as it is. A run that was stopped goes on where it was when it is made again.

    Args:
        progress: given the number of experts, gives what is called as each is done.

    Raises
        InvalidArgumentError: `out` is there already, or what an earlier run left of it is of
            another checkpoint or recipe, or it cannot be written; or the checkpoint is quantised.
        CheckpointError: a tensor cannot be read, or weights are no numbers.
    """
    checkpoint = Checkpoint.open(path)
    contents = scan(checkpoint, recipe)
    try:
        return _quantize(checkpoint, contents, recipe, out, progress)
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"out: {out} cannot be written from {path}: {error}") from error


def _quantize(
    checkpoint: Checkpoint,
    contents: Contents,
    recipe: Recipe,
    out: Path,
    progress: Callable[[int], Callable[[], None]],
) -> Rounding:
    # A link cannot be renamed over, and "." has no name.
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgumentError(f"out: got {out}, must be new or an empty folder")
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _only_run(partial):
        _begin(partial, checkpoint, recipe)
        # Now, for a mount point cannot be removed.
        if out.exists():
            out.rmdir()
        return _write(checkpoint, contents, recipe, out, partial, progress)


def _write(
    checkpoint: Checkpoint,
    contents: Contents,
    recipe: Recipe,
    out: Path,
    partial: Path,
    progress: Callable[[int], Callable[[], None]],
) -> Rounding:
    shards = _shards(contents)
    step = progress(sum(len(shard.experts) for shard in shards))
    kept = 0
    for shard in shards:
        if _is_done(partial / shard.file, shard):
            kept += 3 * len(shard.experts)
            for _ in shard.experts:
                step()
            continue
        with checkpoint.reader() as reader:
            _save(_round(shard, reader, step), partial / shard.file)
    replaced = _replaced(contents)
    for number, file in enumerate(sorted(set(checkpoint.files.values()))):
        _copy_rest(checkpoint, file, replaced, partial / f"model-{number:05d}.safetensors")
    bytes_after = _write_index(partial)
    _write_config(partial, checkpoint, recipe)
    partial.rename(out)
    # Last: a run that is stopped before can go on.
    (out / _STATE).unlink()
    (out / _LOCK).unlink()
    return Rounding(
        layers=len({shard.layer.layer for shard in shards}),
        matrices=sum(3 * len(shard.experts) for shard in shards),
        kept=kept,
        bytes_before=sum(header.num_bytes for header in checkpoint.headers.values()),
        bytes_after=bytes_after,
    )


@contextmanager
def _only_run(partial: Path) -> Generator[None]:
    """Holds the folder while open; the system lets go of it when a process ends, however it does.

    Raises
        InvalidArgumentError: another run holds it.
    """
    with (partial / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidArgumentError(f"out: another run is at work in {partial}") from error
        yield


def _begin(partial: Path, checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Say what the folder is for, or check that an earlier run said the same."""
    digest = hashlib.sha256((checkpoint.path / "config.json").read_bytes())
    for file in sorted(set(checkpoint.files.values())):
        stat = (checkpoint.path / file).stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    state = {"recipe": recipe.name, "checkpoint": digest.hexdigest()}
    if {path.name for path in partial.iterdir()} <= {_LOCK, f".{_STATE}.tmp"}:
        temporary = partial / f".{_STATE}.tmp"
        _write_json(temporary, state)
        os.replace(temporary, partial / _STATE)
        return
    try:
        known = json.loads((partial / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if known != state:
        raise InvalidArgumentError(
            f"out: {partial} is there, of another checkpoint or recipe: remove it, or name "
            "another folder"
        )


def _shards(contents: Contents) -> list[_Shard]:
    found: list[_Shard] = []
    for layer in contents.experts:
        num_experts = len(layer.sources[0])
        for number, first in enumerate(range(0, num_experts, EXPERTS_A_SHARD)):
            experts = range(first, min(first + EXPERTS_A_SHARD, num_experts))
            file = f"experts-{layer.layer:05d}-{number:03d}.safetensors"
            found.append(_Shard(layer, experts, file))
    return found


def _is_done(path: Path, shard: _Shard) -> bool:
    """Whether an earlier run wrote the shard, and wrote what is asked for."""
    if not path.exists():
        return False
    try:
        have = read_headers(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {path} to make it again") from error
    return all(have.get(name) == header for name, header in shard.headers().items())


def _round(shard: _Shard, reader: Reader, step: Callable[[], None]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for expert, part, source in shard.sources():
        packed = format_named(source.scheme.format).pack(source.scheme, source.read(reader))
        name = source.stored_name(shard.layer.prefix, expert, part)
        tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in packed.items()})
        if part == 2:
            step()
    for part, biases in enumerate(shard.layer.biases):
        for expert in shard.experts:
            bias = biases[expert]
            # One of its own is copied with all else.
            assert isinstance(bias, StoredBias)
            if bias.index is not None:
                tensor = reader.tensor(bias.tensor, bias.index)[bias.rows]
                name = expert_name(shard.layer.prefix, expert, part)
                tensors[f"{name}.bias"] = tensor.clone()
    return tensors


def _replaced(contents: Contents) -> set[str]:
    """Tensors of the plain checkpoint that the shards of experts stand for."""
    found: set[str] = set()
    for layer in contents.experts:
        for sources in layer.sources:
            found.update(s.plain.tensor for s in sources if isinstance(s, RoundedSource))
        stored = (b for biases in layer.biases for b in biases if isinstance(b, StoredBias))
        found.update(bias.tensor for bias in stored if bias.index is not None)
    return found


def _copy_rest(checkpoint: Checkpoint, file: str, replaced: set[str], target: Path) -> None:
    names = [name for name, own in checkpoint.files.items() if own == file and name not in replaced]
    if names:
        with checkpoint.reader() as reader:
            _save({name: reader.tensor(name) for name in names}, target)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Under another name first: a file of this name is whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(own, temporary, metadata={"format": "pt"})
    # safetensors makes files for their owner alone.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def _write_index(partial: Path) -> int:
    """The index of all shards; bytes of their tensors."""
    weight_map: dict[str, str] = {}
    total = 0
    for path in sorted(partial.glob("*.safetensors")):
        for name, header in read_headers(path).items():
            if name in weight_map:
                raise CheckpointError(f"tensor {name}: in both {weight_map[name]} and {path.name}")
            weight_map[name] = path.name
            total += header.num_bytes
    metadata = {"total_size": total}
    _write_json(partial / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return total


def _write_config(partial: Path, checkpoint: Checkpoint, recipe: Recipe) -> None:
    """The config with how experts are stored, and every other file as it is."""
    config: dict[str, Any] = {
        **checkpoint.config,
        "quantization_config": recipe.config(ignore=ALL_BUT_EXPERTS),
    }
    _write_json(partial / "config.json", config)
    for path in sorted(checkpoint.path.iterdir()):
        is_weights = path.suffix == ".safetensors" or any(map(path.match, PICKLES))
        if path.is_file() and not is_weights and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, partial / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
