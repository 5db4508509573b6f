"""What the stages of a model cost, one by one, and how much memory they need; remembered, as many choices ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..split.balance import Blocks
from ..split.chain import TRAINED, Chain, StageCost
from ..split.points import SplitPlan
from .deferral import DeferralRule, pending_bytes


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage: all the time, while one microbatch goes backward, and of each microbatch in flight."""

    kept: float
    passing: float
    saved: float


class Stages:
    """The stages that a chain may be cut into, as runs of its blocks, with activations computed again or not."""

    def __init__(self, chain: Chain, recompute: bool) -> None:
        self.recompute = recompute
        self.chain = _recomputing(chain) if recompute else chain
        self._whole = chain
        self._costs: dict[tuple[int, int], StageCost] = {}
        self._memory: dict[tuple[int, int], StageMemory] = {}

    @cached_property
    def blocks(self) -> Blocks:
        """The chain as plain numbers."""
        return self.chain.blocks()

    @cached_property
    def _rule(self) -> DeferralRule:
        return DeferralRule(self.chain)

    def cuts_of(self, plan: SplitPlan) -> list[int]:
        """The cuts of a model as numbers of blocks of the whole chain."""
        numbers = {place.cut.tick: number for number, place in enumerate(self.chain.places, 1)}
        return [numbers[cut.tick] for cut in plan.cuts]

    def cost(self, begin: int, end: int) -> StageCost:
        """The costs of a stage; one that computes again keeps what it receives and sends."""
        if (begin, end) not in self._costs:
            stage = _one_stage(self.chain, begin, end)
            if self.recompute:
                stage = replace(stage, saved_bytes=stage.received + stage.sent)
            self._costs[begin, end] = stage
        return self._costs[begin, end]

    def holds(self, begin: int, end: int) -> bool:
        """Whether the first half of a split backward makes all gradients."""
        if self.recompute:  # what is computed again is not there any more when the second half would need it
            return self.cost(begin, end).times.backward_input > 0
        return self._rule.holds(begin, end)

    def memory(self, begin: int, end: int) -> StageMemory:
        """The memory of a stage."""
        if (begin, end) not in self._memory:
            stage = self.cost(begin, end)
            # While one microbatch goes backward, the activations that are computed again are all there.
            again = _one_stage(self._whole, begin, end).saved_bytes if self.recompute else 0.0
            self._memory[begin, end] = StageMemory(
                stage.parameter_bytes + (TRAINED - 1) * stage.trained_bytes + stage.buffer_bytes,
                stage.working_bytes + again,
                stage.saved_bytes,
            )
        return self._memory[begin, end]

    def pending(self, begin: int, end: int) -> float:
        """The bytes of a microbatch between the halves of its backward."""
        return pending_bytes(self.cost(begin, end), self.holds(begin, end))


def bounds_of(cuts: Sequence[int], blocks: int) -> list[tuple[int, int]]:
    """Where each stage begins and ends.

    >>> bounds_of([2, 3], 5)
    [(0, 2), (2, 3), (3, 5)]
    """
    return list(zip([0, *cuts], [*cuts, blocks], strict=True))


def _one_stage(chain: Chain, begin: int, end: int) -> StageCost:
    cuts = [bound for bound in (begin, end) if 0 < bound < len(chain.times)]
    return chain.stage_costs(cuts)[1 if begin else 0]


def _recomputing(chain: Chain) -> Chain:
    """Blocks run their forward again before their backward; a stage keeps what it receives, wherever it begins."""
    times = [replace(each, backward_input=each.backward_input + each.forward) for each in chain.times]
    shared = tuple(replace(item, saved=0.0) for item in chain.shared)
    return replace(chain, times=tuple(times), saved=(0.0,) * len(chain.saved), shared=shared)
