"""Read checkpoints of torch.distributed.checkpoint without running code from their files.

torch unpickles their descriptions and objects as they are. Imported when it is used: torch.distributed.checkpoint is
slow to import.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ...errors import CheckpointError
from ...torch_internals import METADATA_FILE, unpickle_metadata


class _SafeReader(FileSystemReader):
    """Reader whose description of the checkpoint may contain nothing but that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = _read_metadata(Path(self.path))
        return self._metadata


class _SafePlanner(DefaultLoadPlanner):
    """Planner that loads objects with weights_only=True: tensors, numbers, texts, and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            first = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{name} cannot be read without running code from the file: {first}") from error
        self.original_state_dict[name] = self.state_dict[name]


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA_FILE
    try:
        metadata = unpickle_metadata(path.read_bytes())
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a whole description of a checkpoint of torch.distributed.checkpoint: {error}. No code is "
            "run from it; copy the checkpoint anew, or take another one"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, and no description of a checkpoint")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class DistributedReader:
    """A directory of torch.distributed.checkpoint, from any number of ranks: its entries, and a way to read some."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = _SafeReader(path)
        self.metadata = self._reader.read_metadata()

    def read(self, into: dict[str, Any]) -> None:
        """Fill the tensors in place, DTensors by their shards, and replace other values by what was saved."""
        with warnings.catch_warnings():
            # It warns that every rank reads for itself, which is intended.
            warnings.filterwarnings("ignore", ".*single process")
            planner = _SafePlanner(flatten_state_dict=False)
            load(into, storage_reader=self._reader, planner=planner, no_dist=True)
