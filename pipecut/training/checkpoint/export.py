"""Export a model that was trained in stages: a folder of safetensors that other programs load, or its adapters alone.

All ranks write their own stages, and the index is written when all of them are there, as by `save_stage`.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...errors import CheckpointError, DisagreementError, InputError
from ...files import write_text
from ...run import PipelineSchedule, differences
from ...stage import (
    SAVE_KEY,
    PipelineStage,
    full_tensor,
    is_distributed,
    stage_file,
    tensors_to_save,
    write_index,
    write_safetensors,
)
from ...torch_internals import wrapped_attribute
from .ranks import Position, check_copies, places_of, position_of, ranks_of
from .save import finish_pending

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "chat_template*",
)


@dataclass(frozen=True)
class _Facts:
    """Facts that the ranks compare before they write."""

    folder: str
    position: Position


def export_safetensors(
    folder: str | os.PathLike[str],
    schedule: PipelineSchedule,
    config: Any = None,
    tokenizer: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the model of a schedule into a folder that `from_pretrained` of transformers loads, and return its path.

    All ranks of the job call this together. The files are safetensors with the model's own names; shards are put
    together, and copies written once. `config` and `tokenizer` are objects with `save_pretrained()`, or paths whose
    files are copied; without `config` it is that of the model, if it has one. Of a model of peft the adapters are
    written, alone. A folder with an older export holds that until the new one is complete.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from pipecut import Schedule1F1B, pipeline
    >>> pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), num_stages=2)
    >>> schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2)
    >>> folder = export_safetensors(tempfile.mkdtemp(), schedule, config={"model_type": "two layers"})
    >>> sorted(path.name.partition("-")[0] for path in folder.iterdir())
    ['config.json', 'model.safetensors.index.json', 'stage', 'stage']
    """
    ranks = ranks_of(schedule, group, "export_safetensors")
    ranks.agree(finish_pending)
    path = Path(folder)
    facts = ranks.agree(lambda: _checked(path, schedule, config, tokenizer))
    lines = differences([{"folder": each.folder} for each in facts])
    if lines:
        raise DisagreementError(f"the ranks disagree on the {lines[0]}. Call export_safetensors alike on every rank")
    check_copies([each.position for each in facts])
    places = places_of([each.position for each in facts])
    writing = ranks.writing
    if _adapter_configs(schedule):
        parts = writing.agree(lambda: _adapters(schedule))
        writing.first(lambda: _write_adapters(path, schedule, parts, tokenizer))
        return path
    save = ranks.first(lambda: _begin(path))
    writing.agree(lambda: _write_stages(path, schedule, save, writes=places[ranks.rank][0] == 0))
    writing.first(lambda: _finish(path, schedule, save, config, tokenizer))
    return path


def _checked(folder: Path, schedule: PipelineSchedule, config: Any, tokenizer: Any) -> _Facts:
    for stage in schedule.stages:
        tensors_to_save(stage)  # raises on what cannot be written
    for name, given in (("config", config), ("tokenizer", tokenizer)):
        is_path = isinstance(given, str | os.PathLike)
        if is_path and not Path(given).exists():
            raise InputError(f"{name}={str(given)!r}: there is no such file or directory")
        if not (given is None or is_path or hasattr(given, "save_pretrained") or isinstance(given, Mapping)):
            raise InputError(
                f"{name} is a {type(given).__name__}: pass an object with save_pretrained(), or a path to copy from"
            )
    return _Facts(str(folder.resolve()), position_of(schedule))


