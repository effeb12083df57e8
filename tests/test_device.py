"""What is asked of `torch.cuda`, of a stand-in for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from firesteel.device import free_bytes, wait_for_stream
from firesteel.errors import ArenaError

GPU = torch.device("cuda", 1)
CURRENT, DEFAULT, OTHER, NEW = 7, 0, 9, 33


@dataclass
class Stream:
    cuda_stream: int
    waits: list[int] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.cuda_stream)


class Streams:
    """Those of one GPU.

    Fields
        current    the one that is current
        capturing  handles of those under capture
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = Stream(CURRENT)
        self.capturing: set[int] = set()
        asked = {
            "stream": self._enter,
            "default_stream": {GPU: Stream(DEFAULT)}.__getitem__,
            "current_stream": lambda device: {GPU: self.current}[device],
            # Of 0, which is no handle to torch, it makes a new stream.
            "ExternalStream": lambda handle, device: {GPU: Stream(handle or NEW)}[device],
            "is_current_stream_capturing": lambda: self.current.cuda_stream in self.capturing,
        }
        for name, answer in asked.items():
            patch.setattr(torch.cuda, name, answer)

    @contextmanager
    def _enter(self, stream: Stream) -> Generator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.mark.parametrize("handle", [DEFAULT, OTHER])
def test_the_current_stream_waits_for_the_one_of_a_handle(streams: Streams, handle: int) -> None:
    wait_for_stream(GPU, handle)
    assert streams.current == Stream(CURRENT, [handle])


@pytest.mark.parametrize("handle", [DEFAULT, OTHER])
def test_a_stream_under_capture_is_not_waited_for(streams: Streams, handle: int) -> None:
    streams.capturing.add(handle)
    with pytest.raises(ArenaError, match=f"stream {handle:#x} used it last and is under CUDA"):
        wait_for_stream(GPU, handle)
    assert streams.current == Stream(CURRENT)


def test_memory_that_torch_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", {GPU: (1000, 4000)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {GPU: 700}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {GPU: 500}.__getitem__)
    assert free_bytes(GPU) == 1200
