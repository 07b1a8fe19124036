"""Checkpoint files of DeepSeek-V4: names, tensors, reading, writing; imported as `dsv4.convert`."""

from dsv4.convert.problems import CheckpointError
from dsv4.convert.reader import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]