def _begin(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return uuid.uuid4().hex[:8]


def _write_stages(folder: Path, schedule: PipelineSchedule, save: str, *, writes: bool) -> None:
    """Write the stages of this rank; ranks that hold copies or other shards of them only help to gather these."""
    for stage in schedule.stages:
        # First, and all of it: a rank that could not write would leave the others waiting in the next gather.
        tensors = _gathered(tensors_to_save(stage), keep=writes)
        if writes:
            path = folder / stage_file(stage.stage_index, stage.num_stages, save)
            write_safetensors(path, tensors, {SAVE_KEY: save})


def _gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return tensors with shards put together, on the CPU; nothing if they are not to be kept."""
    kept = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor.detach()).cpu() if is_distributed(tensor) else tensor
        if keep:
            kept[name] = value
    return kept


def _finish(folder: Path, schedule: PipelineSchedule, save: str, config: Any, tokenizer: Any) -> None:
    """Write what the first rank writes for all, the index last."""
    total = schedule.plan.stages
    missing = [
        name for name in (stage_file(index, total, save) for index in range(total)) if not (folder / name).exists()
    ]
    if missing:
        raise CheckpointError(
            f"{missing[0]} cannot be seen on the first rank: the folder has to be on a file system that all ranks share"
        )
    _write_config(folder, schedule, config)
    _write_tokenizer(folder, tokenizer)
    write_index(folder, total, save)


def _write_config(folder: Path, schedule: PipelineSchedule, config: Any) -> None:
    if config is None:
        config = getattr(_own_module(schedule.stages[0]), "config", None)
        if not hasattr(config, "save_pretrained"):
            return
    if isinstance(config, Mapping):
        write_text(folder / "config.json", json.dumps(dict(config), indent=2), CheckpointError)
    elif hasattr(config, "save_pretrained"):
        own = copy.deepcopy(config)  # as the model's own save_pretrained does, and the user's object stays as it is
        if schedule.info is not None and not getattr(own, "architectures", None):
            own.architectures = [schedule.info.call.model_name]
        own.save_pretrained(folder)
    else:
        _copy(Path(config), folder, ("config.json", "generation_config.json"))


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
    elif tokenizer is not None:
        _copy(Path(tokenizer), folder, _TOKENIZER_FILES)


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Copy a file, or those files of a directory that fit the patterns."""
    files = [source] if source.is_file() else [file for pattern in patterns for file in sorted(source.glob(pattern))]
    if not files:
        raise CheckpointError(f"{source} has none of {', '.join(patterns)} to copy")
    for file in dict.fromkeys(files):
        if file.resolve().parent != folder.resolve():
            shutil.copyfile(file, folder / file.name)


def _own_module(stage: PipelineStage) -> nn.Module:
    """Return the module of a stage without wrappers around it."""
    module = stage.submod
    while (attribute := wrapped_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


# Adapters of peft.


def _adapter_configs(schedule: PipelineSchedule) -> Mapping[str, Any]:
    """Return the configurations of a model of peft by the names of its adapters; nothing for another model."""
    found: Mapping[str, Any] = getattr(_own_module(schedule.stages[0]), "peft_config", None) or {}
    return found


def _adapters(schedule: PipelineSchedule) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each adapter in the stages of this rank, under the names that peft saves them by."""
    from peft import get_peft_model_state_dict  # an extra, which a model of peft has imported

    found: dict[str, dict[str, Tensor]] = {name: {} for name in _adapter_configs(schedule)}
    for stage in schedule.stages:
        tensors = _gathered(tensors_to_save(stage), keep=True)
        for name, adapter in found.items():
            part: Any = get_peft_model_state_dict(
                _own_module(stage), state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False
            )
            adapter.update({key: value.detach().cpu() for key, value in part.items()})
    return found


def _write_adapters(
    folder: Path, schedule: PipelineSchedule, parts: list[dict[str, dict[str, Tensor]]], tokenizer: Any
) -> None:
    """Write the adapters of all ranks as peft does: the default one into the folder, others into folders below it."""
    for name, config in _adapter_configs(schedule).items():
        target = folder if name == "default" else folder / name
        target.mkdir(parents=True, exist_ok=True)
        own = copy.deepcopy(config)
        own.inference_mode = True  # as peft saves it
        own.save_pretrained(target)
        tensors = {key: value for part in parts for key, value in part[name].items()}
        write_safetensors(target / "adapter_model.safetensors", tensors)
    _write_tokenizer(folder, tokenizer)
