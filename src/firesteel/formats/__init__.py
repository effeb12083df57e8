"""Stored bytes to numbers and back, exactly: one file a checkpoint format."""
