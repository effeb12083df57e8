"""`firesteel tune`: measures candidates of tiles on a GPU and writes a table that plans read."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from firesteel.cli.bench.moe_inputs import random_weights
from firesteel.cli.bench.records import context, progress
from firesteel.cli.console import print_json, stderr, stdout, table
from firesteel.cli.options import check_counts
from firesteel.cli.planning import make_table_specs, shape_choice
from firesteel.cli.tune.candidates import (
    Candidate,
    Group,
    Job,
    groups_of,
    incumbent_of,
    jobs_of,
    known_of,
    shape_of,
    with_tiles,
)
from firesteel.cli.tune.measuring import Compiler, LayerBench
from firesteel.cli.tune.search import Found, search, tuned_tiles
from firesteel.device import (
    checked_device,
    default_device,
    device_name,
    device_target,
)
from firesteel.errors import InvalidArgumentError, UnsupportedError
from firesteel.launch.binary import triton_version
from firesteel.launch.driver import Driver
from firesteel.moe.plan import has_wgmma
from firesteel.moe.spec import MoeSpec
from firesteel.moe.tuning import MODES, LayerTiles, Mode, Row, TileTable
from firesteel.moe.tuning_file import plain_fields, read_table, table_of_device, write_table

__all__ = ["TuneRequest", "changes_of", "merged_table", "run", "tune_layer"]

PORTABLE_SHARED_BYTES = 99 * 1024
"""Shared memory that a program has on every GPU since sm_86. Tables serve devices that they were
not measured on, and a tile that needs more would not run there. Rows "wgmma" serve sm_90 alone."""

Groups = Callable[[MoeSpec, Job, int], Sequence[Group]]


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """The options of `firesteel tune`.

    Fields
        out              file of the table
        merge            keep what the file has, and replace the rows of this shape and recipe
        shape            a model's name, and "-tpN" for one of N ranks
        recipe           how the experts are stored
        sizes            token counts
        minutes          after which nothing more is timed
        batch_invariant  choose the tile of batch invariant layers, and no other
        wgmma            Hopper's own kernels too, where they read the weights
        only_wgmma       choose their tiles, and no other
        portable         but for those only tiles of at most PORTABLE_SHARED_BYTES of shared memory
        table            to start from; of None the file to merge into where it has the shape and
                         recipe, else the table nearest to the device

    Raises
        InvalidArgumentError: a value is not allowed.
    """

    out: Path
    merge: bool = False
    shape: str = "glm-5.2-tp4"
    recipe: str = "int4-g128"
    sizes: tuple[int, ...] = (1, 8, 32, 64, 256, 1024, 3072, 8192)
    minutes: float = 4.0
    batch_invariant: bool = False
    wgmma: bool = True
    only_wgmma: bool = False
    portable: bool = True
    device: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        check_counts("--m", "token counts", self.sizes)
        if not 0 < self.minutes <= 24 * 60:
            raise InvalidArgumentError(f"--minutes: got {self.minutes}, must be 0 to 1440")
        if self.out.suffix != ".json":
            raise InvalidArgumentError(f"--out: got {self.out}, must end in .json")
        if not self.out.parent.is_dir():
            raise InvalidArgumentError(f"--out: {self.out.parent} must be a folder")
        try:
            # Now, not after minutes of measuring.
            with tempfile.TemporaryFile(dir=self.out.parent):
                pass
        except OSError as error:
            raise InvalidArgumentError(
                f"--out: {self.out.parent} cannot be written to: {error}"
            ) from error
        if self.out.exists() and not self.merge:
            raise InvalidArgumentError(
                f"--out: {self.out} exists; --merge replaces its rows of this shape and recipe"
            )
        if self.only_wgmma and (self.batch_invariant or not self.wgmma):
            other = "--batch-invariant" if self.batch_invariant else "--no-wgmma"
            raise InvalidArgumentError(f"--only-wgmma: got {other} too, must be at most one")

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes of rows to choose, where the layer has them."""
        if self.only_wgmma:
            return ("wgmma",)
        return tuple(mode for mode in MODES if self.wgmma or mode != "wgmma")


