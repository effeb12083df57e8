"""Memory that only seems large: what kernels reach past 2**31 without so much of it."""

import mmap

import torch
from torch import Tensor


def sparse_memory(num_bytes: int) -> mmap.mmap:
    """Zeros of which only touched pages take memory, so that offsets may pass 2**31."""
    no_reserve = 0x4000
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)


def at(memory: mmap.mmap, num_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements at a byte offset; a kernel given the tensor may reach further."""
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=num_bytes)
