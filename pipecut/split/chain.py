"""A traced model as a chain of blocks: what lies between the places where it may be cut, with its costs."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..pipe_ir import Dim, Operation, Span, TracedModel
from .balance import Blocks, Shared
from .cost import ConcreteCosts, CostFinder, Machine, OperationTimes, Times, bytes_of, operation_flops
from .points import Cut, Regions, SplitPlan

# Bytes that are held for each byte of a parameter that is trained: itself, its gradient, and what Adam keeps of it.
TRAINED_MEMORY_FACTOR = 4.0


@dataclass(frozen=True)
class _Place:
    """A place where a cut is allowed. `depth` is 0 between the model's own children; `sent` what crosses, in bytes.

    `trains` is whether a gradient comes back for any of that. `inside_layer` is True within one of several alike.
    """

    cut: Cut
    depth: int
    inside_layer: bool = False
    sent: float = 0.0
    trains: bool = True


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage of a cut, for one microbatch; `received` and `sent` are the bytes of all live values.

    `working_bytes` are held for a moment: the gradients that one operation's backward takes and makes.
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
    """A parameter that several stages hold, and the bytes of its gradient, which is summed over them once per step."""

    stages: tuple[int, ...]
    gradient_bytes: float


@dataclass(frozen=True)
class Chain:
    """Blocks and the places between them. A tied weight, or a value that several blocks keep, is in `shared`."""

    traced: TracedModel
    places: tuple[_Place, ...]
    times: tuple[Times, ...]
    parameters: tuple[float, ...]
    trained: tuple[float, ...]
    buffers: tuple[float, ...]
    saved: tuple[float, ...]
    working: tuple[float, ...]
    deferred: tuple[float, ...]
    shared: tuple[_SharedBytes, ...]
    machine: Machine
    sizes: Mapping[str, int]

    def blocks(self, *, optimizer: float = TRAINED_MEMORY_FACTOR, layers_first: bool = False) -> Blocks:
        """Return the chain as plain numbers; `optimizer` is the memory of a trained parameter per byte of it.

        With `layers_first` any number of cuts between repeated layers costs less than one inside.
        """
        inside = 1.0 + sum(place.sent for place in self.places) if layers_first else 0.0
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
            prices=tuple(place.sent + 1e-3 * place.depth + inside * place.inside_layer for place in self.places),
            names=tuple(map(self.name, range(len(self.times)))),
        )

    def name(self, block: int) -> str:
        """Return the words that a user knows a block by: the cuts around it."""
        before = self.places[block - 1].cut.label if block else "the beginning of the model"
        after = self.places[block].cut.label if block < len(self.places) else "the end of the model"
        return f"what lies between {before} and {after}"

    def plan(self, cuts: Sequence[int]) -> SplitPlan:
        """Turn cuts between blocks into cuts of the model."""
        return SplitPlan(tuple(self.places[position - 1].cut for position in cuts))

    def up_to(self, depth: int) -> Chain:
        """Return the chain with only the places that are not deeper inside modules."""
        return self.with_places([number for number, place in enumerate(self.places) if place.depth <= depth])

    def between_layers(self) -> Chain:
        """Return the chain without the places inside of repeated layers."""
        return self.with_places([number for number, place in enumerate(self.places) if not place.inside_layer])

    def with_places(self, numbers: Sequence[int]) -> Chain:
        """Return the chain with only some of its places: blocks between them become one."""
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
        """Return the chain with other times."""
        return replace(self, times=tuple(times))

    def stage_costs(self, cuts: Sequence[int]) -> tuple[StageCost, ...]:
        """Return the cost of each stage if stages 1, 2... begin at these blocks."""
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
        """Add up times; a stage whose inputs need no gradient has all of its backward for its weights."""
        times = sum(self.times[begin:end], Times())
        if self.places[begin - 1].trains if begin else _inputs_train(self.traced):
            return times
        return Times(times.forward, 0.0, times.backward_input + times.backward_weight)

    def ties(self, cuts: Sequence[int]) -> tuple[StageTie, ...]:
        """Return the parameters that stages share, in the order of the cut model's ties."""
        bounds = [0, *cuts, len(self.times)]
        items = [_moved(item, bounds) for item in self.shared if item.parameter]
        found = [StageTie(item.blocks, item.trained) for item in items if len(item.blocks) > 1]
        return tuple(sorted(found, key=lambda tie: tie.stages[0]))


@dataclass(frozen=True)
class _SharedBytes:
    """Bytes that several blocks use: a parameter, a buffer, or an activation that they all keep."""

    blocks: tuple[int, ...]
    parameter: float = 0.0
    trained: float = 0.0
    buffer: float = 0.0
    saved: float = 0.0


