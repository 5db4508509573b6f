"""Tied parameters: which stages hold them, and the sum of their gradients.

`pipecut.schedule.tie_messages` says which messages a sum between ranks takes; this file carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import InputError, PipeError
from ..pipe_ir import PipeInfo
from ..schedule import Dataflow, Placement, tie_messages
from ..stage import MeshLayout, PipelineStage, UnwrappedNames, place_like
from ..text import did_you_mean, numbered, tensor_text
from .transport import Meta, Transport

Stages = Mapping[int, PipelineStage]


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages hold, in each of them under one of the names that are listed for the stage."""

    title: str  # a name that no other tie has
    names: Mapping[int, tuple[str, ...]]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it, in order."""
        return tuple(sorted(self.names))

    def held(self, stages: Stages) -> list[tuple[int, Tensor]]:
        """Return those of these stages that hold it, each with its parameter."""
        here = [stage for stage in self.stages if stage in stages]
        return [(stage, self._parameter(stage, stages[stage].submod)) for stage in here]

    def _parameter(self, stage: int, module: nn.Module) -> Tensor:
        names = UnwrappedNames(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in self.names[stage] or names.of(name) in self.names[stage]:
                return parameter
        raise PipeError(
            f"stage {stage} does not hold {self.names[stage][0]}, which it shares: do not replace its parameters"
        )


def ties_of_pipe(info: PipeInfo) -> tuple[Tie, ...]:
    """Return the ties that a trace has found."""
    return tuple(Tie(tie.names[0], dict.fromkeys(tie.stages, tie.names)) for tie in info.tied_parameters)


def _check_not_partly_frozen(tie: Tie, frozen: Iterable[int], trained: Iterable[int]) -> None:
    """Raise if some holders are frozen and others are not: a gradient of some only would pull them apart."""
    frozen, trained = sorted(frozen), sorted(trained)
    if frozen and trained:
        raise PipeError(
            f"the tied parameter {tie.title} is frozen in {numbered('stage', frozen)} and trained in "
            f"{numbered('stage', trained)}, and the "
            "holders of one parameter have to stay the same: call requires_grad_() on it in all of these stages, with "
            "True or with False"
        )


# The sum of gradients.


_UNKNOWN, _FROZEN, _WITHOUT_GRADIENT, _WITH_GRADIENT = range(4)  # the status of the parameter on a rank


class TiedGradients(Protocol):
    """Sums the gradients of this step, and only those: the ones accumulated before have been summed before."""

    def begin(self) -> None:
        """Set aside the gradients that were accumulated before the step."""

    def sum(self, number: int) -> None:
        """Sum one tie over all ranks that hold it."""

    def finish(self) -> None:
        """Sum what is left: ties between stages of one rank."""


class _Holders:
    """The objects that are one parameter on a rank: a single one, unless the stages were copied apart."""

    def __init__(self, tie: Tie, stages: Stages) -> None:
        self.tie = tie
        self._held = tie.held(stages)
        self.parameters = list({id(parameter): parameter for _, parameter in self._held}.values())
        self._before: list[Tensor | None] | None = None

    def set_aside(self) -> None:
        """Set aside the gradients that were accumulated before the step."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def check_not_partly_frozen(self) -> None:
        """Raise if some holders of this rank are frozen and others are not."""
        trained = {stage: parameter.requires_grad for stage, parameter in self._held}
        _check_not_partly_frozen(
            self.tie, [stage for stage in trained if not trained[stage]], [stage for stage in trained if trained[stage]]
        )

    def own(self) -> Tensor | None:
        """Return the gradient of this step on this rank, if there is one; of a sharded parameter, that of the shard."""
        trained = [each for each in self.parameters if each.grad is not None and each.requires_grad]
        made = [_shard(_placed(each, each.grad)) for each in trained]  # type: ignore[arg-type]
        return sum(made[1:], made[0]).contiguous() if made else None

    def status_with(self, own: Tensor | None) -> int:
        """Return what the other ranks have to know before the sum, given `own()`."""
        if not self.parameters[0].requires_grad:
            return _FROZEN
        return _WITHOUT_GRADIENT if own is None else _WITH_GRADIENT

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def meta(self) -> Meta:
        """The shape and dtype of a gradient in a message."""
        shard = _shard(self.parameters[0])
        return Meta(tuple(shard.shape), shard.dtype, False)

    def give(self, total: Tensor | None) -> None:
        """Add the sum of all ranks to what was there before; None if there is no gradient."""
        for parameter, before in zip(self.parameters, self._before or [None] * len(self.parameters), strict=True):
            earlier = None if before is None else _shard(_placed(parameter, before))
            parts = [part for part in (earlier, total) if part is not None]
            # Holders do not share a tensor: an optimizer may change a gradient in place.
            summed = None if not parts else parts[0] + parts[1] if len(parts) == 2 else parts[0].clone()
            parameter.grad = None if summed is None else _like(parameter, summed)
        self._before = None

    @property
    def is_waiting(self) -> bool:
        """True if the gradients of this step are still to be summed."""
        return self._before is not None


