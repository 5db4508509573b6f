"""A traced model made a chain: every step in the block that it belongs to, and what the blocks cost."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..pipe_ir.effects import operator_name
from ..pipe_ir.spec import Dim
from ..pipe_ir.traced import TracedModel
from .chain import Chain, Place, SharedBytes
from .cost import Weights, step_flops
from .costs.machine import Machine
from .costs.memory_map import bytes_of
from .costs.step_cost import CostFinder
from .costs.times import StepTimes, Times
from .places import allowed_places, with_work_between

NUMBERS = ("aten::item", "aten::_local_scalar_dense")


def chain_of(traced: TracedModel, machine: Machine | None = None, sizes: Mapping[str, int] | None = None) -> Chain:
    """The chain of a traced model at given sizes of its symbolic dims, those of the example if left out.

    >>> import torch
    >>> from pipecut import pipeline
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    >>> chain = chain_of(pipeline(model, (torch.ones(2, 4),)).traced)
    >>> [place.cut.label for place in chain.places]
    ["the cut after '0'", "the cut after '1'"]
    >>> chain.parameters
    (80.0, 80.0, 80.0)
    """
    return _ChainMaker(traced, machine or Machine.nominal(traced.device.type), {**traced.hints, **(sizes or {})}).make()


class _ChainMaker:
    """Puts every step into the block that it belongs to, and adds up."""

    def __init__(self, traced: TracedModel, machine: Machine, sizes: Mapping[str, int]) -> None:
        self.traced, self.machine, self.sizes = traced, machine, sizes
        self.finder = CostFinder(traced)
        self.step_times = StepTimes(self.finder, machine, sizes)
        self.weigh = Weights(traced, sizes)
        self.operations = [
            step for step in traced.steps if step.kind == "op" and traced.root.begin <= step.tick < traced.root.end
        ]

    def make(self) -> Chain:
        """The chain with all places that are allowed."""
        places = with_work_between(self._sendable(allowed_places(self.traced)), [step.tick for step in self.operations])
        ticks = [place.cut.tick for place in places]
        block_of = {step.index: bisect.bisect_right(ticks, step.tick) for step in self.operations}
        times = [Times()] * (len(places) + 1)
        for step in self.operations:
            times[block_of[step.index]] += self.step_times.of(step)
        items = [*self._state(block_of), *self._activations(block_of)]
        live = self._live(ticks)

        def own(name: str) -> tuple[float, ...]:
            totals = [0.0] * len(times)
            for item in items:
                if len(item.blocks) == 1:
                    totals[item.blocks[0]] += getattr(item, name)
            return tuple(totals)

        return Chain(
            self.traced,
            tuple(replace(place, sent=size, trains=trains) for place, (size, trains) in zip(places, live, strict=True)),
            tuple(times),
            own("parameter"),
            own("trained"),
            own("buffer"),
            own("saved"),
            self._working(block_of, len(times)),
            self._deferred(block_of, len(times)),
            tuple(item for item in items if len(item.blocks) > 1),
            self.machine,
            self.sizes,
        )

    def _state(self, block_of: Mapping[int, int]) -> list[SharedBytes]:
        users: dict[int, set[int]] = {}
        for step in self.operations:
            for index in step.refs:
                if self.traced.steps[index].kind == "state":
                    users.setdefault(index, set()).add(block_of[step.index])
        found = []
        for index, blocks in sorted(users.items(), key=lambda item: self.finder.place_of_parameter(item[0])):
            size = self._number(bytes_of(self.traced.steps[index]))
            spec = self.traced.steps[index].spec
            is_parameter = self.finder.is_parameter(index)
            found.append(
                SharedBytes(
                    tuple(sorted(blocks)),
                    parameter=size if is_parameter else 0.0,
                    trained=size if is_parameter and spec is not None and spec.requires_grad else 0.0,
                    buffer=0.0 if is_parameter else size,
                )
            )
        return found

    def _activations(self, block_of: Mapping[int, int]) -> list[SharedBytes]:
        users: dict[int, set[int]] = {}
        sizes: dict[int, Dim] = {}
        for step in self.operations:
            for kept in self.finder.saved.of(step):
                users.setdefault(kept.key, set()).add(block_of[step.index])
                sizes[kept.key] = kept.bytes
        return [SharedBytes(tuple(sorted(blocks)), saved=self._number(sizes[key])) for key, blocks in users.items()]

    def _working(self, block_of: Mapping[int, int], blocks: int) -> tuple[float, ...]:
        """In each block the most that one operation's backward needs: gradients of its result and of its arguments."""
        found = [0.0] * blocks
        for step in self.operations:
            needing = [index for index in {step.index, *step.refs} if self.finder.saved.index_needs_gradient(index)]
            size = sum(self._number(bytes_of(self.traced.steps[index])) for index in needing)
            found[block_of[step.index]] = max(found[block_of[step.index]], size)
        return tuple(found)

    def _deferred(self, block_of: Mapping[int, int], blocks: int) -> tuple[float, ...]:
        """In each block what its weights are multiplied with, each value once, and the gradients of the products."""
        needed: list[set[int]] = [set() for _ in range(blocks)]
        is_weight, needs_gradient = self.finder.memory.is_weight, self.finder.saved.index_needs_gradient
        found = [0.0] * blocks
        for step in self.operations:
            weights = {index for index in step.refs if is_weight[index] and needs_gradient(index)}
            if weights and step_flops(self.traced, step) != 0:
                block = block_of[step.index]
                needed[block] |= {index for index in step.refs if not is_weight[index]}
                found[block] += self._number(bytes_of(step))
        return tuple(
            size + sum(self._number(bytes_of(self.traced.steps[index])) for index in indices)
            for size, indices in zip(found, needed, strict=True)
        )

    def _live(self, ticks: Sequence[int]) -> list[tuple[float, bool]]:
        """All values that are made before each tick and used after it, skips included: bytes, and whether any trains.

        Whatever needs no gradient and follows from sizes and constants alone is made again where it is used.
        """
        free = self._free_to_make()
        sizes, training = [0.0] * (len(ticks) + 1), [0] * (len(ticks) + 1)
        for index, last in self._last_uses().items():
            step = self.traced.steps[index]
            if step.kind in ("op", "input") and index not in free:
                begin, end = bisect.bisect_right(ticks, step.tick), bisect.bisect_right(ticks, last)
                size, trains = self._number(bytes_of(step)), step.spec is not None and step.spec.requires_grad
                sizes[begin] += size
                sizes[end] -= size
                training[begin] += trains
                training[end] -= trains
        totals = zip(itertools.accumulate(sizes[:-1]), itertools.accumulate(training[:-1]), strict=True)
        return [(max(size, 0.0), count > 0) for size, count in totals]

    def _sendable(self, places: list[Place]) -> list[Place]:
        """Places that nothing crosses which no other stage could get: sizes and numbers that depend on the data."""
        numbers = self._numbers_from_data()
        spans = [
            (step.tick, last)
            for step, last in ((self.traced.steps[index], last) for index, last in self._last_uses().items())
            if step.index in numbers or (step.spec is not None and step.spec.symbols - self.traced.dims.keys())
        ]
        return [place for place in places if not any(made < place.cut.tick <= last for made, last in spans)]

    def _numbers_from_data(self) -> set[int]:
        """Numbers that were taken out of a tensor, and those made of them."""
        found: set[int] = set()
        for step in self.operations:
            if operator_name(step.target) in NUMBERS or (step.spec is None and not found.isdisjoint(step.refs)):
                found.add(step.index)
        return found

    def _last_uses(self) -> dict[int, int]:
        """The tick of the last operation that uses each value."""
        found: dict[int, int] = {}
        for step in self.operations:
            for index in step.refs:
                found[index] = max(found.get(index, -1), step.tick)
        return found | dict.fromkeys(self.traced.output.refs, self.traced.root.end + 1)

    def _free_to_make(self) -> set[int]:
        """Values made of sizes, constants and buffers alone."""
        free: set[int] = set()
        for step in self.traced.steps:
            made_of_nothing = step.kind == "op" and not step.writes and all(index in free for index in step.refs)
            state = step.kind in ("state", "constant")
            if (made_of_nothing or state) and not (step.spec is not None and step.spec.requires_grad):
                free.add(step.index)
        return free

    def _number(self, dim: Dim) -> float:
        return float(dim) if isinstance(dim, int | float) else float(self.weigh.number(dim))
