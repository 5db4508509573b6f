"""Checkpoints as a stage sees them: names, shapes and dtypes, and a way to read some tensors.

State dicts, files of torch.save and directories of torch.distributed.checkpoint are here, safetensors files beside.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...text import dtype_name, shape_text


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{shape_text(self.shape)}"


class Checkpoint(Protocol):
    """Saved tensors and objects by name, each read when it is asked for."""

    @property
    def where(self) -> str:
        """The path, or what messages say instead."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors and objects."""

    def entry(self, name: str) -> Entry | None:
        """Return shape and dtype of a tensor; None for an object that is no tensor."""

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into others of their shapes, converted to their dtypes and devices."""

    def load_object(self, name: str) -> Any:
        """Return the tensor or object that is saved under a name."""


class InMemory:
    """A state dict."""

    def __init__(self, values: Mapping[str, Any], where: str = "this state dict") -> None:
        self.where = where
        self.values = values

    @property
    def names(self) -> Collection[str]:
        return self.values.keys()

    def entry(self, name: str) -> Entry | None:
        value = self.values[name]
        return Entry(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None

    def read(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            if self.values[name].device.type == "meta":
                raise CheckpointError(f"{name} is on the meta device in {self.where}: it has no values to read")
            target.copy_(self.values[name])

    def load_object(self, name: str) -> Any:
        return self.values[name]


def open_torch_file(path: Path) -> InMemory:
    """Open a file of torch.save: a state dict whose tensors stay in the file until they are used."""
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


class DistributedCheckpoint:
    """A directory that torch.distributed.checkpoint has written, from any number of ranks."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow to import, and rarely used

        self.where = str(path)
        self._reader = FileSystemReader(path)
        self._saved = self._reader.read_metadata().state_dict_metadata

    @property
    def names(self) -> Collection[str]:
        return self._saved.keys()

    def entry(self, name: str) -> Entry | None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        saved = self._saved[name]
        return Entry(tuple(saved.size), saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None

    def read(self, targets: Mapping[str, Tensor]) -> None:
        self._load({name: target.detach() for name, target in targets.items()})

    def load_object(self, name: str) -> Any:
        entry = self.entry(name)
        into: dict[str, Any] = {name: None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)}
        self._load(into)
        return into[name]

    def _load(self, into: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings():
            # It warns that every rank reads for itself, which is intended.
            warnings.filterwarnings("ignore", ".*single process")
            load(into, storage_reader=self._reader, no_dist=True)