def _placed(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient that lies on the mesh as its parameter does: autograd may leave it a partial sum, or whole."""
    layout = MeshLayout.of(parameter)
    return gradient if layout is None or MeshLayout.of(gradient) == layout else place_like(layout, gradient)


def _shard(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local().detach()


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return a shard as a tensor of the kind of its parameter, sharded in the same way."""
    if not hasattr(parameter, "to_local"):
        return shard
    kind: Any = type(parameter.data)
    sharding: Any = parameter
    return kind.from_local(  # type: ignore[no-any-return]
        shard, sharding.device_mesh, sharding.placements, shape=parameter.shape, stride=parameter.stride()
    )


class DistributedTies:
    """This rank's part in the sums: its sends and receives among the messages of `tie_messages`."""

    def __init__(
        self, ties: Sequence[Tie], stages: Mapping[int, PipelineStage], placement: Placement, transport: Transport
    ) -> None:
        self.placement = placement
        self.transport = transport
        self.ranks: dict[int, list[int]] = {}
        self.holders: dict[int, _Holders] = {}
        for number, tie in enumerate(ties):
            ranks = sorted({placement.rank_of[stage] for stage in tie.stages})
            if transport.rank in ranks:
                holders = _Holders(tie, stages)
                if len(ranks) > 1 or len(holders.parameters) > 1:
                    self.ranks[number], self.holders[number] = ranks, holders

    def begin(self) -> None:
        for holders in self.holders.values():
            holders.check_not_partly_frozen()
        for holders in self.holders.values():
            holders.set_aside()

    def sum(self, number: int) -> None:
        holders, ranks, rank = self.holders[number], self.ranks[number], self.transport.rank
        total = holders.own()
        known = dict.fromkeys(ranks, _UNKNOWN)  # the status of each rank, as far as it is known here
        known[rank] = holders.status_with(total)
        arrived: list[int] = []
        for message in tie_messages(ranks):
            if message.source == rank and not message.has_gradient:
                status = torch.tensor(list(known.values()), dtype=torch.int64, device=holders.device)
                self.transport.send(message.target, [status])
            elif message.source == rank and total is not None:
                self.transport.send(message.target, [total])
            elif message.target == rank and not message.has_gradient:
                (status,) = self.transport.receive(message.source, [Meta((len(ranks),), torch.int64, False)]).wait()
                arrived = status.tolist()
                known |= {each: got for each, got in zip(ranks, arrived, strict=True) if got != _UNKNOWN}
            elif message.target == rank and _WITH_GRADIENT in arrived:
                (other,) = self.transport.receive(message.source, [holders.meta]).wait()
                total = total + other if message.is_added and total is not None else other
        frozen = [stage for stage in holders.tie.stages if known[self.placement.rank_of[stage]] == _FROZEN]
        _check_not_partly_frozen(holders.tie, frozen, set(holders.tie.stages) - set(frozen))
        holders.give(total)

    def finish(self) -> None:
        for holders in self.holders.values():
            if holders.is_waiting:
                holders.give(holders.own())


class LocalTies:
    """Sums where all holders are in this process: mostly one parameter, in which autograd has summed already."""

    def __init__(self, ties: Sequence[Tie], stages: Stages) -> None:
        self.holders = [_Holders(tie, stages) for tie in ties]

    def begin(self) -> None:
        for holders in self.holders:
            holders.check_not_partly_frozen()
        for holders in self.holders:
            if len(holders.parameters) > 1 and not holders.is_waiting:
                holders.set_aside()

    def sum(self, number: int) -> None:
        """Do nothing yet: other ranks may not have reached it."""

    def finish(self) -> None:
        for holders in self.holders:
            if holders.is_waiting:
                holders.give(holders.own())


# Ties of modules that were cut by hand.


_Declared = Sequence[Mapping[int, str]]
_FORM = 'a tie is a dict from stage to the name of the parameter there, such as {0: "embed.weight", 3: "head.weight"}'


def declared_ties(declared: _Declared, stages: Iterable[PipelineStage]) -> tuple[Tie, ...]:
    """Check the ties that a user declared, against each other and against the stages that are here.

    >>> from torch import nn
    >>> stages = [PipelineStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2)]
    >>> [tie.title for tie in declared_ties([{0: "weight", 1: "weight"}], stages)]
    ['weight of stage 0']
    """
    here = {stage.stage_index: stage for stage in stages}
    if isinstance(declared, Mapping | str):
        raise InputError(f"ties must be a list, got {type(declared).__name__}: {_FORM}")
    if declared and any(stage.pipe_info is not None for stage in here.values()):
        raise InputError("ties= is for modules that were cut by hand; those of a traced model are known: leave it out")
    total = max((stage.num_stages for stage in here.values()), default=0)
    ties = tuple(_checked(f"ties[{number}]", tie, total) for number, tie in enumerate(declared))
    holders: dict[object, str] = {}
    for number, tie in enumerate(ties):
        _check_known(f"ties[{number}]", tie, here)
        _check_same_shape(f"ties[{number}]", tie, here)
        _check_tied_once(f"ties[{number}]", tie, here, holders)
    return ties


def _checked(where: str, tie: Any, total: int) -> Tie:
    pairs = list(tie.items()) if isinstance(tie, Mapping) else []
    plain = all(type(stage) is int and isinstance(name, str) for stage, name in pairs)
    if len(pairs) < 2 or not plain:
        raise InputError(f"{where} is {tie!r}: {_FORM}, with two stages at least")
    beyond = [stage for stage, _ in pairs if not 0 <= stage < total]
    if beyond:
        raise InputError(f"{where} has stage {beyond[0]}, and the stages are 0 to {total - 1}")
    first = min(stage for stage, _ in pairs)
    return Tie(f"{tie[first]} of stage {first}", {stage: (name,) for stage, name in sorted(pairs)})


def _check_known(where: str, tie: Tie, here: Mapping[int, PipelineStage]) -> None:
    for stage, (name,) in tie.names.items():
        if stage not in here:
            continue
        known = [each for each, _ in here[stage].submod.named_parameters(remove_duplicate=False)]
        if name not in known and name not in map(UnwrappedNames(here[stage].submod).of, known):
            raise InputError(f"{where}: stage {stage} has no parameter {name!r}.{did_you_mean(name, known)}")


def _check_same_shape(where: str, tie: Tie, here: Mapping[int, PipelineStage]) -> None:
    shapes = {stage: tensor_text(parameter) for stage, parameter in tie.held(here)}
    if len(set(shapes.values())) > 1:
        shapes_text = ", ".join(f"{tie.names[stage][0]} of stage {stage} is {shape}" for stage, shape in shapes.items())
        raise InputError(f"{where} cannot be one parameter: {shapes_text}")


def _check_tied_once(where: str, tie: Tie, here: Mapping[int, PipelineStage], holders: dict[object, str]) -> None:
    """Raise on a parameter in two ties: it would be summed twice. It may have two names in a stage."""
    keys = {(stage, name): f"{name} of stage {stage}" for stage, (name,) in tie.names.items()}
    objects = {id(parameter): f"{tie.names[stage][0]} of stage {stage}" for stage, parameter in tie.held(here)}
    for key, text in (keys | objects).items():
        if key in holders:
            raise InputError(f"{text} is in {holders[key]} and in {where}: put all that is one parameter in one tie")
        holders[key] = where


def with_ties(dataflow: Dataflow, ties: Sequence[Tie]) -> Dataflow:
    """Return a dataflow with these ties; if it has ties of its own they must be the same."""
    stages = tuple(frozenset(tie.stages) for tie in ties)
    if dataflow.ties not in ((), stages):
        raise InputError(
            f"the plan has ties between the stages {[sorted(tie) for tie in dataflow.ties]}, and the schedule got "
            f"{[sorted(tie) for tie in stages]}: pass ties=, for each of the plan's ties the name of the parameter in "
            "each stage"
        )
    return replace(dataflow, ties=stages)
