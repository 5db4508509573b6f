"""The model as a chain of blocks with the costs of one microbatch, for each size of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..measurement.chain import measured_chain
from ..measurement.link import measure_link
from ..pipe_ir.traced import TracedModel
from ..split.chain import Chain
from ..split.chain_maker import chain_of
from ..split.costs.machine import Machine
from ..split.costs.times import Times, mean_of
from .together import on_all_ranks, on_each_rank


@dataclass(frozen=True)
class Pricing:
    """How costs are found. In a group all ranks measure at once, as they will compute at once, and take the mean."""

    machine: Machine | None
    measured: bool
    ranks: int
    group: dist.ProcessGroup | None

    def machine_of(self, traced: TracedModel) -> Machine:
        """What was given, or this machine; with the link between the ranks of a group."""
        if self.machine is not None:
            return self.machine
        group = self.group
        found = on_each_rank(group, lambda: _measured_machine(traced))
        if group is None:
            return found
        links = [link for link in on_all_ranks(group, lambda: measure_link(group, _device(group, traced))) if link]
        if not links:
            return found
        latency, bandwidth = (sum(values) / len(links) for values in zip(*links, strict=True))
        return replace(found, link_latency=latency, link_bandwidth=bandwidth)

    def chains(
        self,
        traced: TracedModel,
        sizes: Sequence[int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> dict[int, Chain]:
        """The chains, by size."""
        machine = self.machine_of(traced)

        def computed() -> tuple[Chain, dict[int, Chain]]:
            by_size = {size: chain_of(traced, machine, {**traced.hints, "batch": size}) for size in sizes}
            return chain_of(traced, machine), by_size

        example, chains = on_each_rank(self.group, computed)
        if not self.measured:
            return chains

        def times() -> list[Times]:
            tell("measuring the parts of the model")
            return list(measured_chain(example, args, kwargs, stages=2 * self.ranks).times)

        found = on_all_ranks(self.group, times)
        seen = [mean_of(copies) for copies in zip(*found, strict=True)]
        # Other sizes than the example's are computed, each block as much off as it was at the example's.
        return {
            size: chain.with_times([_scaled(*each) for each in zip(chain.times, seen, example.times, strict=True)])
            for size, chain in chains.items()
        }


def _measured_machine(traced: TracedModel) -> Machine:
    return Machine.measure(traced.device, {parameter.dtype for parameter in traced.model.parameters()})


def _scaled(times: Times, seen: Times, said: Times) -> Times:
    """Times that are as much off as what was said is from what was seen."""
    return times.scaled(
        _ratio(seen.forward, said.forward),
        _ratio(seen.backward_input, said.backward_input),
        _ratio(seen.backward_weight, said.backward_weight),
    )


def _ratio(seen: float, said: float) -> float:
    return seen / said if said else 1.0


def _device(group: dist.ProcessGroup, traced: TracedModel) -> torch.device:
    """Where messages of the group are: a backend for accelerators takes none from the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return traced.device if traced.device.type == accelerator.type else accelerator
