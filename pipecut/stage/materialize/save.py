"""Save a stage beside those of the other ranks, as one checkpoint of the model with the model's names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import CheckpointError
from .checkpoint import SafetensorsFile, write_safetensors
from .load import INDEX
from .tensors import has_values

if TYPE_CHECKING:
    from ..stage import PipelineStage


def save_stage(stage: PipelineStage, directory: str | os.PathLike[str]) -> Path:
    """Write a stage into a directory in which all ranks save theirs, and return the path of its file.

    The files are safetensors with the model's names; a tied parameter is saved once, by the first stage that holds it.
    When all stages are saved, `model.safetensors.index.json` says in which file a name is. So the directory can be read
    by `pipe.build_stage(index, device, checkpoint=directory)`, however the model is cut then, and by other programs.

    >>> import tempfile, torch
    >>> from pipecut import pipeline, save_stage
    >>> pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), num_stages=2)
    >>> directory = tempfile.mkdtemp()
    >>> [save_stage(pipe.build_stage(index, "cpu"), directory).name for index in range(2)]
    ['stage-00001-of-00002.safetensors', 'stage-00002-of-00002.safetensors']
    >>> stage = pipe.build_stage(1, "cpu", checkpoint=directory)
    >>> torch.equal(stage.submod.get_parameter("1.weight"), pipe.stages[1].get_parameter("1.weight"))
    True
    """
    tensors = _to_save(stage)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(stage.stage_index, stage.num_stages)
    write_safetensors(path, tensors)
    _write_index(folder, stage.num_stages)
    return path


def _file_name(index: int, total: int) -> str:
    return f"stage-{index + 1:05}-of-{total:05}.safetensors"


def _to_save(stage: PipelineStage) -> dict[str, Tensor]:
    if stage.pipe_info is None:
        raise CheckpointError(
            f"stage {stage.stage_index} was cut by hand, and what its parameters are called in a whole model is not "
            "known: save stage.submod.state_dict() yourself"
        )
    module: nn.Module = stage.submod.module if isinstance(stage.submod, DistributedDataParallel) else stage.submod
    elsewhere = {
        name for tie in stage.pipe_info.tied_parameters if tie.owner != stage.stage_index for name in tie.names
    }
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
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
    if hasattr(value, "to_local"):
        raise CheckpointError(
            f"{name} of stage {stage.stage_index} is in shards on several ranks: save stage.submod.state_dict() with "
            "torch.distributed.checkpoint, which build_stage(..., checkpoint=directory) reads too"
        )
    if not has_values(value):
        raise CheckpointError(f"{name} of stage {stage.stage_index} is on the meta device: there is nothing to save")


def _write_index(folder: Path, total: int) -> None:
    """Write the index once all files exist; if two ranks do it at once, both write the same."""
    files = [folder / _file_name(index, total) for index in range(total)]
    if not all(file.exists() for file in files):
        return
    opened = {file.name: SafetensorsFile(file) for file in files}
    weight_map = {name: file for file, content in opened.items() for name in content.names}
    size = sum(content.entry(name).nbytes for content in opened.values() for name in content.names)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
    unfinished = folder / f".{INDEX}.{os.getpid()}"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(folder / INDEX)
