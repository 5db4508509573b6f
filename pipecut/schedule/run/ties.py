"""The sum of the gradients of a parameter that several stages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...stage.stage import PipelineStage
from ..placement import Placement
from .tie import Stages, Tie, refuse_partly_frozen
from .transport import Meta, Transport

FROZEN, WITHOUT_GRADIENT, WITH_GRADIENT = range(3)  # what a rank says of the parameter before it sends its gradient


class TiedGradients(Protocol):
    """Sums the gradients of this step, and only those: what was accumulated before has been summed before."""

    def begin(self) -> None:
        """Set aside what was accumulated before the step."""

    def sum(self, number: int) -> None:
        """Sum one tie over all ranks that hold it."""

    def finish(self) -> None:
        """Sum what is left: ties between stages of one rank."""


class _Holders:
    """The objects that are one parameter on a rank: one, unless the stages were copied apart."""

    def __init__(self, tie: Tie, stages: Stages) -> None:
        self.tie = tie
        self._held = tie.held(stages)
        self.parameters = list({id(parameter): parameter for _, parameter in self._held}.values())
        self._before: list[Tensor | None] | None = None

    def set_aside(self) -> None:
        """Keep what was accumulated before."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def refuse_partly_frozen(self) -> None:
        """All holders of this rank are frozen, or none."""
        trained = {stage: parameter.requires_grad for stage, parameter in self._held}
        refuse_partly_frozen(
            self.tie, [stage for stage in trained if not trained[stage]], [stage for stage in trained if trained[stage]]
        )

    def own(self) -> Tensor | None:
        """The sum of this step on this rank, if there is a gradient; of a parameter in shards, that of the shard."""
        made = [_shard(each.grad) for each in self.parameters if each.grad is not None and each.requires_grad]
        return sum(made[1:], made[0]).contiguous() if made else None

    @property
    def state(self) -> int:
        """What the others have to know before the sum."""
        if not self.parameters[0].requires_grad:
            return FROZEN
        return WITHOUT_GRADIENT if self.own() is None else WITH_GRADIENT

    @property
    def meta(self) -> Meta:
        """What a gradient looks like on its way."""
        shard = _shard(self.parameters[0])
        return Meta(tuple(shard.shape), shard.dtype, False)

    def give(self, total: Tensor | None) -> None:
        """The sum of all ranks, added to what was there before; None if there is none."""
        for parameter, before in zip(self.parameters, self._before or [None] * len(self.parameters), strict=True):
            parts = [_shard(part) for part in (before, total) if part is not None]
            # Holders do not share a tensor: an optimizer may change a gradient in place.
            summed = None if not parts else parts[0] + parts[1] if len(parts) == 2 else parts[0].clone()
            parameter.grad = None if summed is None else _like(parameter, summed)
        self._before = None

    @property
    def is_waiting(self) -> bool:
        """Whether the gradients of this step are still to be summed."""
        return self._before is not None


def _shard(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local().detach()


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """A shard as a tensor of the kind of its parameter: sharded in the same way."""
    if not hasattr(parameter, "to_local"):
        return shard
    kind: Any = type(parameter.data)
    sharding: Any = parameter
    return kind.from_local(  # type: ignore[no-any-return]
        shard, sharding.device_mesh, sharding.placements, shape=parameter.shape, stride=parameter.stride()
    )


class DistributedTies:
    """This rank's part in the sums: the first rank that holds a parameter adds up, in order, and sends the sum back.

    So all holders have the same bits, and their parameters stay the same through any number of optimizer steps. A rank
    says what it has before it sends a gradient: one that froze the parameter on its own would be waited for in vain.
    """

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
            holders.refuse_partly_frozen()
        for holders in self.holders.values():
            holders.set_aside()

    def sum(self, number: int) -> None:
        holders, ranks = self.holders[number], self.ranks[number]
        if self.transport.rank == ranks[0]:
            self._collect(holders, ranks)
        else:
            self._contribute(holders, ranks)

    def finish(self) -> None:
        for holders in self.holders.values():
            if holders.is_waiting:
                holders.give(holders.own())

    def _collect(self, holders: _Holders, ranks: list[int]) -> None:
        states, total = [holders.state], holders.own()
        for rank in ranks[1:]:
            states += self._states_of(rank, 1)
            if states[-1] == WITH_GRADIENT:
                (other,) = self.transport.receive(rank, [holders.meta]).wait()
                total = other if total is None else total + other
        for rank in ranks[1:]:
            self._send(rank, states, holders, total)
        self._refuse_partly_frozen(holders.tie, ranks, states)
        holders.give(total)

    def _contribute(self, holders: _Holders, ranks: list[int]) -> None:
        self._send(ranks[0], [holders.state], holders, holders.own())
        states = self._states_of(ranks[0], len(ranks))
        self._refuse_partly_frozen(holders.tie, ranks, states)
        has_sum = WITH_GRADIENT in states
        holders.give(self.transport.receive(ranks[0], [holders.meta]).wait()[0] if has_sum else None)

    def _send(self, rank: int, states: list[int], holders: _Holders, gradient: Tensor | None) -> None:
        device = holders.parameters[0].device
        self.transport.send(rank, [torch.tensor(states, dtype=torch.int64, device=device)])
        if gradient is not None:
            self.transport.send(rank, [gradient])

    def _states_of(self, rank: int, count: int) -> list[int]:
        (states,) = self.transport.receive(rank, [Meta((count,), torch.int64, False)]).wait()
        return states.tolist()

    def _refuse_partly_frozen(self, tie: Tie, ranks: list[int], states: list[int]) -> None:
        known = dict(zip(ranks, states, strict=True))
        frozen = [stage for stage in tie.stages if known[self.placement.rank_of[stage]] == FROZEN]
        refuse_partly_frozen(tie, frozen, set(tie.stages) - set(frozen))


class LocalTies:
    """All holders are in this process: mostly one parameter, in which autograd has summed already."""

    def __init__(self, ties: Sequence[Tie], stages: Stages) -> None:
        self.holders = [_Holders(tie, stages) for tie in ties]

    def begin(self) -> None:
        for holders in self.holders:
            holders.refuse_partly_frozen()
        for holders in self.holders:
            if len(holders.parameters) > 1 and not holders.is_waiting:
                holders.set_aside()

    def sum(self, number: int) -> None:
        """Nothing yet: other ranks may not have come to it."""

    def finish(self) -> None:
        for holders in self.holders:
            if holders.is_waiting:
                holders.give(holders.own())
