from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.errors import ArenaError, InvalidArgumentError
from firesteel.launch import Arena, Region
from firesteel.launch.workspace import Workspace

CPU = torch.device("cpu")
regions = st.lists(
    st.builds(
        Region,
        st.text(min_size=1, max_size=3),
        st.sampled_from(["u8", "bf16", "fp32", "i64"]),
        st.lists(st.integers(0, 700), max_size=3).map(tuple),
    ),
    unique_by=lambda region: region.name,
    max_size=6,
)


@given(regions=regions)
def test_regions_are_aligned_and_do_not_overlap(regions: list[Region]) -> None:
    made = Workspace.of(regions)
    end = 0
    for region in regions:
        start = made.offsets[region.name]
        assert start % 256 == 0
        assert start >= end
        end = start + region.num_bytes
    assert end <= made.num_bytes < end + 256
    made.check_holds(3, regions)
    listed = made.as_dict()
    assert listed["bytes"] == made.num_bytes
    assert [region["name"] for region in listed["regions"]] == list(made.offsets)


def test_two_regions_of_one_name_are_refused() -> None:
    region = Region("acc", "fp32", (4,))
    with pytest.raises(InvalidArgumentError, match="workspace: two regions are named 'acc'"):
        Workspace.of((region, region))


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((), r"workspace\(5\): regions \[\], must be \['acc'\] at every count"),
        ((Region("sum", "fp32", (4,)),), r"regions \['sum'\], must be \['acc'\]"),
        ((Region("acc", "fp32", (5,)),), "acc takes 20 bytes of fp32, at the largest count 16 of"),
        ((Region("acc", "i32", (4,)),), "acc takes 16 bytes of i32, at the largest count 16 of fp"),
    ],
)
def test_regions_that_the_largest_count_does_not_hold_are_refused(
    regions: tuple[Region, ...], message: str
) -> None:
    made = Workspace.of((Region("acc", "fp32", (4,)),))
    with pytest.raises(InvalidArgumentError, match=message):
        made.check_holds(5, regions)


@pytest.mark.parametrize("num_bytes", [0, 1, 255, 256, 1000])
def test_an_arena_has_its_bytes_at_a_multiple_of_256(num_bytes: int) -> None:
    arena = Arena.allocate(num_bytes, CPU)
    assert arena.num_bytes == num_bytes
    assert arena.storage.data_ptr() % 256 == 0
    assert arena.address == arena.storage.data_ptr()
    assert not arena.is_freed
    assert arena.owner is None
    assert repr(arena) == f"Arena({num_bytes} bytes on cpu, free)"


def test_an_arena_of_negative_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_bytes: got -1, must be 0 or more"):
        Arena.allocate(-1, CPU)


@pytest.mark.parametrize(
    "storage",
    [
        torch.zeros(256, dtype=torch.int8),
        torch.zeros(16, 16, dtype=torch.uint8),
        torch.zeros(512, dtype=torch.uint8)[::2],
    ],
)
def test_storage_of_another_kind_is_refused(storage: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be contiguous uint8 \[n\]"):
        Arena(storage)


def test_storage_off_256_bytes_is_refused() -> None:
    aligned = Arena.allocate(300, CPU).storage
    with pytest.raises(InvalidArgumentError, match=r"starts at 0x.*, must be at a multiple of 256"):
        Arena(aligned[16:])


def test_an_owner_can_be_seen_and_released() -> None:
    arena = Arena.allocate(4, CPU)
    arena.owner_cell[0] = 0x7000
    assert arena.owner == 0x7000
    assert repr(arena) == "Arena(4 bytes on cpu, stream 0x7000)"
    arena.release()
    assert arena.owner is None
    # The default stream is number 0, and an owner too.
    arena.owner_cell[0] = 0
    assert arena.owner == 0


def test_arenas_over_one_storage_have_one_owner() -> None:
    first = Arena.allocate(4096, CPU)
    second, apart = Arena(first.storage[:512]), Arena(first.storage[1024:])
    first.owner_cell[0] = 0x7000
    assert second.owner == 0x7000
    assert apart.owner is None
    second.release()
    assert first.owner is None


def test_arenas_of_nothing_share_nothing() -> None:
    first, second = Arena.allocate(0, CPU), Arena.allocate(0, CPU)
    first.owner_cell[0] = 0x7000
    assert second.owner is None


def test_an_owner_ends_with_its_arenas() -> None:
    storage = Arena.allocate(4096, CPU).storage
    Arena(storage).owner_cell[0] = 0x7000
    assert Arena(storage).owner is None


def test_launchers_of_two_kinds_are_refused() -> None:
    arena = Arena.allocate(4096, CPU)
    arena.take("native")
    arena.take("native")
    with pytest.raises(ArenaError, match="got the python launcher, must be native, which uses it"):
        Arena(arena.storage).take("python")


@pytest.mark.parametrize("shape", [(1.0,), (-1,), (True,), ("M",), (None, 2)])
def test_a_region_of_no_size_is_refused(shape: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"region acc: shape .*, must be sizes, integers"
    ):
        Region("acc", "fp32", shape)


def test_memory_that_was_freed_or_replaced_is_noticed() -> None:
    arena = Arena.allocate(4096, CPU)
    arena.storage.untyped_storage().resize_(0)
    assert arena.is_freed
    arena = Arena.allocate(4096, CPU)
    arena.storage.data = torch.zeros(4096, dtype=torch.uint8)
    assert arena.is_freed
