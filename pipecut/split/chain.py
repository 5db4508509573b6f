"""A traced model as a chain of blocks: what lies between the places where it may be cut, with its costs."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipe_ir.traced import Step, TracedModel
from .balancing.problem import Blocks, Shared
from .costs.machine import Machine
from .costs.times import Times
from .points import Cut, SplitPlan

# Bytes that are there for each byte of a parameter that is trained: itself, its gradient, and what Adam keeps of it.
TRAINED = 4.0


@dataclass(frozen=True)
class Place:
    """Where a cut is allowed. `depth` is 0 between the model's own children; `sent` what crosses, in bytes.

    `trains` is whether a gradient comes back for any of that.
    """

    cut: Cut
    depth: int
    sent: float = 0.0
    trains: bool = True


@dataclass(frozen=True)
class StageCost:
    """What one stage of a cut costs, for one microbatch; `received` and `sent` are the bytes of all live values.

    `working_bytes` are there for a moment: the gradients that one operation's backward takes and makes.
    `deferred_bytes` are what weight gradients that are put off need: what weights were multiplied with, and gradients.
    """

    times: Times
    parameter_bytes: float
    trained_bytes: float
    buffer_bytes: float
    saved_bytes: float
    working_bytes: float
    deferred_bytes: float
    received: float
    sent: float


@dataclass(frozen=True)
class StageTie:
    """A parameter that several stages hold, and the bytes of its gradient, which is summed over them once a step."""

    stages: tuple[int, ...]
    gradient_bytes: float


@dataclass(frozen=True)
class Chain:
    """Blocks and the places between them. A tied weight, or a value that several blocks keep, is in `shared`."""

    traced: TracedModel
    places: tuple[Place, ...]
    times: tuple[Times, ...]
    parameters: tuple[float, ...]
    trained: tuple[float, ...]
    buffers: tuple[float, ...]
    saved: tuple[float, ...]
    working: tuple[float, ...]
    deferred: tuple[float, ...]
    shared: tuple[SharedBytes, ...]
    machine: Machine
    sizes: Mapping[str, int]

    def blocks(self, *, optimizer: float = TRAINED) -> Blocks:
        """The chain as plain numbers; `optimizer` is the bytes that are there for each byte of a trained parameter."""
        kept = [
            held + (optimizer - 1) * trained + buffers
            for held, trained, buffers in zip(self.parameters, self.trained, self.buffers, strict=True)
        ]
        return Blocks(
            times=tuple(each.total for each in self.times),
            # An activation one way and its gradient the other; the latency passes while other microbatches compute.
            transfers=tuple(2 * place.sent / self.machine.link_bandwidth for place in self.places),
            kept=tuple(kept),
            saved=self.saved,
            shared=tuple(
                Shared(item.blocks, item.parameter + (optimizer - 1) * item.trained + item.buffer, item.saved)
                for item in self.shared
            ),
            prices=tuple(place.sent + 1e-3 * place.depth for place in self.places),
            names=tuple(map(self.name, range(len(self.times)))),
        )

    def name(self, block: int) -> str:
        """What a user knows a block by: the cuts around it."""
        before = self.places[block - 1].cut.label if block else "the beginning of the model"
        after = self.places[block].cut.label if block < len(self.places) else "the end of the model"
        return f"what lies between {before} and {after}"

    def plan(self, cuts: Sequence[int]) -> SplitPlan:
        """Cuts as numbers of blocks, as cuts of the model."""
        return SplitPlan(tuple(self.places[position - 1].cut for position in cuts))

    def up_to(self, depth: int) -> Chain:
        """The chain with only the places that are not deeper inside modules."""
        return self.with_places([number for number, place in enumerate(self.places) if place.depth <= depth])

    def with_places(self, numbers: Sequence[int]) -> Chain:
        """The chain with only some of its places: blocks between them become one."""
        bounds = [0, *(number + 1 for number in numbers), len(self.times)]
        runs = list(zip(bounds, bounds[1:], strict=False))
        joined = [_moved(item, bounds) for item in self.shared]

        def sums(values: Sequence[float], name: str) -> tuple[float, ...]:
            totals = [sum(values[begin:end]) for begin, end in runs]
            for item in joined:
                if len(item.blocks) == 1:
                    totals[item.blocks[0]] += getattr(item, name)
            return tuple(totals)

        return replace(
            self,
            places=tuple(self.places[number] for number in numbers),
            times=tuple(sum(self.times[begin:end], Times()) for begin, end in runs),
            parameters=sums(self.parameters, "parameter"),
            trained=sums(self.trained, "trained"),
            buffers=sums(self.buffers, "buffer"),
            saved=sums(self.saved, "saved"),
            working=tuple(max(self.working[begin:end]) for begin, end in runs),
            deferred=tuple(sum(self.deferred[begin:end]) for begin, end in runs),
            shared=tuple(item for item in joined if len(item.blocks) > 1),
        )

    def with_times(self, times: Sequence[Times]) -> Chain:
        """The chain with other times."""
        return replace(self, times=tuple(times))

    def stage_costs(self, cuts: Sequence[int]) -> tuple[StageCost, ...]:
        """What each stage costs if stages 1, 2... begin at these blocks."""
        bounds = [0, *cuts, len(self.times)]
        found = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            inside = [item for item in self.shared if any(begin <= block < end for block in item.blocks)]
            found.append(
                StageCost(
                    self._times(begin, end),
                    sum(self.parameters[begin:end]) + sum(item.parameter for item in inside),
                    sum(self.trained[begin:end]) + sum(item.trained for item in inside),
                    sum(self.buffers[begin:end]) + sum(item.buffer for item in inside),
                    sum(self.saved[begin:end]) + sum(item.saved for item in inside),
                    max(self.working[begin:end]),
                    sum(self.deferred[begin:end]),
                    self.places[begin - 1].sent if begin else 0.0,
                    self.places[end - 1].sent if end < len(self.times) else 0.0,
                )
            )
        return tuple(found)

    def _times(self, begin: int, end: int) -> Times:
        """A stage whose inputs need no gradient has the whole of its backward for its weights."""
        times = sum(self.times[begin:end], Times())
        if self.places[begin - 1].trains if begin else _inputs_train(self.traced):
            return times
        return Times(times.forward, 0.0, times.backward_input + times.backward_weight)

    def ties(self, cuts: Sequence[int]) -> tuple[StageTie, ...]:
        """The parameters that stages share, in the order of the cut model's ties."""
        bounds = [0, *cuts, len(self.times)]
        items = [_moved(item, bounds) for item in self.shared if item.parameter]
        found = [StageTie(item.blocks, item.trained) for item in items if len(item.blocks) > 1]
        return tuple(sorted(found, key=lambda tie: tie.stages[0]))


@dataclass(frozen=True)
class SharedBytes:
    """What several blocks use: a parameter, a buffer, or an activation that they all keep."""

    blocks: tuple[int, ...]
    parameter: float = 0.0
    trained: float = 0.0
    buffer: float = 0.0
    saved: float = 0.0


def _inputs_train(traced: TracedModel) -> bool:
    return any(entry.spec is not None and entry.spec.requires_grad for entry in traced.inputs)


def _moved(item: SharedBytes, bounds: Sequence[int]) -> SharedBytes:
    return replace(item, blocks=tuple(sorted({bisect.bisect_right(bounds, block) - 1 for block in item.blocks})))


def steps_of(chain: Chain, begin: int, end: int) -> list[Step]:
    """The operations of a run of blocks."""
    ticks = [chain.traced.root.begin, *(place.cut.tick for place in chain.places), chain.traced.root.end + 1]
    return [step for step in chain.traced.steps_within(ticks[begin], ticks[end]) if step.kind == "op"]
