"""Files of torch.save."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from .checkpoint import InMemory


def open_torch_file(path: Path) -> InMemory:
    """A state dict whose tensors stay in the file until they are used."""
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a state dict: {str(error).strip().splitlines()[0]}. Save "
            "model.state_dict() alone with torch.save, in its default format"
        ) from error
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} holds {_summary(content)} and no tensors by name: save model.state_dict() alone, or pass the part "
            "that has them: checkpoint=torch.load(path, mmap=True)[...]"
        )
    return InMemory(content, str(path))


def _summary(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a {type(content).__name__} of {', '.join(map(repr, list(content)[:6])) or 'nothing'}"
    return f"a {type(content).__name__}"
