"""Tensors of a stage and the new ones that take their places; models made without memory for their parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import PipeError
from ...pipe_ir import TiedParameter, TracedModel
from ...torch_internals import FakeTensor, make_subclass, parameters_prepared


@dataclass(frozen=True)
class StageTensor:
    """A parameter or buffer of a stage, and the one that takes its place."""

    names: tuple[str, ...]  # in the model: those that the stage has too, then those of other stages
    persistent: bool
    old: Tensor
    new: Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    def __str__(self) -> str:
        kind = "parameter" if isinstance(self.old, nn.Parameter) else "buffer"
        return f"{self.name} ({kind if self.persistent else f'{kind} that is not saved'})"


@dataclass(frozen=True)
class _Shared:
    """The tensor of a tied parameter, and the stages of this process that hold it."""

    tensor: weakref.ref[Tensor]
    stages: set[int]


# A parameter that several stages hold is one tensor in a process too, so that it is stored and updated once.
_shared: weakref.WeakKeyDictionary[TracedModel, dict[tuple[str, torch.device], _Shared]] = weakref.WeakKeyDictionary()


def has_values(tensor: Tensor) -> bool:
    """Return True if a tensor has memory."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def stage_tensors(
    traced: TracedModel, ties: Sequence[TiedParameter], module: nn.Module, index: int, device: torch.device
) -> list[StageTensor]:
    """Make a new tensor on the device for each of a stage, with the values that the old one has, if any."""
    model = traced.model
    groups: dict[int, list[str]] = {}
    group_of = {name: groups.setdefault(id(tensor), []) for name, tensor in named_tensors(model)}
    for name, group in group_of.items():
        group.append(name)
    held: dict[int, list[str]] = {}
    olds: dict[int, Tensor] = {}
    for name, tensor in named_tensors(module):
        held.setdefault(id(tensor), []).append(name)
        olds[id(tensor)] = tensor
    saved = set(model.state_dict())
    made = []
    for key, names in held.items():
        everywhere = tuple(dict.fromkeys([*names, *group_of.get(names[0], ())]))
        tie = next((tie for tie in ties if everywhere[0] in tie.names), None)
        new = (
            _empty_like(everywhere[0], olds[key], device)
            if tie is None
            else _tied_tensor(traced, tie, index, olds[key], device)
        )
        made.append(StageTensor(everywhere, any(name in saved for name in everywhere), olds[key], new))
        if has_values(olds[key]):
            with torch.no_grad():
                new.copy_(olds[key])
    return made


def _tied_tensor(traced: TracedModel, tie: TiedParameter, index: int, old: Tensor, device: torch.device) -> Tensor:
    shared = _shared.setdefault(traced, {})
    known = shared.get((tie.names[0], device))
    tensor = None if known is None or index in known.stages else known.tensor()
    if known is None or tensor is None:  # the first one, or the stage is built anew
        tensor = _empty_like(tie.names[0], old, device)
        shared[tie.names[0], device] = known = _Shared(weakref.ref(tensor), set())
    known.stages.add(index)
    return tensor


def _empty_like(name: str, old: Tensor, device: torch.device) -> Tensor:
    kind = type(old)
    if kind not in (Tensor, FakeTensor) and not issubclass(kind, nn.Parameter):
        raise PipeError(
            f"{name} is a {kind.__name__}, which cannot be recreated with values: make the model with plain "
            "tensors, and wrap or shard its stages after they are built"
        )
    form = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta")
    data = torch.empty_like(form, device=device)
    if isinstance(old, nn.Parameter):
        of_kind = kind if issubclass(kind, nn.Parameter) else nn.Parameter
        return make_subclass(of_kind, data, old.requires_grad)
    return data.requires_grad_(old.requires_grad)


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Make models without memory for their parameters.

    Unlike `torch.device("meta")` it leaves buffers and other tensors as they are: tables that a constructor computes
    and no checkpoint has. One parameter at a time has memory, until its module has it. Works for all threads.

    >>> from pipecut import empty_weights
    >>> with empty_weights():
    ...     layer = nn.BatchNorm1d(4)
    >>> layer.weight.device, layer.running_var.device
    (device(type='meta'), device(type='cpu'))
    """
    with parameters_prepared(_move_to_meta):
        yield


def _move_to_meta(parameter: nn.Parameter) -> None:
    """Move a parameter to the meta device: the very object, for another module may be about to share it."""
    if is_lazy(parameter) or parameter.device.type == "meta":
        return
    empty = make_subclass(type(parameter), parameter.detach().to("meta"), parameter.requires_grad)
    vars(empty).update(vars(parameter))
    torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]
