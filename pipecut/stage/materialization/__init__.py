"""Stages of a model that exists only on the meta device get memory and values, each on its own rank."""

from __future__ import annotations

from .initialize import InitFunction
from .materialize import Values, check_has_memory, materialize
from .open_checkpoint import CheckpointLike

__all__ = ["CheckpointLike", "InitFunction", "Values", "check_has_memory", "materialize"]
