"""Give the module of one stage memory and values of its own, from a checkpoint or an init function.

The model and the pipe stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, PipeError
from ...pipe_ir import TiedParameter, TracedModel, clone
from ...text import shape_text, tensor_text
from ...torch_internals import EXTRA_STATE, TorchDispatchMode, schema_of, storage_id
from .checkpoint import Checkpoint
from .load import (
    CheckpointLike,
    check_all_filled,
    check_dtype,
    check_forms,
    check_names,
    match_names,
    open_checkpoint,
    read_tensors,
)
from .tensors import StageTensor, has_values, named_tensors, stage_tensors

InitFunction = Callable[[nn.Module], Any]

_EXTRA = EXTRA_STATE


@dataclass(frozen=True)
class Values:
    """Source of the values of a stage: an init function, a checkpoint, or both."""

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
        """True if there is any source of values."""
        return self.init is not None or self.checkpoint is not None


def materialize(
    traced: TracedModel,
    ties: Sequence[TiedParameter],
    module: nn.Module,
    index: int,
    device: torch.device | str,
    values: Values,
) -> nn.Module:
    """Return a copy of a stage's module with tensors of its own, on the device, with the values of the source."""
    device = torch.empty(0, device=device).device  # with its number: `cuda` is the current one
    if device.type == "meta":
        raise InputError("init and checkpoint give a stage values, which it cannot have on the meta device")
    _check_constants(traced)
    tensors = stage_tensors(traced, ties, module, index, device)
    checkpoint = None if values.checkpoint is None else open_checkpoint(values.checkpoint)
    if checkpoint is None:
        assert values.init is not None
        _initialize(traced.model, tensors, values.init, device)
    else:
        _load(traced.model, index, tensors, checkpoint, values, device)
    for tensor in tensors:
        # Not before: attributes that an init function sets on a tensor must not be there when it runs.
        vars(tensor.new).update({**vars(tensor.old), **vars(tensor.new)})
    made = clone(module, replaced={id(tensor.old): tensor.new for tensor in tensors})
    if checkpoint is not None:
        _load_extra_state(made, checkpoint, values)
    _check_attributes(made, index)
    return made


def _load(
    model: nn.Module,
    index: int,
    tensors: list[StageTensor],
    checkpoint: Checkpoint,
    values: Values,
    device: torch.device,
) -> None:
    wanted = match_names(checkpoint, tensors, values.rename)
    if values.dtype is not None:
        check_dtype(tensors, values.dtype)
    if values.strict:
        check_names(checkpoint, wanted, model, values.rename)
    check_forms(checkpoint, wanted, values.dtype)
    found = {tensor.name for tensor in wanted.found.values()}
    left = [tensor for tensor in tensors if tensor.name not in found]
    if values.init is None:
        check_all_filled(tensors, found, index)
    elif left:
        _initialize(model, left, values.init, device)
    read_tensors(checkpoint, wanted)


def _load_extra_state(stage: nn.Module, checkpoint: Checkpoint, values: Values) -> None:
    for key in stage.state_dict():
        owner, _, last = key.rpartition(".")
        name = key if values.rename is None else values.rename(key)
        if last == _EXTRA and name in checkpoint.names:
            stage.get_submodule(owner).set_extra_state(checkpoint.load_object(name))
        elif last == _EXTRA and values.strict:
            raise PipeError(
                f"{checkpoint.where} does not have {name}, which {type(stage.get_submodule(owner)).__name__} saves "
                "beside its tensors: with strict=False it stays as it was constructed"
            )