def _inputs_train(traced: TracedModel) -> bool:
    return any(entry.spec is not None and entry.spec.requires_grad for entry in traced.inputs)


def _moved(item: _SharedBytes, bounds: Sequence[int]) -> _SharedBytes:
    return replace(item, blocks=tuple(sorted({bisect.bisect_right(bounds, block) - 1 for block in item.blocks})))


def operations_of(chain: Chain, begin: int, end: int) -> list[Operation]:
    """Return the operations of a run of blocks."""
    ticks = [chain.traced.root.begin, *(place.cut.tick for place in chain.places), chain.traced.root.end + 1]
    return [op for op in chain.traced.operations_within(ticks[begin], ticks[end]) if op.kind == "op"]


def allowed_places(traced: TracedModel) -> list[_Place]:
    """Return the beginnings and ends of module calls that lie outside all regions, in order."""
    found: dict[int, _Place] = {}
    regions = Regions(traced)
    layers = _repeated_layers(traced)

    def visit(span: Span, depth: int, inside: bool) -> None:
        for child in span.children:
            edges = ((child.begin, "before"), (child.end + 1, "after")) if child.kind == "call" else ()
            for tick, side in edges:
                settled, region = regions.move_outside(tick)
                if region is None:
                    cut = Cut(settled, f"the cut {side} {child.label!r}", child.path)
                    found.setdefault(settled, _Place(cut, depth, inside))
            visit(child, depth + (child.kind == "call"), inside or child.path in layers)

    visit(traced.root, 0, False)
    return [found[tick] for tick in sorted(found)]


def _repeated_layers(traced: TracedModel) -> set[str]:
    """Return the paths of layers of which a list has several alike, and which hold no such list themselves."""
    alike: dict[tuple[str, type], list[str]] = {}
    for span in traced.spans("call"):
        parent, _, name = span.path.rpartition(".")
        module = traced.model.get_submodule(span.path)
        if name.isdecimal() and span.nth_call == 0 and any(True for _ in module.children()):
            alike.setdefault((parent, type(module)), []).append(span.path)
    repeated = {path for paths in alike.values() if len(paths) > 1 for path in paths}
    outer = {path[: at.start()] for path in repeated for at in re.finditer(r"\.", path)}
    return repeated - outer


def _with_work_between(places: list[_Place], ticks: list[int]) -> list[_Place]:
    """Keep, of places with no operation between them, the outermost; none before the first or after the last."""
    best: dict[int, _Place] = {}
    for place in places:
        done = bisect.bisect_left(ticks, place.cut.tick)
        if 0 < done < len(ticks) and (done not in best or place.depth < best[done].depth):
            best[done] = place
    return [best[done] for done in sorted(best)]


def chain_of(traced: TracedModel, machine: Machine | None = None, sizes: Mapping[str, int] | None = None) -> Chain:
    """Return the chain of a traced model at given sizes of its symbolic dims, those of the example if left out.

    >>> import torch
    >>> from pipecut import pipeline
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    >>> chain = chain_of(pipeline(model, (torch.ones(2, 4),)).traced)
    >>> [place.cut.label for place in chain.places]
    ["the cut after '0'", "the cut after '1'"]
    >>> chain.parameters
    (80.0, 80.0, 80.0)
    """
    return _ChainMaker(traced, machine or default_machine(traced), {**traced.hints, **(sizes or {})}).make()


def default_machine(traced: TracedModel) -> Machine:
    """Return the machine that a model is on; a model without memory is on none yet, and gets a current accelerator."""
    is_meta = any(parameter.is_meta for parameter in traced.model.parameters())
    return Machine.of(torch.device("meta") if is_meta else traced.device)


