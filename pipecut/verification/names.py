"""Which parameter of the model each parameter of a stage is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..stage.microbatch.distributed_tensor import is_distributed
from ..stage.stage import PipelineStage

Naming = Callable[[int, str], str]  # stage, name in its module -> name in the model

_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front of names
_SHOWN = 6


@dataclass(frozen=True)
class Holding:
    """A parameter that a stage holds, under its name in the model."""

    stage: int
    name: str
    parameter: Tensor


def parameter_names(model: nn.Module) -> dict[str, str]:
    """All names of parameters, each with the first name of the same parameter: tied ones have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def match_names(stages: Sequence[PipelineStage], model: nn.Module, names: Naming | None) -> list[Holding]:
    """The parameters of the stages by their names in the model; one that several stages hold is listed once.

    A stage holds the model's own parameters, or copies of them under the same names. Copies must have the same values:
    so a parameter cannot be taken for another one that has its name.
    """
    matcher = _Matcher(model, names)
    found: dict[int, Holding] = {}
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            holding = matcher.match(stage.stage_index, name, parameter)
            if holding is not None:
                found.setdefault(id(parameter), holding)
    matcher.raise_faults()
    return list(found.values())


BufferPlace = tuple[int, str]  # stage, name in its module


def match_buffers(stages: Sequence[PipelineStage], model: nn.Module) -> dict[BufferPlace, str]:
    """The buffers of the stages that are buffers of the model, or have the names of some, by their names there."""
    named = dict(model.named_buffers(remove_duplicate=False))
    by_identity = {id(buffer): name for name, buffer in reversed(named.items())}
    found: dict[BufferPlace, str] = {}
    for stage in stages:
        for path, buffer in stage.submod.named_buffers(remove_duplicate=False):
            name = by_identity.get(id(buffer), _unwrapped(path))
            if name in named and named[name].shape == buffer.shape:
                found[stage.stage_index, path] = name
    return found


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


class _Matcher:
    def __init__(self, model: nn.Module, names: Naming | None) -> None:
        self.kind = type(model).__name__
        self.names = names
        self.canonical = parameter_names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.by_identity = {id(parameter): self.canonical[name] for name, parameter in self.parameters.items()}
        self.faults: list[str] = []

    def match(self, stage: int, name: str, parameter: Tensor) -> Holding | None:
        known = self.by_identity.get(id(parameter))
        if known is not None:
            return Holding(stage, known, parameter)
        fault = self._fault(stage, name, parameter)
        if fault:
            self.faults.append(fault)
            return None
        return Holding(stage, self.canonical[self._name(stage, name)], parameter)

    def _name(self, stage: int, name: str) -> str:
        return _unwrapped(name) if self.names is None else self.names(stage, name)

    def _fault(self, stage: int, name: str, parameter: Tensor) -> str:
        where = f"stage {stage}: '{name}'"
        if is_distributed(parameter):
            return f"{where} is sharded, and the model's is not: verify before fully_shard"
        wanted = self._name(stage, name)
        if wanted not in self.parameters:
            return f"{where} is no parameter of {self.kind}, nor is there one named '{wanted}'"
        original = self.parameters[wanted]
        if parameter.shape != original.shape:
            return f"{where} is {list(parameter.shape)}, and '{wanted}' of the model is {list(original.shape)}"
        if not torch.equal(parameter.detach().to(original.device, original.dtype), original.detach()):
            return f"{where} has other values than '{wanted}' of the model"
        return ""

    def raise_faults(self) -> None:
        if self.faults:
            raise InputError("\n  ".join(_shortened(self.faults)) + f"\n{_REMEDY}")


_REMEDY = (
    "Give verify() the model that the stages are made of. If they hold copies under other names, pass names=, a "
    "function of (stage index, name in the stage) that gives the name in the model"
)


def _shortened(faults: Sequence[str]) -> Iterator[str]:
    yield "the parameters of the stages are not those of the model:"
    yield from faults[:_SHOWN]
    if len(faults) > _SHOWN:
        yield f"and {len(faults) - _SHOWN} more"
