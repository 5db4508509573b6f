"""Checkpoints of training jobs: saved by all ranks, complete or not there, loaded under any other cut.

Begin with save.py and load.py. folder.py knows the files, ranks.py the processes, contents.py what is saved of each.
"""

from __future__ import annotations

from .export import export_safetensors
from .folder import latest_checkpoint, replace_directory
from .load import LoadedCheckpoint, load_checkpoint
from .save import CheckpointSave, cannot_write, save_checkpoint

__all__ = [
    "CheckpointSave",
    "LoadedCheckpoint",
    "cannot_write",
    "export_safetensors",
    "latest_checkpoint",
    "load_checkpoint",
    "replace_directory",
    "save_checkpoint",
]
