"""Parameters, buffers and state of all stages of a process, by the model's own names and in the model's order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir import PipeInfo
from ..stage import PipelineStage, UnwrappedNames
from .ties import Tie

# The place in the model, if it is known there, 1 for a holder of a tied parameter that has another name in its stage,
# the stage, and the place in the stage.
_Order = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A parameter or a buffer that a stage of this process holds, by its name in the model, or a value of its state.

    A tied parameter has its first name in the model, whatever it is called in the stage: `local_name`. It `counts`
    in one of its stages, the first to run, for all of them.
    """

    name: str
    local_name: str
    stage: int
    order: _Order
    value: Any
    counts: bool = True


class _StageState:
    """All that the stages of one process hold.

    >>> layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
    >>> stages = [PipelineStage(nn.Sequential(), 0, 2, "cpu"), PipelineStage(layers, 1, 2, "cpu")]
    >>> [name for name, _ in _StageState(stages, None, ()).named_parameters()]
    ['0.weight', '0.bias', '1.weight']
    """

    def __init__(self, stages: Iterable[PipelineStage], info: PipeInfo | None, ties: Sequence[Tie]) -> None:
        self._stages = sorted(stages, key=lambda stage: stage.stage_index)
        self._traced = info is not None
        self._places = {} if info is None else {name: place for place, name in enumerate(info.names)}
        self._ties = ties

    def parameters(self) -> list[HeldTensor]:
        """Return all parameters in the model's order, each object once.

        There are several objects for a tied parameter only if its stages were copied apart: on several devices, or by
        a fully_shard of each.
        """
        return self._distinct(lambda module: module.named_parameters(remove_duplicate=False))

    def buffers(self) -> list[HeldTensor]:
        """Return all buffers in the model's order, each object once."""
        return self._distinct(lambda module: module.named_buffers(remove_duplicate=False))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name, a tied one under its first name in the model."""
        found: dict[str, HeldTensor] = {}
        for held in self.parameters():
            # A name may lead to one parameter only: who makes a dict of them would leave the other one untrained.
            name = held.local_name if held.name in found else held.name
            if name in found:
                raise _same_names(name, found[name], held)
            found[name] = held
            yield name, held.value

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by name; one that several stages hold comes once."""
        found: dict[str, HeldTensor] = {}
        for held in self.buffers():
            if found.setdefault(held.name, held) is held:
                yield held.name, held.value
            elif not self._traced:
                raise _same_names(held.name, found[held.name], held)

    def state_dict(self) -> dict[str, Any]:
        """Return what the model's own state_dict has of these stages; of a tied parameter under all its names."""
        found: dict[str, HeldTensor] = {}
        for held in self._entries(lambda module: module.state_dict().items()):
            first = found.setdefault(held.local_name, held)
            if first is not held and not self._traced and first.stage != held.stage:
                raise _same_names(held.local_name, first, held)
        orders = {name: held.order for name, held in found.items()}
        for tie in self._ties if self._traced else ():
            names = self._names_of(tie)
            for held in [found[name] for name in names if name in found][:1]:
                for name in names:
                    found.setdefault(name, held)
                    orders[name] = self._places.get(name, -1), 0, held.stage, 0
        return {name: found[name].value for name in sorted(orders, key=orders.__getitem__)}

    def _distinct(self, tensors_of: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]) -> list[HeldTensor]:
        found: dict[int, HeldTensor] = {}
        for held in sorted(self._entries(tensors_of), key=lambda held: held.order):
            first = found.setdefault(id(held.value), held)
            if held.counts and not first.counts:
                found[id(held.value)] = replace(first, counts=True)
        return list(found.values())

    def _entries(self, values_of: Callable[[nn.Module], Iterable[tuple[str, Any]]]) -> Iterator[HeldTensor]:
        """Yield all entries of all stages, under all names.

        One that the model did not have when it was cut, such as an adapter, comes after the one before it in its stage.
        """
        for stage in self._stages:
            index, names = stage.stage_index, UnwrappedNames(stage.submod)
            first_names, elsewhere = self._first_names(index), self._counted_elsewhere(index)
            before = -1
            for place, (raw, value) in enumerate(values_of(stage.submod)):
                local = raw if raw in self._places else names.of(raw)
                before = self._places.get(local, before)
                name = first_names.get(local, local)
                order = self._places.get(name, before), int(self._traced and name != local), index, place
                yield HeldTensor(name, local, index, order, value, local not in elsewhere)

    def _first_names(self, stage: int) -> Mapping[str, str]:
        """Return the first name in the model of each tied parameter that a stage holds, by all its names there."""
        return {name: self._names_of(tie)[0] for tie in self._ties if stage in tie.stages for name in tie.names[stage]}

    def _counted_elsewhere(self, stage: int) -> set[str]:
        ties = [tie for tie in self._ties if stage in tie.stages[1:]]
        return {name for tie in ties for name in tie.names[stage]}

    def _names_of(self, tie: Tie) -> list[str]:
        """Return all names of a tied parameter, in the model's order."""
        names = dict.fromkeys(name for stage in tie.stages for name in tie.names[stage])
        return sorted(names, key=lambda name: self._places.get(name, -1))


class HoldsStages:
    """Base class of schedules: the parameters, buffers and state of the stages that this process holds."""

    stages: list[PipelineStage]
    info: PipeInfo | None
    ties: Sequence[Tie]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all stages that this process holds, each once, in the model's order."""
        return (held.value for held in self._state().parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages that this process holds, by the model's own names and in its order.

        A tied parameter comes once on every rank that holds it, under its first name in the model.

        >>> import torch
        >>> from pipecut import Schedule1F1B, pipeline
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> model[2].weight = model[0].weight
        >>> pipe = pipeline(model, (torch.ones(4, 4),), num_stages=2)
        >>> schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, lambda out: out.sum())
        >>> [name for name, parameter in schedule.named_parameters()]
        ['0.weight', '0.bias', '2.bias']
        >>> optimizer = torch.optim.AdamW(schedule.parameters())
        """
        return self._state().named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all stages that this process holds, by the model's own names and in its order."""
        return self._state().named_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return what the model's own state_dict has of the stages of this process, in the model's order.

        A tied parameter is there under all names that it has in the model, wherever the others are used.
        """
        return self._state().state_dict()

    def held_parameters(self) -> list[HeldTensor]:
        """Return the parameters with their places: the stage, and the order in the model."""
        return self._state().parameters()

    def held_buffers(self) -> list[HeldTensor]:
        """Return the buffers with their places; several of one name if stages hold copies of it."""
        return self._state().buffers()

    def _state(self) -> _StageState:
        return _StageState(self.stages, self.info, self.ties)


def _same_names(name: str, one: HeldTensor, other: HeldTensor) -> InputError:
    return InputError(
        f"stages {one.stage} and {other.stage} both hold a tensor named '{name}', and it is not the same one: let "
        "modules that are cut by hand keep their names in the model, as they do if each is the model without the "
        "layers of the other stages. schedule.parameters() needs no names"
    )
