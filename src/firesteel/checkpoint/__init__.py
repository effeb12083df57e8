"""Checkpoints on disk: files, model families, and where each quantised matrix is."""

from firesteel.checkpoint.files import Checkpoint, Reader, resolve
from firesteel.checkpoint.layers import Contents, ExpertLayer, scan

__all__ = ["Checkpoint", "Contents", "ExpertLayer", "Reader", "resolve", "scan"]
