"""Pipelines side by side: the ranks that hold copies or shards of a stage, and the cost of keeping them equal.

The batch is divided among the pipelines. Under DistributedDataParallel ("ddp") every pipeline holds all parameters, and
gradients are averaged by a ring all-reduce. Under `fully_shard` each holds a part of them: a stage gathers its
parameters before its first computation of a step, beside whatever its rank does until then, keeps them gathered, and
its gradients are averaged by a ring reduce-scatter. Both averages follow the last backward of the stage on its rank,
while the ranks of earlier stages are still computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import InputError
from ..schedule import Costs, Link
from ..split import TRAINED_MEMORY_FACTOR, Chain, Machine, StageCost
from ..text import counted, did_you_mean, listed

_Wrapper = Literal["", "ddp", "fully_shard"]
WRAPPERS: tuple[_Wrapper, ...] = ("ddp", "fully_shard")
_NO_WRAPPER: tuple[_Wrapper, ...] = ("",)


@dataclass(frozen=True)
class Layout:
    """Places of all ranks in `replicas` pipelines of the same length, under a wrapper if there are several.

    `inner` is the dim with neighbouring ranks: "dp", the copies of a stage, or "pp", the ranks of a pipeline.

    >>> layout = Layout(4, 2, "ddp", "dp")
    >>> [[layout.rank(place, copy) for place in range(layout.depth)] for copy in range(2)]
    [[0, 2], [1, 3]]
    """

    ranks: int
    replicas: int = 1
    wrapper: _Wrapper = ""
    inner: Literal["dp", "pp"] = "dp"

    @property
    def depth(self) -> int:
        """The number of ranks of a pipeline."""
        return self.ranks // self.replicas

    def rank(self, place: int, copy: int) -> int:
        """Return the rank at a place of one of the pipelines."""
        return place * self.replicas + copy if self.inner == "dp" else copy * self.depth + place

    def place(self, rank: int) -> int:
        """Return the place of a rank in its pipeline."""
        return rank // self.replicas if self.inner == "dp" else rank % self.depth

    def least(self, values: Sequence[float] | None) -> list[float] | None:
        """Return the least value of the copies at each place of a pipeline, of values for all ranks."""
        if values is None or self.replicas == 1:
            return None if values is None else list(values)
        return [min(values[self.rank(place, copy)] for copy in range(self.replicas)) for place in range(self.depth)]

    def machine(self, machine: Machine) -> Machine:
        """Return the machine with the slowest link between neighbours of a pipeline."""
        stride = 1 if self.inner == "pp" else self.replicas
        return replace(machine, link_bandwidth=self._bandwidth(machine, stride, self.depth), network_bandwidth=None)

    def copy_link(self, machine: Machine) -> Link:
        """Return the slowest link between the copies of a stage."""
        stride = 1 if self.inner == "dp" else self.depth
        return Link(machine.link_latency, self._bandwidth(machine, stride, self.replicas))

    def _bandwidth(self, machine: Machine, stride: int, count: int) -> float:
        """Return the bandwidth between `count` ranks that are `stride` apart: the network's, if hosts part them."""
        spread, host = stride * count, machine.ranks_per_host
        is_inside = count == 1 or self.ranks <= host or (spread <= host and host % spread == 0)
        return machine.link_bandwidth if is_inside or not machine.network_bandwidth else machine.network_bandwidth


def layouts(ranks: int, replicas: int, wrappers: Sequence[_Wrapper], machine: Machine) -> Iterator[Layout]:
    """Yield the layouts of a number of pipelines; those with the same links count once."""
    seen = set()
    for wrapper in wrappers if replicas > 1 else _NO_WRAPPER:
        for inner in ("dp", "pp"):
            layout = Layout(ranks, replicas, wrapper, inner)
            links = wrapper, layout.machine(machine).link_bandwidth, layout.copy_link(machine)
            if links not in seen:
                seen.add(links)
                yield layout