def run(request: TuneRequest, *, as_json: bool) -> None:
    """Tune, write the table, and print what was chosen.

    Raises
        UnsupportedError: no GPU, or none of the kernels that alone are asked for.
        InvalidArgumentError: the file to merge into is of another device, or no table.
        FiresteelError: the layer's numbers are wrong with the tiles in use.
    """
    start = time.monotonic()
    device = default_device() if request.device is None else checked_device(request.device)
    if device.type != "cuda":
        raise UnsupportedError(f"device: got {device}, tiles are timed on a CUDA device")
    old = read_table(request.out) if request.merge and request.out.exists() else None
    _check_device(old, device, request.out)
    choice = shape_choice(request.shape, request.recipe)
    choice = replace(choice, batch_invariant=request.batch_invariant, table=request.table)
    (spec,) = make_table_specs(choice, table_of_device(device))
    spec = spec.for_target(device_target(device))
    if old is not None and shape_of(spec) in old.shapes and request.table is None:
        spec = replace(spec, table=old)
    _check_modes(request, spec)
    most = Driver.open().max_shared_bytes(device.index or 0)
    with progress() as say:
        found = tune_layer(
            spec,
            request.sizes,
            device,
            shared_bytes=min(most, PORTABLE_SHARED_BYTES) if request.portable else most,
            wgmma_shared_bytes=most,
            modes=request.modes,
            end=start + 60 * request.minutes,
            say=say,
            note=_note,
        )
    made = _table_of_now(request.out, device, _tiles(spec, found, old).rows(shape_of(spec)))
    write_table(request.out, made if old is None else merged_table(old, made))
    seconds = time.monotonic() - start
    result = {
        "table": str(request.out),
        "shape": request.shape,
        "recipe": request.recipe,
        "started_from": spec.table.name,
        "seconds": seconds,
        "jobs": [_as_dict(each) for each in found],
        **context(device),
    }
    if as_json:
        print_json(result)
    else:
        _print(request, found, seconds)


def tune_layer(
    spec: MoeSpec,
    sizes: Sequence[int],
    device: torch.device,
    *,
    shared_bytes: int,
    wgmma_shared_bytes: int | None = None,
    modes: Sequence[Mode] = MODES,
    end: float,
    say: Callable[[str], None],
    note: Callable[[str], None],
    groups: Groups = groups_of,
) -> list[Found]:
    """Choose for each job of a layer, on a GPU; each has an equal share of the time that is left.

    Args:
        spec: the layer, with the table to start from.
        sizes: token counts.
        device: a GPU.
        shared_bytes: that a program may have.
        wgmma_shared_bytes: that one of Hopper's own kernels may have; as others by default.
        modes: of rows to choose.
        end: of `time.monotonic()`, after which no candidate is begun.
        say, note: told what runs now, and what is to be kept in sight.
        groups: the candidates of a job, given shared memory in bytes.

    Raises
        FiresteelError: the layer's numbers are wrong with the tiles in use.
    """
    weights = random_weights(spec, device)
    jobs = jobs_of(spec, tuple(sizes), modes)
    wgmma_bytes = wgmma_shared_bytes or shared_bytes
    found: list[Found] = []
    with TemporaryDirectory() as folder:
        compiler = Compiler(
            device_target(device), Path(folder), shared_bytes, wgmma_shared_bytes=wgmma_bytes
        )
        for number, job in enumerate(jobs):
            now = time.monotonic()
            # Hopper's own kernels must beat what was just chosen of the others.
            at = with_tiles(spec, tuned_tiles(spec, found)) if job.mode == "wgmma" else spec
            bench = LayerBench(
                at,
                job,
                weights,
                compiler=compiler,
                end=now + (end - now) / (len(jobs) - number),
                say=say,
                drop=note,
            )
            candidates = groups(spec, job, wgmma_bytes if job.mode == "wgmma" else shared_bytes)
            each = search(job, incumbent_of(at, job), candidates, bench, _known(spec, job, found))
            note(_line(each))
            found.append(each)
    return found


def _known(spec: MoeSpec, job: Job, found: Sequence[Found]) -> list[Candidate]:
    """What other jobs of the mode took, and of "wgmma" what the table has for the count."""
    known = [known_of(spec, job), *(f.chosen for f in found if f.job.mode == job.mode)]
    is_wgmma = job.mode == "wgmma"
    return list(dict.fromkeys(c for c in known if c is not None and c.tile.is_wgmma == is_wgmma))


