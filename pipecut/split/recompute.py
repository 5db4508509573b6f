"""Values that a stage makes once more instead of receiving them, where that costs less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..pipe_ir.pipe import RecomputedValue
from ..pipe_ir.traced import Step, TracedModel
from .cost import Weights
from .dataflow import FlowFinder
from .modes import Modes
from .program import Key, Operation, Piece, used_by_items
from .prune import without_unused
from .repeatable import Repeatable

# How much work (an element written, a floating-point operation) is worth one byte that is not sent. Links between
# machines are some 20 to 100 times slower than memory and thousands of times slower than arithmetic; the low end,
# since a link may also be within a machine.
WORK_PER_BYTE = 16

# What a message costs however short it is, as the bytes that a link carries meanwhile: some 10 microseconds at some
# gigabytes a second. All that a stage sends to another is one message, so that it counts where two stages have no
# other business with each other.
BYTES_PER_MESSAGE = 2**16


def recompute(
    traced: TracedModel, cuts: Sequence[int], programs: Sequence[Piece], names: Mapping[int, str], modes: Modes
) -> tuple[tuple[Piece, ...], tuple[RecomputedValue, ...]]:
    """The programs with cheap values made where they are used, and these values."""
    finder = FlowFinder(traced, cuts, programs, names)
    repeatable = Repeatable(traced, programs, modes)
    chosen = [_Chooser(finder, repeatable, stage).choose() for stage in range(1, len(programs))]
    values = tuple(
        RecomputedValue(value, names[value], finder.made_in[value], stage, finder.spec(value))
        for stage, mine in enumerate(chosen, start=1)
        for value in sorted(mine)
    )
    if not values:
        return tuple(programs), ()
    repeated = [
        replace(program, items=(*map(Operation, repeatable.chain(mine)), *program.items))
        for program, mine in zip(programs[1:], chosen, strict=True)
    ]
    fuller = (programs[0], *repeated)
    sent = [set(stage.outputs) for stage in FlowFinder(traced, cuts, fuller, names).find().stages]
    sent[-1] |= set(traced.output.refs)
    return tuple(without_unused(program, kept, repeatable) for program, kept in zip(fuller, sent, strict=True)), values


class _Chooser:
    """Chooses what one stage makes itself."""

    def __init__(self, finder: FlowFinder, repeatable: Repeatable, stage: int) -> None:
        self.finder, self.repeatable, self.stage = finder, repeatable, stage
        self.traced = finder.traced
        self.weigh = Weights(self.traced, self.traced.hints)
        self.needs = finder.needs(stage)

    def choose(self) -> frozenset[int]:
        """The received values that are better made here."""
        chosen: frozenset[int] = frozenset()
        for group in self._groups():
            if self._cost(chosen | group) < self._cost(chosen):
                chosen |= group
        return chosen

    def _groups(self) -> Iterator[frozenset[int]]:
        """Values made from the same model inputs: together they may be worth the inputs. Then each by itself."""
        received = [value for value in self.finder.arriving(self.stage, self.needs) if self._is_candidate(value)]
        groups: dict[frozenset[int], set[int]] = {}
        for value in received:
            groups.setdefault(self.repeatable.model_inputs([value]), set()).add(value)
        yield from (frozenset(groups[inputs]) for inputs in sorted(groups, key=lambda each: (len(each), sorted(each))))
        yield from (frozenset({value}) for value in sorted(received))

    def _is_candidate(self, value: int) -> bool:
        return self.traced.steps[value].kind == "op" and value in self.repeatable

    def _cost(self, values: Iterable[int]) -> float:
        """What the stage takes in, in bytes, and what it does for the values, as the bytes that this is worth."""
        chain = self.repeatable.chain(values)
        made = {step.index for step in chain}
        keys: frozenset[Key] = (self.needs - made) | used_by_items(tuple(map(Operation, chain)))
        received = self.finder.arriving(self.stage, keys)
        if not any(self.traced.steps[value].kind == "op" for value in received):
            return float("inf")  # a stage that waits for nobody would run ahead of all others
        messages = {self.finder.sender(value, self.stage) for value in received}
        sent = sum(map(self._bytes, received)) + BYTES_PER_MESSAGE * len(messages)
        return sent + sum(map(self._work, chain)) / WORK_PER_BYTE

    def _work(self, step: Step) -> int:
        is_view = step.storage is not None and any(
            self.traced.steps[index].storage == step.storage for index in step.refs
        )
        return 1 if is_view else self.weigh.step(step)

    def _bytes(self, value: int) -> int:
        spec = self.traced.steps[value].spec
        return 0 if spec is None else self.weigh.elements(spec) * spec.dtype.itemsize
