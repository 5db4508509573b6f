"""Runs a user's init function so that every stage gets the values that the whole model would have."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import PipeError
from ...pipe_ir.clone import clone
from .stage_tensors import StageTensor, has_values, named_tensors

InitFunction = Callable[[nn.Module], Any]


def initialize(model: nn.Module, tensors: Sequence[StageTensor], init: InitFunction, device: torch.device) -> None:
    """Call `init` with the modules of a model in which only these tensors have memory, children before parents.

    It sees the whole model, so that it may look at any part; what it writes to other stages' tensors goes nowhere.
    Random numbers start from a seed of each module's own, made of torch.initial_seed() and its name: so the values
    depend neither on the cut nor on the rank, and a tied parameter gets the same ones on all that hold it.
    """
    skeleton = _skeleton(model, tensors)
    empty = [tensor for tensor in tensors if not has_values(tensor.old)]
    for tensor in empty:
        _fill_with_nan(tensor.new)
    placed = dict(named_tensors(skeleton))
    mine = {id(tensor.new) for tensor in tensors}
    watch = _Writes()
    fork = torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_random_device_type(device))
    seed = torch.initial_seed()
    with fork, torch.no_grad(), watch:
        for path, module in _children_first(skeleton, "", set()):
            if any(id(tensor) in mine for _, tensor in named_tensors(module)):
                torch.manual_seed(_seed_of(seed, path))
                _call(init, path, module)
        _take_over_replaced(placed, skeleton, tensors)
    _check_all_written(empty, watch)


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


def _take_over_replaced(placed: dict[str, Tensor], skeleton: nn.Module, tensors: Sequence[StageTensor]) -> None:
    """`module.weight = nn.Parameter(...)` gives values as well as writing to the one that is there."""
    now = dict(named_tensors(skeleton))
    for tensor in tensors:
        for name in tensor.names:
            other = now.get(name)
            if other is None or other is placed.get(name):
                continue
            if (other.shape, other.dtype) != (tensor.new.shape, tensor.new.dtype):
                raise PipeError(
                    f"init replaced {name}, {_form(tensor.new)} when the model was cut, by {_form(other)}: the stage "
                    "was made for the former"
                )
            tensor.new.copy_(other)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize > 1 and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _fill_with_nan(tensor: Tensor) -> None:
    if _can_be_nan(tensor):
        tensor.detach().fill_(float("nan"))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor):
                        self.memory.add(tensor.untyped_storage()._cdata)
        return func(*args, **kwargs)

    def has_seen(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.memory


def _check_all_written(empty: Sequence[StageTensor], watch: _Writes) -> None:
    unwritten = [
        tensor
        for tensor in empty
        if tensor.new.numel() and (_has_nan(tensor.new) if _can_be_nan(tensor.new) else not watch.has_seen(tensor.new))
    ]
    if unwritten:
        raise PipeError(
            f"init left without values: {', '.join(map(str, unwritten))}. It is called with every module, children "
            "before their parents, and fills the parameters and buffers of each, such as those of the module that has "
            f"{unwritten[0].name}. Buffers that a constructor computes have their values if the model is made under "
            "pipecut.empty_weights()"
        )


def _has_nan(tensor: Tensor) -> bool:
    # A sum needs no memory of the tensor's size, and is NaN if anything in it is.
    values = tensor.detach()
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())
