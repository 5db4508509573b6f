"""Stages of a model that exists only on the meta device get memory and values, each on its own rank."""

from __future__ import annotations

from .load import CheckpointLike
from .materialize import InitFunction, Values, check_has_memory, materialize

__all__ = ["CheckpointLike", "InitFunction", "Values", "check_has_memory", "materialize"]
