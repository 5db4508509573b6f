"""Give the stages of a model on the meta device memory and values, each on its own rank, and save them.

Begin with materialize.py; load.py opens checkpoints and reads from them.
"""

from __future__ import annotations

from .checkpoint import open_distributed, write_safetensors
from .load import SAVE_KEY, TRAINING_MANIFEST, TRAINING_PREFIX, CheckpointLike
from .materialize import InitFunction, Values, materialize
from .save import save_stage, stage_file, tensors_to_save, write_index
from .tensors import empty_weights

__all__ = [
    "SAVE_KEY",
    "TRAINING_MANIFEST",
    "TRAINING_PREFIX",
    "CheckpointLike",
    "InitFunction",
    "Values",
    "empty_weights",
    "materialize",
    "open_distributed",
    "save_stage",
    "stage_file",
    "tensors_to_save",
    "write_index",
    "write_safetensors",
]
