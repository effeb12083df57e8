"""The only asker of `torch.cuda`."""

from __future__ import annotations

import torch

from firesteel.errors import InvalidArgumentError

__all__ = ["checked_device", "default_device", "device_name"]


def default_device() -> torch.device:
    """The current GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def checked_device(device: str | torch.device) -> torch.device:
    """A device that tensors can be put on.

    Raises
        InvalidArgumentError: no such device here, or "meta", which holds no numbers.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgumentError(f"device: got {device!r}: {error}") from error
    if found.type == "meta":
        raise InvalidArgumentError("device: got 'meta', must be one that holds numbers")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"device: got {device!r}, there are {torch.cuda.device_count()} CUDA devices here"
        )
    return found


def device_name(device: torch.device) -> str | None:
    """The name of a GPU; None for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
