"""What a split backward does in each stage: put weight gradients off, or make them at once and hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pipe_ir.traced import Step
from ..split.chain import Chain, StageCost, steps_of
from ..split.cost import Weights
from ..split.costs.machine import Machine
from ..split.costs.times import ACCUMULATED, Times
from ..stage.backward.worth import least_rows, rows_of, sizes_of


class DeferralRule:
    """Whether a stage makes all gradients at once: what it has to gain is little, by the rule that stages go by."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._weigh = Weights(chain.traced, chain.sizes)
        self._known: dict[tuple[int, int], bool] = {}

    def holds(self, begin: int, end: int) -> bool:
        """The answer for a run of blocks."""
        if (begin, end) not in self._known:
            self._known[begin, end] = self._answer(begin, end)
        return self._known[begin, end]

    def _answer(self, begin: int, end: int) -> bool:
        inside = steps_of(self.chain, begin, end)
        own = {step.index for step in inside}
        used = [self.chain.traced.steps[index] for index in {ref for step in inside for ref in step.refs} - own]
        trained = [step for step in used if step.spec is not None and step.spec.requires_grad]
        arriving = [self._empty(step) for step in trained if step.kind != "state"]
        on_cpu = self.chain.traced.device.type == "cpu"
        least = least_rows(sizes_of(self._empty(step) for step in trained if step.kind == "state"), on_cpu)
        return bool(arriving) and rows_of(arriving) < least

    def _empty(self, step: Step) -> Tensor:
        shape = () if step.spec is None else [int(self._weigh.number(dim)) for dim in step.spec.shape]
        return torch.empty(shape, device="meta")


def split_times(stage: StageCost, holds: bool, machine: Machine) -> Times:
    """The times of a stage by the halves of its backward."""
    if not holds:
        return stage.times
    adding = min(stage.times.backward_weight, ACCUMULATED * stage.trained_bytes / machine.memory_bandwidth)
    moved = stage.times.backward_weight - adding
    return Times(stage.times.forward, stage.times.backward_input + moved, adding)


def pending_bytes(stage: StageCost, holds: bool) -> float:
    """What one microbatch keeps between the halves of its backward."""
    if holds:
        return stage.trained_bytes
    # Where no input needs a gradient, the first half does nothing.
    return stage.deferred_bytes if stage.times.backward_input else stage.saved_bytes

