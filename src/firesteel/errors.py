"""The exceptions that firesteel raises.

    Exception
    └── FiresteelError
        ├── CheckpointError       (ValueError)  missing, corrupt, or against its own config
        ├── InvalidArgumentError  (ValueError)  a caller's value is not allowed
        └── UnsupportedError      (ValueError)  valid, and not supported here

Every message names the argument or tensor, then the value, then what is allowed.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "FiresteelError", "InvalidArgumentError", "UnsupportedError"]


class FiresteelError(Exception):
    """Base of every exception that firesteel raises on purpose."""


class CheckpointError(FiresteelError, ValueError):
    """A checkpoint is missing a file or tensor, is corrupt, or disagrees with its own config."""


class InvalidArgumentError(FiresteelError, ValueError):
    """An argument has a value that is not allowed."""


class UnsupportedError(FiresteelError, ValueError):
    """A format, bit width, group size, model family or option that firesteel does not support."""
