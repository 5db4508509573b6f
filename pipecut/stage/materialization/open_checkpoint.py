"""Which kind of checkpoint a path is."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError, did_you_mean
from .checkpoint import Checkpoint, Entry, InMemory
from .safetensors_format import SafetensorsFile
from .torch_file import open_torch_file

INDEX = "model.safetensors.index.json"
CheckpointLike = str | os.PathLike[str] | Mapping[str, Any]


def open_checkpoint(given: CheckpointLike) -> Checkpoint:
    """What can be read from a path, or a state dict."""
    if isinstance(given, Mapping):
        return InMemory(given)
    if not isinstance(given, str | os.PathLike):
        raise CheckpointError(f"checkpoint must be a path or a state dict, got {type(given).__name__}")
    path = Path(given)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        beside = [str(path.parent / name) for name in os.listdir(path.parent)] if path.parent.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint {path}: no such file or directory.{did_you_mean(str(path), beside)}"
        )
    return _read_index(path) if path.name.endswith(".index.json") else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        start = file.read(4)
    is_torch = start[:2] in (b"PK", b"\x80\x02")  # a zip file; a pickle, as torch wrote long ago
    return open_torch_file(path) if is_torch else SafetensorsFile(path)


def _open_directory(path: Path) -> Checkpoint:
    if (path / ".metadata").exists():
        from .distributed_checkpoint import DistributedCheckpoint  # takes a second, and most never need it

        return DistributedCheckpoint(path)
    if (path / INDEX).exists():
        return _read_index(path / INDEX)
    indices = sorted(path.glob("*.index.json"))
    if len(indices) > 1:
        raise CheckpointError(f"{path} has several indices, {_listed(indices)}: pass the path of one")
    if indices:
        return _read_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if files:
        return _of_all_files(path, files)
    raise CheckpointError(
        f"{path} is not a checkpoint: it has no {INDEX}, no .safetensors file and no .metadata of "
        f"torch.distributed.checkpoint. It has {_listed(sorted(path.iterdir())) or 'no files'}; "
        "a file of torch.save is passed by its own path"
    )


def _listed(paths: list[Path]) -> str:
    return ", ".join(path.name for path in paths[:6]) + (", ..." if len(paths) > 6 else "")


class Sharded:
    """Files that hold the tensors of one model; only those that are asked for are opened."""

    def __init__(self, where: str, file_of: Mapping[str, Path]) -> None:
        self.where = where
        self.file_of = file_of
        self._opened: dict[Path, Checkpoint] = {}

    @property
    def names(self) -> Collection[str]:
        return self.file_of.keys()

    def entry(self, name: str) -> Entry | None:
        return self._file(name).entry(name)

    def read(self, targets: Mapping[str, Tensor]) -> None:
        by_file: dict[Path, dict[str, Tensor]] = {}
        for name, target in targets.items():
            by_file.setdefault(self.file_of[name], {})[name] = target
        for names in by_file.values():
            self._file(next(iter(names))).read(names)

    def load_object(self, name: str) -> Any:
        return self._file(name).load_object(name)

    def _file(self, name: str) -> Checkpoint:
        path = self.file_of[name]
        if path not in self._opened:
            if not path.exists():
                raise CheckpointError(f"{self.where} says that {name} is in {path.name}, and there is no {path}")
            self._opened[path] = _open_file(path)
        if name not in self._opened[path].names:
            raise CheckpointError(f"{self.where} says that {name} is in {path.name}, and it is not there")
        return self._opened[path]


def _read_index(path: Path) -> Sharded:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        file_of = {name: path.parent / file for name, file in content["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f'{path} is not an index: it has no "weight_map" from names to files') from error
    return Sharded(str(path), file_of)


def _of_all_files(path: Path, files: list[Path]) -> Sharded:
    file_of: dict[str, Path] = {}
    for file in files:
        for name in SafetensorsFile(file).names:
            if name in file_of:
                raise CheckpointError(
                    f"{name} is in {file_of[name].name} and in {file.name} of {path}, and there is no {INDEX} that "
                    "says which counts: remove the files of the other checkpoint"
                )
            file_of[name] = file
    return Sharded(str(path), file_of)