class _ChainMaker:
    """Puts every operation into the block that it belongs to, and adds up."""

    def __init__(self, traced: TracedModel, machine: Machine, sizes: Mapping[str, int]) -> None:
        self.traced, self.machine, self.sizes = traced, machine, sizes
        self.finder = CostFinder(traced)
        self.operation_times = OperationTimes(self.finder, machine, sizes)
        self.costs = ConcreteCosts(traced, sizes)
        self.operations = [
            op for op in traced.operations if op.kind == "op" and traced.root.begin <= op.tick < traced.root.end
        ]

    def make(self) -> Chain:
        """Return the chain with all places that are allowed."""
        places = _with_work_between(allowed_places(self.traced), [op.tick for op in self.operations])
        ticks = [place.cut.tick for place in places]
        block_of = {op.index: bisect.bisect_right(ticks, op.tick) for op in self.operations}
        times = [Times()] * (len(places) + 1)
        for op in self.operations:
            times[block_of[op.index]] += self.operation_times.of(op)
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

    def _state(self, block_of: Mapping[int, int]) -> list[_SharedBytes]:
        users: dict[int, set[int]] = {}
        for op in self.operations:
            for index in op.refs:
                if self.traced.operations[index].kind == "state":
                    users.setdefault(index, set()).add(block_of[op.index])
        found = []
        for index, blocks in sorted(users.items(), key=lambda item: self.finder.place_of_parameter(item[0])):
            size = self._number(bytes_of(self.traced.operations[index]))
            spec = self.traced.operations[index].spec
            is_parameter = self.finder.is_parameter(index)
            found.append(
                _SharedBytes(
                    tuple(sorted(blocks)),
                    parameter=size if is_parameter else 0.0,
                    trained=size if is_parameter and spec is not None and spec.requires_grad else 0.0,
                    buffer=0.0 if is_parameter else size,
                )
            )
        return found

    def _activations(self, block_of: Mapping[int, int]) -> list[_SharedBytes]:
        users: dict[int, set[int]] = {}
        sizes: dict[int, Dim] = {}
        for op in self.operations:
            for kept in self.finder.saved.of(op):
                users.setdefault(kept.key, set()).add(block_of[op.index])
                sizes[kept.key] = kept.bytes
        return [_SharedBytes(tuple(sorted(blocks)), saved=self._number(sizes[key])) for key, blocks in users.items()]

    def _working(self, block_of: Mapping[int, int], blocks: int) -> tuple[float, ...]:
        """Return the most that one backward in each block needs: gradients of its result and of its arguments."""
        found = [0.0] * blocks
        for op in self.operations:
            needing = [index for index in {op.index, *op.refs} if self.finder.saved.index_needs_gradient(index)]
            size = sum(self._number(bytes_of(self.traced.operations[index])) for index in needing)
            found[block_of[op.index]] = max(found[block_of[op.index]], size)
        return tuple(found)

    def _deferred(self, block_of: Mapping[int, int], blocks: int) -> tuple[float, ...]:
        """Add up in each block what weights are multiplied with, each value once, and gradients of the products."""
        needed: list[set[int]] = [set() for _ in range(blocks)]
        is_weight, needs_gradient = self.finder.memory.is_weight, self.finder.saved.index_needs_gradient
        found = [0.0] * blocks
        for op in self.operations:
            weights = {index for index in op.refs if is_weight[index] and needs_gradient(index)}
            if weights and operation_flops(self.traced, op) != 0:
                block = block_of[op.index]
                needed[block] |= {index for index in op.refs if not is_weight[index]}
                found[block] += self._number(bytes_of(op))
        return tuple(
            size + sum(self._number(bytes_of(self.traced.operations[index])) for index in indices)
            for size, indices in zip(found, needed, strict=True)
        )

    def _live(self, ticks: Sequence[int]) -> list[tuple[float, bool]]:
        """Return the bytes of all values that live across each tick, skips included, and whether any of them trains.

        Whatever needs no gradient and follows from sizes and constants alone is made again where it is used.
        """
        free = self._free_to_make()
        sizes, training = [0.0] * (len(ticks) + 1), [0] * (len(ticks) + 1)
        for index, last in self._last_uses().items():
            op = self.traced.operations[index]
            if op.kind in ("op", "input") and index not in free:
                begin, end = bisect.bisect_right(ticks, op.tick), bisect.bisect_right(ticks, last)
                size, trains = self._number(bytes_of(op)), op.spec is not None and op.spec.requires_grad
                sizes[begin] += size
                sizes[end] -= size
                training[begin] += trains
                training[end] -= trains
        totals = zip(itertools.accumulate(sizes[:-1]), itertools.accumulate(training[:-1]), strict=True)
        return [(max(size, 0.0), count > 0) for size, count in totals]

    def _last_uses(self) -> dict[int, int]:
        """Return the tick of the last operation that uses each value."""
        found: dict[int, int] = {}
        for op in self.operations:
            for index in op.refs:
                found[index] = max(found.get(index, -1), op.tick)
        returned = set(self.traced.output.refs) - self.traced.optional_outputs
        return found | dict.fromkeys(returned, self.traced.root.end + 1)

    def _free_to_make(self) -> set[int]:
        """Find values made of sizes, constants and buffers alone."""
        free: set[int] = set()
        for op in self.traced.operations:
            made_of_nothing = op.kind == "op" and not op.writes and all(index in free for index in op.refs)
            state = op.kind in ("state", "constant")
            if (made_of_nothing or state) and not (op.spec is not None and op.spec.requires_grad):
                free.add(op.index)
        return free

    def _number(self, dim: Dim) -> float:
        return float(dim) if isinstance(dim, int | float) else float(self.costs.number(dim))
