"""Read the tensors of one stage from a checkpoint that has the names of the model: open it, match names, read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...files import inside, open_regular, read_json
from ...text import did_you_mean, dtype_name, lines_of, listed
from ...torch_internals import METADATA_FILE
from .checkpoint import Checkpoint, DistributedCheckpoint, Entry, InMemory, SafetensorsFile, open_torch_file
from .tensors import StageTensor, has_values, named_tensors

TRAINING_MANIFEST = "checkpoint.json"  # of a checkpoint of a training job, which pipecut.save_checkpoint has written
TRAINING_PREFIX = "model/"  # begins the names of the model's own tensors in it
INDEX = "model.safetensors.index.json"
SAVE_KEY = "pipecut_save"  # in the metadata of a file: the save of all stages that it belongs to
_STAGE_FILE = re.compile(r"stage-\d+-of-\d+-[\w-]+\.safetensors")
CheckpointLike = str | os.PathLike[str] | Mapping[str, Any]

_SHOWN = 20


@dataclass(frozen=True)
class _Wanted:
    """The match of a stage's tensors with the names in a checkpoint."""

    found: Mapping[str, StageTensor]  # by the name in the checkpoint; of a tie that was saved twice, the first
    duplicates: Mapping[str, str]  # the other names of ties that were saved more than once -> the first
    missing: Sequence[StageTensor]


def match_names(
    checkpoint: Checkpoint, tensors: Sequence[StageTensor], rename: Callable[[str], str] | None = None
) -> _Wanted:
    """Look for each tensor under all names that it has in the model."""
    known = checkpoint.names
    found: dict[str, StageTensor] = {}
    duplicates: dict[str, str] = {}
    missing = []
    for tensor in tensors:
        candidates = dict.fromkeys(name if rename is None else rename(name) for name in tensor.names)
        present = [name for name in candidates if name in known]
        if present:
            found[present[0]] = tensor
            duplicates |= dict.fromkeys(present[1:], present[0])
        elif tensor.persistent:
            missing.append(tensor)
    return _Wanted(found, duplicates, missing)


def check_names(
    checkpoint: Checkpoint, wanted: _Wanted, model: nn.Module, rename: Callable[[str], str] | None = None
) -> None:
    """Raise unless the checkpoint has all names that the stage needs, and none that the model does not have."""
    # A buffer that is not saved now may have been saved once.
    expected = {*model.state_dict(), *(name for name, _ in named_tensors(model))}
    if rename is not None:
        expected = {rename(name) for name in expected}
    unexpected = sorted(set(checkpoint.names) - expected)
    missing = [tensor.name if rename is None else rename(tensor.name) for tensor in wanted.missing]
    faults = []
    if missing:
        lines = [f"{name}.{did_you_mean(name, unexpected or checkpoint.names)}" for name in missing]
        faults.append(f"it does not have, and this stage needs:{lines_of(lines, _SHOWN)}")
    if unexpected:
        lines = [f"{name}.{did_you_mean(name, missing or expected)}" for name in unexpected]
        faults.append(f"it has, and the model does not:{lines_of(lines, _SHOWN)}")
    if faults:
        raise CheckpointError(
            f"{checkpoint.where} does not fit the model.\n" + "\n".join(faults) + "\nPass rename=, a function from the "
            "model's names to those of the checkpoint, if they only differ; or strict=False, to read what fits and "
            "leave the rest to init=, or to the values that the model has"
        )


def check_forms(checkpoint: Checkpoint, wanted: _Wanted, dtype: torch.dtype | None) -> None:
    """Raise on shapes that are not the model's, and on dtypes that are neither the model's nor to be converted."""
    shapes, dtypes, kept = [], [], set()
    for name, tensor in wanted.found.items():
        entry = checkpoint.entry(name)
        if entry is None:
            raise CheckpointError(f"{name} in {checkpoint.where} is not a tensor, and is a parameter of the model")
        if entry.shape != tuple(tensor.new.shape):
            shapes.append(f"{name} is {entry} there, and {_form_of(tensor.new)} in the model")
        elif entry.dtype != tensor.new.dtype and not _converted(entry.dtype, tensor.new.dtype, dtype):
            dtypes.append(f"{name} is {entry} there, and {_form_of(tensor.new)} in the model")
            kept.add(dtype_name(tensor.new.dtype))
    if shapes:
        raise CheckpointError(f"{checkpoint.where} is of a model of other sizes:{lines_of(shapes, _SHOWN)}")
    if dtypes:
        raise CheckpointError(
            f"{checkpoint.where} has other dtypes than the model:{lines_of(dtypes, _SHOWN)}\nPass dtype=torch."
            f"{' or dtype=torch.'.join(sorted(kept))} to convert what is read, or make the model with the dtype of the "
            "checkpoint before it is cut"
        )


def _form_of(tensor: Tensor) -> Entry:
    return Entry(tuple(tensor.shape), tensor.dtype)


def _converted(saved: torch.dtype, wanted: torch.dtype, dtype: torch.dtype | None) -> bool:
    return wanted == dtype and saved.is_floating_point and wanted.is_floating_point


