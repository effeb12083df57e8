"""The exceptions that firesteel raises.

    Exception
    └── FiresteelError
        ├── ArenaError            (ValueError)   a workspace too small, freed, or of another stream
        ├── CheckpointError       (ValueError)   missing, corrupt, or against its own config
        ├── DriverError           (RuntimeError) the GPU's driver refuses a call
        ├── ForkedError           (RuntimeError) a forked process uses what its parent made ready
        ├── InvalidArgumentError  (ValueError)   a caller's value is not allowed
        ├── NotPlannedError       (LookupError)  a launch that its plan does not hold
        └── UnsupportedError      (ValueError)   valid, and not supported here

Every message names the argument or tensor, then the value, then what is allowed.
"""

from __future__ import annotations

__all__ = [
    "ArenaError",
    "CheckpointError",
    "DriverError",
    "FiresteelError",
    "ForkedError",
    "InvalidArgumentError",
    "NotPlannedError",
    "UnsupportedError",
]


class FiresteelError(Exception):
    """Base of every exception that firesteel raises on purpose."""


class CheckpointError(FiresteelError, ValueError):
    """A checkpoint is missing a file or tensor, is corrupt, or disagrees with its own config."""


class InvalidArgumentError(FiresteelError, ValueError):
    """An argument has a value that is not allowed."""


class UnsupportedError(FiresteelError, ValueError):
    """A format, bit width, group size, model family or option that firesteel does not support."""


class ArenaError(FiresteelError, ValueError):
    """A workspace is too small, on another device, freed, or belongs to another stream."""


class ForkedError(FiresteelError, RuntimeError):
    """A process that was forked uses kernels that its parent made ready."""


class NotPlannedError(FiresteelError, LookupError):
    """A launch that its plan does not hold; names the nearest planned key and what differs."""


class DriverError(FiresteelError, RuntimeError):
    """The GPU's driver refuses a call; names the call and the driver's own words."""
