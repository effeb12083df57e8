"""Sizes and offsets of the workspace, and the arena that holds it: views, never allocations."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from firesteel.errors import ArenaError, InvalidArgumentError
from firesteel.launch.spec import Region

__all__ = ["Arena", "Workspace"]

REGION_ALIGNMENT = 256
FREE = -1


class _Owner:
    """Who uses the memory of an arena.

    Fields
        cell      the stream, and a lock on the launches of a call
        launcher  the kind that shares the cell; None before the first
    """

    def __init__(self) -> None:
        self.cell: Final = array("q", [FREE, 0])
        self.launcher: str | None = None


# By device and address: arenas over the same memory have one owner.
_owners: WeakValueDictionary[tuple[torch.device, int], _Owner] = WeakValueDictionary()
_owners_lock = threading.Lock()


def _owner_of(storage: Tensor) -> _Owner:
    address = storage.data_ptr()
    # No memory is shared where there is none.
    if not address:
        return _Owner()
    with _owners_lock:
        place = (storage.device, address)
        found = _owners.get(place)
        if found is None:
            found = _owners[place] = _Owner()
        return found


@dataclass(frozen=True, slots=True)
class Workspace:
    """Regions and where each starts.

    Fields
        regions    by name
        offsets    by name, in bytes, multiples of 256
        num_bytes  of the whole
    """

    regions: dict[str, Region]
    offsets: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Workspace:
        """Lay regions out one after the other."""
        offsets: dict[str, int] = {}
        end = 0
        for region in regions:
            if region.name in offsets:
                raise InvalidArgumentError(f"workspace: two regions are named {region.name!r}")
            offsets[region.name] = end
            end += -(-region.num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return cls({region.name: region for region in regions}, offsets, end)

    def check_holds(self, num_tokens: int, regions: Sequence[Region]) -> None:
        """Refuse a count whose regions do not fit.

        Raises
            InvalidArgumentError: a region is unknown, of another type, or larger.
        """
        if [region.name for region in regions] != list(self.regions):
            raise InvalidArgumentError(
                f"workspace({num_tokens}): regions {[r.name for r in regions]}, must be "
                f"{list(self.regions)} at every count"
            )
        for region in regions:
            planned = self.regions[region.name]
            if region.dtype != planned.dtype or region.num_bytes > planned.num_bytes:
                raise InvalidArgumentError(
                    f"workspace({num_tokens}): {region.name} takes {region.num_bytes} bytes of "
                    f"{region.dtype}, at the largest count {planned.num_bytes} of {planned.dtype}"
                )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bytes": self.num_bytes,
            "regions": [
                {
                    "name": name,
                    "dtype": region.dtype,
                    "shape": list(region.shape),
                    "offset": self.offsets[name],
                }
                for name, region in self.regions.items()
            ],
        }


class Arena:
    """Memory that the calls of one stream share, one after the other.

    It belongs to the first stream that runs on it. Another stream is refused, since its launches
    could overwrite what the first still reads, until `release` is called. A stream under capture is
    let through: the order of a replay is the caller's. Arenas whose storages start at one address
    have one owner; another way to overlap is not noticed.

    Args:
        storage: uint8, contiguous, at a multiple of 256 bytes. Held, and never replaced.

    Raises
        InvalidArgumentError: the storage is of another kind.
    """

    def __init__(self, storage: Tensor) -> None:
        if storage.dtype != torch.uint8 or storage.dim() != 1 or not storage.is_contiguous():
            raise InvalidArgumentError(
                f"storage: got {storage.dtype} {list(storage.shape)}, must be contiguous uint8 [n]"
            )
        if storage.data_ptr() % REGION_ALIGNMENT:
            raise InvalidArgumentError(
                f"storage: starts at {storage.data_ptr():#x}, must be at a multiple of "
                f"{REGION_ALIGNMENT}"
            )
        self.storage = storage
        self.address = storage.data_ptr()
        self._owner = _owner_of(storage)

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> Arena:
        """An arena of memory that is allocated here and now."""
        if num_bytes < 0:
            raise InvalidArgumentError(f"num_bytes: got {num_bytes}, must be 0 or more")
        raw = torch.empty(num_bytes + REGION_ALIGNMENT, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % REGION_ALIGNMENT
        return cls(raw[start : start + num_bytes])

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage."""
        return self.storage.numel()

    @property
    def is_freed(self) -> bool:
        """Whether the memory behind the storage is no longer what it was."""
        return self.storage.data_ptr() != self.address

    @property
    def owner(self) -> int | None:
        """The stream that it belongs to; None before the first run and after `release`."""
        stream = self.owner_cell[0]
        return None if stream == FREE else stream

    @property
    def owner_cell(self) -> array[int]:
        """The cell that launchers share: the owner, and a lock on the launches of a call."""
        return self._owner.cell

    def take(self, launcher: str) -> None:
        """Let launchers of this kind use it.

        Raises
            ArenaError: another kind does; they do not see each other's locks.
        """
        if self._owner.launcher not in (None, launcher):
            raise ArenaError(
                f"arena: got the {launcher} launcher, must be {self._owner.launcher}, which uses "
                "it already"
            )
        self._owner.launcher = launcher

    def release(self) -> None:
        """Let another stream take it. The caller has made that stream wait for the last one."""
        self.owner_cell[0] = FREE

    def __repr__(self) -> str:
        """`Arena(4096 bytes on cuda:0, stream 0x0)`."""
        owner = "free" if self.owner is None else f"stream {self.owner:#x}"
        return f"Arena({self.num_bytes} bytes on {self.storage.device}, {owner})"