def replica_counts(replicas: int | Literal["auto"], ranks: int, batch: int) -> tuple[list[int], dict[int, str]]:
    """Return the numbers of pipelines to try, and those that cannot be, with the reason; `replicas` is the option."""
    if replicas != "auto":
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise InputError(f"replicas must be 'auto' or an integer of at least 1, got {replicas!r}")
        if ranks % replicas or batch % replicas:
            raise InputError(
                f"replicas={replicas}: {counted(ranks, 'rank')} and a batch of {batch} are to be divided among as many "
                f"pipelines, evenly, as each copy has the same weight in the average: give a number that divides both, "
                "or 'auto'"
            )
        return [replicas], {}
    divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
    uneven = {
        count: f"a batch of {batch} cannot be divided evenly among {count} pipelines"
        for count in divisors
        if batch % count
    }
    return [count for count in divisors if count not in uneven], uneven


def checked_wrappers(wrapper: str) -> tuple[_Wrapper, ...]:
    """Return the wrappers to try; `wrapper` is the option of plan()."""
    if wrapper == "auto":
        return WRAPPERS
    if wrapper not in WRAPPERS:
        known = ("auto", *WRAPPERS)
        raise InputError(f"wrapper={wrapper!r} is not known.{did_you_mean(str(wrapper), known)} Give {listed(known)}")
    return (wrapper,)


# Collectives, by rings: every rank sends a part of the whole to its neighbour at the same time.


def _ring(size: float, ranks: int, link: Link, times: int) -> float:
    """Return the time of rings: an all-gather or a reduce-scatter is one, an all-reduce is two."""
    return times * (ranks - 1) * link.time(size / ranks)


def with_collectives(costs: Costs, stages: Sequence[StageCost], layout: Layout, machine: Machine) -> Costs:
    """Return the costs with the time of the collectives of each stage."""
    if layout.replicas == 1:
        return costs
    link, copies = layout.copy_link(machine), layout.replicas
    sharded = layout.wrapper == "fully_shard"
    return replace(
        costs,
        unshard=[_ring(stage.parameter_bytes, copies, link, 1) if sharded else 0.0 for stage in stages],
        reduce_grad=[_ring(stage.trained_bytes, copies, link, 1 if sharded else 2) for stage in stages],
    )


# Memory.


@dataclass(frozen=True)
class _Factors:
    """Bytes that a rank keeps for each byte of parameters, and more for each of those that are trained."""

    held: float
    trained: float

    @classmethod
    def of(cls, layout: Layout) -> _Factors:
        state = TRAINED_MEMORY_FACTOR - 1  # the gradient, and what the optimizer keeps
        if layout.wrapper != "fully_shard":
            return cls(1.0, state)
        # In a step the whole parameters and their whole gradients are there; shards of all are there at any time.
        return cls(1 + 1 / layout.replicas, 1 + state / layout.replicas)


def kept_bytes(stage: StageCost, layout: Layout) -> float:
    """Return the bytes of a stage's parameters, gradients, optimizer state and buffers on one rank."""
    factors = _Factors.of(layout)
    return factors.held * stage.parameter_bytes + factors.trained * stage.trained_bytes + stage.buffer_bytes


def chain_on(chain: Chain, layout: Layout, machine: Machine) -> Chain:
    """Return the chain as a layout balances it: with its links, and with the memory of its parameters."""
    factors = _Factors.of(layout)
    trained = factors.trained / (TRAINED_MEMORY_FACTOR - 1)  # blocks() multiplies by this
    linked = replace(chain, machine=layout.machine(machine))
    if factors == _Factors(1.0, TRAINED_MEMORY_FACTOR - 1):
        return linked
    return replace(
        linked,
        parameters=tuple(factors.held * size for size in chain.parameters),
        trained=tuple(trained * size for size in chain.trained),
        shared=tuple(
            replace(item, parameter=factors.held * item.parameter, trained=trained * item.trained)
            for item in chain.shared
        ),
    )