def _tiles(spec: MoeSpec, found: Sequence[Found], old: TileTable | None) -> LayerTiles:
    """The layer's tiles with what was found; of a mode that was not tuned those of the old file."""
    tiles = tuned_tiles(spec, found)
    if old is None or shape_of(spec) not in old.shapes:
        return tiles
    kept, tuned = old.tiles(shape_of(spec)), {each.job.mode for each in found}
    changes: dict[str, Any] = {mode: getattr(kept, mode) for mode in MODES if mode not in tuned}
    if "direct" not in tuned:
        changes["split_k"] = kept.split_k
    return replace(tiles, **changes)


def _check_modes(request: TuneRequest, spec: MoeSpec) -> None:
    if request.only_wgmma and not has_wgmma(spec):
        raise UnsupportedError(
            f"--only-wgmma: got a layer {spec.title}, must be FP4 or NF3, or integers with scales "
            "of its own type, on sm_90 with Triton 3.6 or later"
        )


def _check_device(old: TileTable | None, device: torch.device, path: Path) -> None:
    if old is not None and old.device != device_name(device):
        raise InvalidArgumentError(
            f"--merge: {path} is of {old.device}, must be of this device, {device_name(device)}"
        )


def _table_of_now(path: Path, device: torch.device, rows: Sequence[Row]) -> TileTable:
    """A table of these rows, measured here and now."""
    capability = int(device_target(device).removeprefix("sm_"))
    return TileTable(
        name=path.stem,
        device=str(device_name(device)),
        compute_capability=f"{capability // 10}.{capability % 10}",
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        torch=str(torch.__version__),
        triton=triton_version(),
        rows=tuple(rows),
    )


def merged_table(old: TileTable, new: TileTable) -> TileTable:
    """The new table, and of the old one the rows of other shapes and recipes."""
    kept = [row for row in old.rows if row.shape not in new.shapes]
    return replace(new, rows=(*kept, *new.rows))


def changes_of(found: Found) -> str:
    """`gate_up.stages 3 to 4, down.span 4 to 2`; `as before` where the incumbent stays.

    Of "wgmma" those from the best of the others, or `none`.
    """
    if found.job.mode == "wgmma" and found.chosen == found.incumbent:
        return "none" if found.is_decided else "as before"
    before, after = _flat(found.incumbent), _flat(found.chosen)
    changed = [
        f"{name} {before[name]} to {value}"
        for name, value in after.items()
        if value != before[name]
    ]
    return ", ".join(changed) or "as before"


def _flat(candidate: Candidate) -> dict[str, object]:
    found: dict[str, object] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{name}.{key}" if name else str(key), each)
        else:
            found[name] = value

    add("", plain_fields(candidate.tile))
    return {**found, "split_k": candidate.split_k}


def _note(text: str) -> None:
    stderr().print(text, highlight=False)


def _line(found: Found) -> str:
    parts = [f"{found.job}: {found.incumbent_us:.1f} us, then {found.us:.1f} us"]
    parts.append(f"{changes_of(found)}; {found.timed} candidates")
    if found.dropped:
        parts.append(f"{found.dropped} dropped")
    if found.skipped:
        parts.append(f"{found.skipped} skipped for time (--minutes)")
    return ", ".join(parts)


def _as_dict(found: Found) -> dict[str, Any]:
    return {
        "mode": found.job.mode,
        "m": list(found.job.counts),
        "us": found.us,
        "incumbent_us": found.incumbent_us,
        "tile": plain_fields(found.chosen.tile),
        "split_k": found.chosen.split_k,
        "timed": found.timed,
        "skipped": found.skipped,
        "dropped": found.dropped,
    }


def _print(request: TuneRequest, found: Sequence[Found], seconds: float) -> None:
    shown = table("calls", "before us>", "us>", "gain>", "timed>", "skipped>", "dropped>", "tile")
    for each in found:
        shown.add_row(
            str(each.job),
            f"{each.incumbent_us:.1f}",
            f"{each.us:.1f}",
            f"{1 - each.us / each.incumbent_us:.1%}",
            str(each.timed),
            str(each.skipped),
            str(each.dropped),
            changes_of(each),
        )
    stdout().print(f"{request.shape} {request.recipe}, {seconds:.0f} s, written to {request.out}")
    stdout().print(shown)
