"""Checkpoint files of DeepSeek-V4: names, tensors, reading, writing; imported as `dsv4.convert`."""

from dsv4.convert.inspect import Report, inspect_checkpoint
from dsv4.convert.problems import CheckpointError
from dsv4.convert.reader import Checkpoint, open_checkpoint
from dsv4.convert.recipe import convert_checkpoint
from dsv4.convert.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Report",
    "convert_checkpoint",
    "inspect_checkpoint",
    "open_checkpoint",
    "write_checkpoint",
]