def _check_constants(traced: TracedModel) -> None:
    for op in traced.operations:
        if op.kind == "constant" and isinstance(op.constant, Tensor) and not has_values(op.constant):
            raise PipeError(
                f"the forward uses a tensor on the meta device that is neither parameter nor buffer ({op.name}, "
                f"of shape {shape_text(op.constant.shape)}{', at ' + op.source if op.source else ''}): make it a "
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


def _initialize(model: nn.Module, tensors: Sequence[StageTensor], init: InitFunction, device: torch.device) -> None:
    """Call `init` with the modules of a model in which only these tensors have memory, children before parents.

    It gets the whole model, so that it may read any part; what it writes to other stages' tensors is dropped.
    Random numbers start from a seed of each module's own, made of torch.initial_seed() and its name: so the values
    depend neither on the cut nor on the rank, and a tied parameter gets the same ones on all that hold it.
    """
    skeleton = _skeleton(model, tensors)
    empty = [tensor for tensor in tensors if not has_values(tensor.old)]
    for tensor in empty:
        _fill_with_nan(tensor.new)
    placed = dict(named_tensors(skeleton))
    mine = {id(tensor.new) for tensor in tensors}
    writes = _Writes()
    fork = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_random_device_type(device))
    seed = torch.initial_seed()
    with fork, torch.no_grad(), writes:
        for path, module in _children_first(skeleton, "", set()):
            if any(id(tensor) in mine for _, tensor in named_tensors(module)):
                torch.manual_seed(_seed_of(seed, path))
                _call(init, path, module)
        _copy_replaced(placed, skeleton, tensors)
    _check_all_written(empty, writes)


def _random_device_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # the CPU's state is always kept; the type has to be named


def _skeleton(model: nn.Module, tensors: Sequence[StageTensor]) -> nn.Module:
    new = {name: tensor.new for tensor in tensors for name in tensor.names}
    replaced: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        if id(tensor) not in replaced:
            replaced[id(tensor)] = new[name] if name in new else _without_values(tensor)
    return clone(model, replaced=replaced)


def _without_values(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _children_first(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}".lstrip("."), seen)
    yield path, module


def _seed_of(seed: int, path: str) -> int:
    digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _call(init: InitFunction, path: str, module: nn.Module) -> None:
    try:
        init(module)
    except Exception as error:
        raise PipeError(
            f"init failed for {path or 'the model'} ({type(module).__name__}): {type(error).__name__}: {error}. What "
            "other stages hold is on the meta device there: it can be written to, but has no values"
        ) from error


def _copy_replaced(placed: dict[str, Tensor], skeleton: nn.Module, tensors: Sequence[StageTensor]) -> None:
    """Copy the values of tensors that `init` assigned anew, as in `module.weight = nn.Parameter(...)`."""
    now = dict(named_tensors(skeleton))
    for tensor in tensors:
        for name in tensor.names:
            other = now.get(name)
            if other is None or other is placed.get(name):
                continue
            if (other.shape, other.dtype) != (tensor.new.shape, tensor.new.dtype):
                raise PipeError(
                    f"init replaced {name}, {tensor_text(tensor.new)} when the model was cut, by "
                    f"{tensor_text(other)}: the stage "
                    "was made for the former"
                )
            tensor.new.copy_(other)


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize > 1 and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _fill_with_nan(tensor: Tensor) -> None:
    if _can_be_nan(tensor):
        tensor.detach().fill_(float("nan"))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        self.memory.add(storage_id(tensor))
        return func(*args, **kwargs)

    def has_recorded(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.memory


def _check_all_written(empty: Sequence[StageTensor], writes: _Writes) -> None:
    unwritten = [tensor for tensor in empty if tensor.new.numel() and not _is_written(tensor.new, writes)]
    if unwritten:
        raise PipeError(
            f"init left without values: {', '.join(map(str, unwritten))}. It is called with every module, children "
            "before their parents, and fills the parameters and buffers of each, such as those of the module that has "
            f"{unwritten[0].name}. Buffers that a constructor computes have their values if the model is made under "
            "pipecut.empty_weights()"
        )


def _is_written(tensor: Tensor, writes: _Writes) -> bool:
    if not _can_be_nan(tensor):
        return writes.has_recorded(tensor)
    # A sum needs no memory of the tensor's size, and is NaN if anything in it is.
    values = tensor.detach()
    return not torch.isnan(values.sum()) or not torch.isnan(values).any()
