"""The module of one stage with memory and values of its own; the model and the pipe stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import InputError, PipeError
from ...pipe_ir.clone import clone
from ...pipe_ir.pipe import Pipe
from .checkpoint import Checkpoint
from .initialize import InitFunction, initialize
from .load import check_all_filled, check_dtype, check_forms, check_names, find_in, read
from .open_checkpoint import CheckpointLike, open_checkpoint
from .stage_tensors import StageTensor, has_values, named_tensors, stage_tensors

_EXTRA = "_extra_state"
_SHOWN = 5


@dataclass(frozen=True)
class Values:
    """Where the values of a stage come from."""

    init: InitFunction | None = None
    checkpoint: CheckpointLike | None = None
    dtype: torch.dtype | None = None
    strict: bool = True
    rename: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        if self.init is not None and not callable(self.init):
            raise InputError(f"init must be a function that is called with modules, got {type(self.init).__name__}")
        if self.init is not None and self.checkpoint is not None and self.strict:
            raise InputError(
                "init and checkpoint were both given: pass one of them; or with strict=False both, and init fills what "
                "the checkpoint does not hold"
            )
        if self.checkpoint is None:
            given = {"dtype": self.dtype is not None, "strict": not self.strict, "rename": self.rename is not None}
            useless = [name for name, is_given in given.items() if is_given]
            if useless:
                raise InputError(f"{' and '.join(useless)} say how a checkpoint is read: pass checkpoint= too")

    @property
    def given(self) -> bool:
        """Whether there is any source of values."""
        return self.init is not None or self.checkpoint is not None


def materialize(pipe: Pipe, index: int, device: torch.device | str, values: Values) -> nn.Module:
    """A copy of a stage's module whose tensors are its own, on the device, with the values that were asked for."""
    device = _with_number(torch.device(device))
    _check_device(device)
    _check_constants(pipe)
    module = pipe.get_stage_module(index)
    tensors = stage_tensors(pipe, index, device)
    checkpoint = None if values.checkpoint is None else open_checkpoint(values.checkpoint)
    if checkpoint is None:
        _initialize(pipe, tensors, values, device)
    else:
        _load(pipe, index, tensors, checkpoint, values, device)
    for tensor in tensors:
        # Not before: what an init function notes on a tensor that it has filled must not be there already.
        vars(tensor.new).update({**vars(tensor.old), **vars(tensor.new)})
    made = clone(module, replaced={id(tensor.old): tensor.new for tensor in tensors})
    if checkpoint is not None:
        _load_extra_state(made, checkpoint, values)
    _check_attributes(made, index)
    return made


def _with_number(device: torch.device) -> torch.device:
    """`cuda` is the current one: tensors say which."""
    return torch.empty(0, device=device).device


def _check_device(device: torch.device) -> None:
    if device.type == "meta":
        raise InputError("init and checkpoint give a stage values, which it cannot have on the meta device")


def _initialize(pipe: Pipe, tensors: list[StageTensor], values: Values, device: torch.device) -> None:
    assert values.init is not None
    initialize(pipe.traced.model, tensors, values.init, device)


def _load(
    pipe: Pipe,
    index: int,
    tensors: list[StageTensor],
    checkpoint: Checkpoint,
    values: Values,
    device: torch.device,
) -> None:
    wanted = find_in(checkpoint, tensors, values.rename)
    if values.dtype is not None:
        check_dtype(tensors, values.dtype)
    if values.strict:
        check_names(checkpoint, wanted, pipe.traced.model, values.rename)
    check_forms(checkpoint, wanted, values.dtype)
    found = {tensor.name for tensor in wanted.found.values()}
    left = [tensor for tensor in tensors if tensor.name not in found]
    if values.init is None:
        check_all_filled(tensors, found, index)
    elif left:
        _initialize(pipe, left, values, device)
    read(checkpoint, wanted)


def _load_extra_state(stage: nn.Module, checkpoint: Checkpoint, values: Values) -> None:
    for key in stage.state_dict():
        owner, _, last = key.rpartition(".")
        name = key if values.rename is None else values.rename(key)
        if last == _EXTRA and name in checkpoint.names:
            stage.get_submodule(owner).set_extra_state(checkpoint.load_object(name))
        elif last == _EXTRA and values.strict:
            raise PipeError(
                f"{checkpoint.where} does not have {name}, what {type(stage.get_submodule(owner)).__name__} saves "
                "beside its tensors: with strict=False it stays as it was constructed"
            )


def _check_constants(pipe: Pipe) -> None:
    for step in pipe.traced.steps:
        if step.kind == "constant" and isinstance(step.constant, Tensor) and not has_values(step.constant):
            raise PipeError(
                f"the forward uses a tensor on the meta device that is neither parameter nor buffer ({step.name}, "
                f"of shape {list(step.constant.shape)}{', at ' + step.source if step.source else ''}): make it a "
                "buffer, or make the model under pipecut.empty_weights()"
            )


def _check_attributes(stage: nn.Module, index: int) -> None:
    for path, module in stage.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not has_values(value):
                raise PipeError(
                    f"{f'{path}.{name}'.lstrip('.')} in stage {index} is a tensor on the meta device that is neither "
                    "parameter nor buffer, and cannot be given values: make it a buffer, or make the model under "
                    "pipecut.empty_weights()"
                )


def check_has_memory(module: nn.Module, index: int, device: torch.device) -> None:
    """Refuse a stage on the meta device that is to run somewhere else."""
    if device.type == "meta":
        return
    empty = [name for name, tensor in named_tensors(module) if tensor.device.type == "meta"]
    if empty:
        more = f" and {len(empty) - _SHOWN} more" if len(empty) > _SHOWN else ""
        raise PipeError(
            f"stage {index} has no values, only shapes (on the meta device): {', '.join(empty[:_SHOWN])}{more}. Give "
            f"them with pipe.build_stage({index}, device, init=function), where the function is called with each "
            f"module to initialise it, or with pipe.build_stage({index}, device, checkpoint=path). For a stage cut by "
            "hand: module.to_empty(device=device), then load_state_dict"
        )
