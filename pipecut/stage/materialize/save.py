"""Save a stage beside those of the other ranks, as one checkpoint of the model with the model's names.

Every save has files of its own names, and an index is written when all of them are there: until then the one before it
counts. So a job that is killed between the files of two ranks leaves the older checkpoint, and not a mixture.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ...errors import CheckpointError, warn
from ...files import write_text
from ...text import listed
from ..replica import UnwrappedNames
from .checkpoint import SafetensorsFile, write_safetensors
from .load import INDEX, SAVE_KEY, read_weight_map, stage_files
from .tensors import has_values

if TYPE_CHECKING:
    from ..stage import PipelineStage

_own_job = uuid.uuid4().hex
_saves: dict[tuple[Path, int], int] = {}  # so far, by the directory and the stage


def save_stage(stage: PipelineStage, directory: str | os.PathLike[str], *, step: int | None = None) -> Path:
    """Write a stage into a directory in which all ranks save theirs, and return the path of its file.

    The files are safetensors with the model's names; a tied parameter is saved once, by the first stage that holds it.
    When all stages are saved, `model.safetensors.index.json` says in which file a name is. So the directory can be read
    by `pipe.build_stage(index, device, checkpoint=directory)`, however the model is cut then, and by other programs.

    Stages may be saved into the same directory again: what was there before counts until the last of them is saved, and
    is removed then. Processes without a process group, each of which saves some of the stages, have to say which files
    belong together, by `step`.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from pipecut import pipeline, save_stage
    >>> pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), num_stages=2)
    >>> directory = tempfile.mkdtemp()
    >>> [save_stage(pipe.build_stage(index, "cpu"), directory, step=7).name for index in range(2)]
    ['stage-00001-of-00002-step7.safetensors', 'stage-00002-of-00002-step7.safetensors']
    >>> stage = pipe.build_stage(1, "cpu", checkpoint=directory)
    >>> torch.equal(stage.submod.get_parameter("1.weight"), pipe.stages[1].get_parameter("1.weight"))
    True
    """
    folder = Path(directory)
    save = _name_of_save(folder.resolve(), stage.stage_index, step)
    tensors = tensors_to_save(stage)
    for name, value in tensors.items():
        if hasattr(value, "to_local"):
            raise CheckpointError(
                f"{name} of stage {stage.stage_index} is in shards on several ranks: use pipecut.save_checkpoint, "
                "which build_stage(..., checkpoint=path) reads too, or pipecut.export_safetensors"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made a folder: {error.strerror or error}") from error
    path = folder / stage_file(stage.stage_index, stage.num_stages, save)
    write_safetensors(path, tensors, {SAVE_KEY: save})
    write_index(folder, stage.num_stages, save)
    return path


def _name_of_save(folder: Path, stage: int, step: int | None) -> str:
    """Return a name that all ranks have for the same save, and that no other save has.

    Ranks of a process group have a common number of their job, and count their calls alike.
    """
    count = _saves[folder, stage] = _saves.get((folder, stage), 0) + 1
    if dist.is_available() and dist.is_initialized():
        world = dist.group.WORLD
        assert world is not None  # it is initialized
        job = world.get_group_store().compare_set("pipecut/job of saved stages", "", _own_job).decode()
    elif step is not None:
        return f"step{step}"
    else:
        job = _own_job
    digest = hashlib.sha256(f"{job} {count}".encode()).hexdigest()[:8]
    return digest if step is None else f"step{step}-{digest}"


def stage_file(index: int, total: int, save: str) -> str:
    """Return the name of the file of a stage."""
    return f"stage-{index + 1:05}-of-{total:05}-{save}.safetensors"


def tensors_to_save(stage: PipelineStage) -> dict[str, Tensor]:
    """Return what a stage saves, by the model's names: of its ties those that no earlier stage saves."""
    if stage.pipe_info is None:
        raise CheckpointError(
            f"stage {stage.stage_index} was cut by hand, and what its parameters are called in a whole model is not "
            "known: save stage.submod.state_dict() yourself"
        )
    unwrapped = UnwrappedNames(stage.submod)
    elsewhere = {
        name for tie in stage.pipe_info.tied_parameters if tie.owner != stage.stage_index for name in tie.names
    }
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for raw, value in stage.submod.state_dict(keep_vars=True).items():
        name = unwrapped.of(raw)
        _check_can_be_saved(stage, name, value)
        if name not in elsewhere and id(value) not in seen:
            seen.add(id(value))
            kept[name] = value
    return kept


def _check_can_be_saved(stage: PipelineStage, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"{name} is a {type(value).__name__}, which a safetensors file cannot hold: "
            "use torch.save(stage.submod.state_dict(), path)"
        )
    if not has_values(value):
        raise CheckpointError(f"{name} of stage {stage.stage_index} is on the meta device: there is nothing to save")


def write_index(folder: Path, total: int, save: str) -> None:
    """Write the index once all files of a save exist, and remove those of the one before.

    If two ranks do it at once, both write the same.
    """
    files = [folder / stage_file(index, total, save) for index in range(total)]
    if not all(file.exists() for file in files):
        return
    opened = {file.name: SafetensorsFile(file) for file in files}
    weight_map = {name: file for file, content in opened.items() for name in content.names}
    size = sum(content.entry(name).nbytes for content in opened.values() for name in content.names)
    before = _files_of_index(folder)
    text = json.dumps({"metadata": {"total_size": size, SAVE_KEY: save}, "weight_map": weight_map}, indent=2)
    write_text(folder / INDEX, text, CheckpointError)
    for name in before - set(opened):
        if name in stage_files(folder):  # other files are not ours to remove
            (folder / name).unlink(missing_ok=True)
    left = stage_files(folder) - set(opened) - before
    if left:
        warn(f"files of saves into {folder} that did not come to the end are left alone: {listed(sorted(left), 4)}")


def _files_of_index(folder: Path) -> set[Any]:
    return set(read_weight_map(folder / INDEX).values()) if (folder / INDEX).exists() else set()
