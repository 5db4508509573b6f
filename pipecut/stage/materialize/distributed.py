"""Read checkpoints of torch.distributed.checkpoint without running code from their files.

torch unpickles their descriptions and objects as they are. Imported when it is used: torch.distributed.checkpoint is
slow to import.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ...errors import CheckpointError
from ...files import inside, open_regular, read_bytes
from ...text import first_line
from ...torch_internals import METADATA_FILE, unpickle_metadata

_LARGEST_DESCRIPTION = 4 << 30  # bytes


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
        except Exception as error:  # a damaged pickle may fail in any way that Python has
            raise CheckpointError(
                f"{name} cannot be read without running code from the file: {first_line(error)}"
            ) from error
        self.original_state_dict[name] = self.state_dict[name]


def _read_metadata(folder: Path) -> Metadata:
    path = folder / METADATA_FILE
    content = read_bytes(path, CheckpointError, _LARGEST_DESCRIPTION)
    try:
        metadata = _checked(path, unpickle_metadata(content))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way that Python has
        raise CheckpointError(
            f"{path} is not a whole description of a checkpoint of torch.distributed.checkpoint: {first_line(error)}. "
            "No code is run from it; copy the checkpoint anew, or take another one"
        ) from error
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def _checked(path: Path, metadata: object) -> Metadata:
    """Return a description whose tensors are whole and whose files lie beside it; raise any error otherwise."""
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, and no description of a checkpoint")
    for name, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, BytesStorageMetadata):
            continue
        if not isinstance(name, str) or not isinstance(saved.properties.dtype, torch.dtype) or not _is_whole(saved):
            raise CheckpointError(
                f"{path} is damaged: the parts of {name} do not make up a tensor of the size {tuple(saved.size)}. Copy "
                "the checkpoint anew, or take another one"
            )
    for index, info in metadata.storage_data.items():
        inside(path.parent, info.relative_path, CheckpointError, str(path))
        if not isinstance(index.fqn, str) or info.offset < 0 or info.length < 0:
            raise CheckpointError(f"{path} is damaged: {index.fqn} lies at {info.offset} in {info.relative_path}")
    return metadata


def _is_whole(saved: TensorStorageMetadata) -> bool:
    """Return True if the chunks of a tensor fill it, and none lies upon another."""
    chunks = [chunk for chunk in saved.chunks if math.prod(chunk.sizes)]
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(saved.size):
        return False
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        if not len(saved.size) == len(chunk.offsets) == len(chunk.sizes) or min(chunk.offsets, default=0) < 0:
            return False
        if any(end > size for end, size in zip(ends, saved.size, strict=True)):
            return False
    return not _overlap(sorted(chunks, key=lambda chunk: tuple(chunk.offsets)))


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return True if two of the chunks, in the order of their offsets, have an element in common."""
    for number, chunk in enumerate(chunks):
        for other in chunks[number + 1 :]:
            if not chunk.offsets or other.offsets[0] >= chunk.offsets[0] + chunk.sizes[0]:
                break  # so do all that follow
            dims = range(1, len(chunk.offsets))
            if all(
                other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                and chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                for dim in dims
            ):
                return True
    return False


class DistributedReader:
    """A directory of torch.distributed.checkpoint, from any number of ranks: its entries, and a way to read some."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._reader = _SafeReader(path)
        self.metadata = self._reader.read_metadata()

    def read(self, into: dict[str, Any]) -> None:
        """Fill the tensors in place, DTensors by their shards, and replace other values by what was saved."""
        self._check_files(into)
        with warnings.catch_warnings():
            # It warns that every rank reads for itself, which is intended.
            warnings.filterwarnings("ignore", ".*single process")
            planner = _SafePlanner(flatten_state_dict=False)
            try:
                load(into, storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointError:
                raise
            except (Exception, CheckpointException) as error:
                raise CheckpointError(f"{self._path} cannot be read: {_reason(error)}") from error

    def _check_files(self, names: Collection[str]) -> None:
        """Raise unless the files of some names are regular ones that reach as far as the description says."""
        ends: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in names:
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self._path / name
            with open_regular(file, CheckpointError) as opened:
                size = os.fstat(opened.fileno()).st_size
            if size < end:
                raise CheckpointError(
                    f"{file} has {size} of {end} bytes: copy the checkpoint anew, or take another one"
                )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or of the first that torch.distributed.checkpoint has collected."""
    if isinstance(error, CheckpointException):
        return next((first_line(failure[0]) for failure in error.failures.values()), first_line(error))
    return first_line(error)