def check_dtype(tensors: Sequence[StageTensor], dtype: torch.dtype) -> None:
    """Raise on a dtype that the traced model does not have, for its stages are made for those."""
    floating = {tensor.old.dtype for tensor in tensors if tensor.old.dtype.is_floating_point}
    if floating and dtype not in floating:
        of_model = " and ".join(sorted(map(dtype_name, floating)))
        raise CheckpointError(
            f"dtype={dtype}, and the model was cut with {of_model}, for which its stages are made: convert "
            f"the model (`model.to({dtype})`) before pipeline(). dtype says to what a checkpoint of another dtype is "
            "converted"
        )


@torch.no_grad()
def read_tensors(checkpoint: Checkpoint, wanted: _Wanted) -> None:
    """Fill the tensors; raise if a tied one was saved under several names with different values."""
    checkpoint.read({name: tensor.new for name, tensor in wanted.found.items()})
    for name, first in wanted.duplicates.items():
        value = wanted.found[first].new
        other = torch.empty_like(value)
        entry = checkpoint.entry(name)
        if entry is None or entry.shape != tuple(value.shape):
            same = False
        else:
            checkpoint.read({name: other})
            same = torch.equal(value, other)
        if not same:
            raise CheckpointError(
                f"{first} and {name} differ in {checkpoint.where}, and are one parameter in the model: "
                "untie them in the model, or remove the one that does not count from the checkpoint"
            )


def check_all_filled(tensors: Sequence[StageTensor], filled: Collection[str], index: int) -> None:
    """Raise if a tensor would be left without values."""
    unfilled = [tensor for tensor in tensors if not has_values(tensor.old) and tensor.name not in filled]
    if unfilled:
        raise CheckpointError(
            f"stage {index} has parts that the checkpoint does not hold and that are on the meta device: "
            f"{', '.join(map(str, unfilled))}. Make the model under `with pipecut.empty_weights():` instead of "
            'torch.device("meta"), so that buffers have the values of their constructor; or pass strict=False and '
            "init=, a function that fills what the checkpoint does not hold"
        )


def open_checkpoint(given: CheckpointLike) -> Checkpoint:
    """Open a checkpoint: a state dict, or the path of a file, an index or a directory."""
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
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
    is_torch = start[:2] in (b"PK", b"\x80\x02")  # a zip file; a pickle, as torch wrote long ago
    return open_torch_file(path) if is_torch else SafetensorsFile(path)


def _open_directory(path: Path) -> Checkpoint:
    if (path / TRAINING_MANIFEST).exists():
        return DistributedCheckpoint(path, TRAINING_PREFIX)
    if (path / METADATA_FILE).exists():
        return DistributedCheckpoint(path)
    if (path / INDEX).exists():
        return _read_index(path / INDEX)
    indices = sorted(path.glob("*.index.json"))
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has several indices, {listed(path.name for path in indices)}: pass the path of one"
        )
    if indices:
        return _read_index(indices[0])
    files = sorted(path.glob("*.safetensors"))
    if files:
        return _of_all_files(path, files)
    raise CheckpointError(
        f"{path} is not a checkpoint: it has no {INDEX}, no .safetensors file and no .metadata of "
        "torch.distributed.checkpoint. It has "
        f"{listed(sorted(each.name for each in path.iterdir()), at_most=6) or 'no files'}; "
        "a file of torch.save is passed by its own path"
    )


class _Sharded:
    """Several files with the tensors of one model; each is opened when one of its tensors is asked for."""

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


def _read_index(path: Path) -> _Sharded:
    weight_map = read_weight_map(path)
    return _Sharded(
        str(path), {name: inside(path.parent, file, CheckpointError, str(path)) for name, file in weight_map.items()}
    )


def read_weight_map(path: Path) -> Mapping[str, Any]:
    """Return what an index says: a file for each name."""
    content = read_json(path, CheckpointError, "an index")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f'{path} is not an index: it has no "weight_map" from names to files')
    return weight_map


def stage_files(folder: Path) -> set[str]:
    """Return the names of the files that `save_stage` has written into a folder."""
    return {path.name for path in folder.glob("stage-*.safetensors") if _STAGE_FILE.fullmatch(path.name)}


def _of_all_files(path: Path, files: list[Path]) -> _Sharded:
    file_of: dict[str, Path] = {}
    for file in files:
        opened = SafetensorsFile(file)
        if SAVE_KEY in opened.metadata:
            raise CheckpointError(
                f"{path} has no {INDEX}, which the last stage that is saved writes: the stages in "
                f"{listed(sorted(stage_files(path)), at_most=4)} are not all of a model, or of several saves"
            )
        for name in opened.names:
            if name in file_of:
                raise CheckpointError(
                    f"{name} is in {file_of[name].name} and in {file.name} of {path}, and there is no {INDEX} that "
                    "says which counts: remove the files of the other checkpoint"
                )
            file_of[name] = file
    return _Sharded(str(path), file_of)
