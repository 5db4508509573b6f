"""The sum of the gradients of a parameter that several stages hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import PipeError
from ...pipe_ir.pipe import TiedParameter
from ...stage.stage import PipelineStage
from ..placement import Placement
from .transport import Meta, Transport


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

    def __init__(self, tie: TiedParameter, stages: Mapping[int, PipelineStage]) -> None:
        held = [held_parameter(tie, {stage: stages[stage]}) for stage in sorted(tie.stages) if stage in stages]
        self.parameters = list({id(parameter): parameter for parameter in held}.values())
        self._before: list[Tensor | None] | None = None

    def set_aside(self) -> None:
        """Keep what was accumulated before."""
        self._before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def own(self) -> Tensor:
        """The sum of this step on this rank; of a parameter in shards, that of the shard."""
        made = [_shard(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        return sum(made[1:], made[0]) if made else torch.zeros_like(_shard(self.parameters[0]))

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

    So all holders have the same bits, and their parameters stay the same through any number of optimizer steps.
    """

    def __init__(
        self,
        ties: Sequence[TiedParameter],
        stages: Mapping[int, PipelineStage],
        placement: Placement,
        transport: Transport,
    ) -> None:
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
            holders.set_aside()

    def sum(self, number: int) -> None:
        holders, ranks = self.holders[number], self.ranks[number]
        trained = holders.parameters[0].requires_grad
        holders.give(self._summed(holders.own().contiguous(), ranks) if trained else None)

    def finish(self) -> None:
        for holders in self.holders.values():
            if holders.is_waiting:
                holders.give(holders.own() if holders.parameters[0].requires_grad else None)

    def _summed(self, own: Tensor, ranks: list[int]) -> Tensor:
        meta = [Meta(tuple(own.shape), own.dtype, False)]
        if self.transport.rank != ranks[0]:
            self.transport.send(ranks[0], [own])
            (total,) = self.transport.receive(ranks[0], meta).wait()
            return total
        total = own
        for rank in ranks[1:]:
            (other,) = self.transport.receive(rank, meta).wait()
            total = total + other
        for rank in ranks[1:]:
            self.transport.send(rank, [total])
        return total


class LocalTies:
    """All holders are in this process: mostly one parameter, in which autograd has summed already."""

    def __init__(self, ties: Sequence[TiedParameter], stages: Mapping[int, PipelineStage]) -> None:
        self.holders = [_Holders(tie, stages) for tie in ties]

    def begin(self) -> None:
        for holders in self.holders:
            if len(holders.parameters) > 1 and not holders.is_waiting:
                holders.set_aside()

    def sum(self, number: int) -> None:
        """Nothing yet: other ranks may not have come to it."""

    def finish(self) -> None:
        for holders in self.holders:
            if holders.is_waiting:
                holders.give(holders.own() if holders.parameters[0].requires_grad else None)


def held_parameter(tie: TiedParameter, stages: Mapping[int, PipelineStage]) -> Tensor:
    """The tied parameter, where one of these stages holds it."""
    held = sorted(stage for stage in tie.stages if stage in stages)
    for name, parameter in stages[held[0]].submod.named_parameters(remove_duplicate=False):
        if name.removeprefix("module.") in tie.names:  # DistributedDataParallel puts its own level in front
            return parameter
    raise PipeError(f"stage {held[0]} does not hold {tie.names[0]}, which it shares: do not replace its parameters")


CHUNK = 1 << 20


def fingerprint(parameter: Tensor) -> str:
    """A number that tells whether two holders have the same values."""
    if parameter.device.type == "meta" or type(parameter) not in (Tensor, torch.nn.Parameter):
        return "not compared"
    numbers = parameter.detach().contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, numbers.numel(), CHUNK):
        part = numbers[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(1, part.numel() + 1, device=part.device) % 65521
        total = (total * 31 + int((part * weights).sum())) % (1 << 61)
    return f"{total:x}"
