"""What a tensor must be: a thorough check that explains, and a quick one written for each spec.

Both refuse the same tensors. The quick one runs at each call, so it is generated as straight-line
Python, as `dataclasses` generates `__init__`: a loop over operands costs half as much again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from firesteel.errors import ArenaError, InvalidArgumentError
from firesteel.launch.key import DTYPES
from firesteel.launch.spec import Operand
from firesteel.launch.workspace import Arena, Workspace

__all__ = ["check_arena", "check_operand", "quick_caller"]

ALIGNMENT = 16


def quick_caller(
    operands: Sequence[Operand], device_index: int, launch: Callable[..., int]
) -> Callable[..., int | None]:
    """A function of a stream and the tensors of a call that checks them and calls `launch`.

    `launch` is given the token count, the stream, and for each operand its address and, where it
    has one, its row stride. The function returns what `launch` does, or None, with nothing
    launched, for a tensor that `check_operand` refuses.

    Raises (the function)
        AttributeError, IndexError, TypeError: something is no tensor, or they are not as many.
    """
    names = [f"t{number}" for number in range(len(operands))]
    scope: dict[str, Any] = {
        "launch": launch,
        "row_stride": _row_stride,
        "is_grad_enabled": torch.is_grad_enabled,
    }
    # A tensor of shape alone has the device number of the CPU.
    no_memory = " or not {}.is_cpu" if device_index < 0 else ""
    lines = [f"def call(stream, {', '.join(names)}):", " M = t0.shape[0]"]
    if wanting := [
        f"{name}.requires_grad"
        for name, operand in zip(names, operands, strict=True)
        if DTYPES[operand.dtype].is_floating_point
    ]:
        lines.append(f" if is_grad_enabled() and ({' or '.join(wanting)}): return None")
    values: list[str] = []
    for number, (name, operand) in enumerate(zip(names, operands, strict=True)):
        _, *tail = operand.shape_for(0)
        scope |= {f"dtype{number}": DTYPES[operand.dtype], f"operand{number}": operand}
        shape = "".join(f"{size}, " for size in ("M", *tail))
        lines.append(
            f" if {name}.dtype is not dtype{number} or {name}.shape != ({shape})"
            f" or {name}.get_device() != {device_index}{no_memory.format(name)}: return None"
        )
        lines.append(f" p{number} = {name}.data_ptr()")
        if math.prod(tail):
            lines.append(f" if not p{number} and M: return None")
        if operand.is_aligned:
            lines.append(f" if p{number} & {ALIGNMENT - 1}: return None")
        values.append(f"p{number}")
        if operand.has_stride:
            lines += [
                f" if {name}.is_contiguous(): s{number} = {math.prod(tail) // operand.row_unit}",
                f" elif (s{number} := row_stride({name}, operand{number})) is None: return None",
            ]
            values.append(f"s{number}")
        else:
            lines.append(f" if not {name}.is_contiguous(): return None")
    lines.append(f" return launch(M, stream, {', '.join(values)})")
    # Only integers and names made here stand in the text.
    exec(_compiled("\n".join(lines)), scope)
    # Taken out of its own globals: a cycle would keep the memory behind `launch` alive.
    made: Callable[..., int | None] = scope.pop("call")
    return made


@lru_cache(maxsize=64)
def _compiled(text: str) -> CodeType:
    return compile(text, "<firesteel call>", "exec")


def _row_stride(tensor: Tensor, operand: Operand) -> int | None:
    """How far apart, in units, the rows of a strided tensor lie; None where it is refused."""
    _, *tail = operand.shape_for(0)
    first, *inner = tensor.stride()
    if not operand.has_stride or inner != [math.prod(tail[at + 1 :]) for at in range(len(tail))]:
        return None
    # Rows that are written must not overlap.
    if (operand.is_written and first < math.prod(tail)) or first % operand.row_unit:
        return None
    return first // operand.row_unit


def check_operand(
    operand: Operand, tensor: object, num_tokens: int | None, device: torch.device
) -> None:
    """Refuse a tensor that is not what the operand says.

    Raises
        InvalidArgumentError: names the operand, what it is, and what it must be.
    """
    name = operand.name
    if not isinstance(tensor, Tensor):
        raise InvalidArgumentError(f"{name}: got {type(tensor).__name__}, must be a tensor")
    is_known = not operand.is_any_size
    shape = operand.shape_for(num_tokens or 0) if is_known else (tensor.numel(),)
    if tensor.dtype is not DTYPES[operand.dtype]:
        raise InvalidArgumentError(f"{name}: got {tensor.dtype}, must be {DTYPES[operand.dtype]}")
    if num_tokens is None or tuple(tensor.shape) != shape:
        raise InvalidArgumentError(
            f"{name}: got shape {list(tensor.shape)}, must be "
            f"[{', '.join(map(str, operand.shape))}]"
            + (f" with M = {num_tokens}" if operand.is_per_call else "")
        )
    if tensor.device != device:
        raise InvalidArgumentError(f"{name}: is on {tensor.device}, must be on {device}")
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(f"{name}: got {tensor.layout}, must be torch.strided")
    if not tensor.is_contiguous() and (
        not operand.is_per_call or _row_stride(tensor, operand) is None
    ):
        raise InvalidArgumentError(
            f"{name}: got strides {tensor.stride()}, must be contiguous"
            + (
                f", but for the distance of rows (a multiple of {operand.row_unit})"
                if operand.has_stride
                else ""
            )
        )
    if tensor.requires_grad and operand.is_per_call and torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"{name}: requires a gradient, must not while gradients are enabled (detach it, or run "
            "under torch.no_grad()): launches record none"
        )
    # What is given once can afford the look behind a view of memory that was freed.
    start = tensor if operand.is_per_call else tensor.untyped_storage()
    if tensor.numel() and not start.data_ptr():
        raise InvalidArgumentError(
            f"{name}: has no memory (address 0) for its {tensor.numel()} elements, must have"
        )
    if operand.is_aligned and tensor.data_ptr() % ALIGNMENT:
        raise InvalidArgumentError(
            f"{name}: starts at {tensor.data_ptr():#x}, must be at a multiple of {ALIGNMENT} bytes"
        )


def check_arena(arena: object, workspace: Workspace, device: torch.device) -> None:
    """Refuse an arena that is too small or elsewhere.

    Raises
        ArenaError: it is; the message has the bytes requested and provided.
    """
    if not isinstance(arena, Arena):
        raise ArenaError(f"arena: got {type(arena).__name__}, must be an Arena")
    if arena.storage.device != device:
        raise ArenaError(f"arena: is on {arena.storage.device}, must be on {device}")
    if arena.num_bytes < workspace.num_bytes:
        raise ArenaError(
            f"arena: requested {workspace.num_bytes} bytes, provided {arena.num_bytes}"
        )
    if workspace.num_bytes and arena.is_freed:
        raise ArenaError("arena: its storage was freed or replaced")
