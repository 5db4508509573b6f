"""Directories of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .checkpoint import Entry


class DistributedCheckpoint:
    """A directory that torch.distributed.checkpoint has written, from any number of ranks."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._reader = FileSystemReader(path)
        self._saved = self._reader.read_metadata().state_dict_metadata

    @property
    def names(self) -> Collection[str]:
        return self._saved.keys()

    def entry(self, name: str) -> Entry | None:
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
        with warnings.catch_warnings():
            # Every rank reads for itself, what it needs and when it likes: that is meant.
            warnings.filterwarnings("ignore", ".*single process")
            load(into, storage_reader=self._reader, no_dist=True)
