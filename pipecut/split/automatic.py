"""Cuts of pipeline(num_stages=...), without marks: balanced stages, at places where little has to be sent."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import SplitError, warn
from ..pipe_ir import TracedModel
from ..text import Memory, counted, parse_memory
from .balance import Balance, balance_stages
from .chain import Chain, allowed_places, chain_of, default_machine
from .cost import MachineLike, machine_of
from .points import SplitPlan, modules_left_out

# A bottleneck up to this much above the best possible is accepted for a cleaner cut.
_SLACK = 0.03

# In a model that repeats its layers more is accepted for a cut further outside, as long as the stages are even.
_LAYER_SLACK = 0.05
_EVEN = 1.1

# One block that is longer than the mean stage by this factor triggers a warning.
_DOMINANT = 1.25

# It is named as the cause if it is this much of the work of the busiest rank.
_BLAMED = 0.75


@dataclass(frozen=True)
class BalancedCut:
    """A cut, how well it is balanced, and the chain that it is a cut of: `chain.stage_costs(balance.cuts)`."""

    plan: SplitPlan
    balance: Balance
    chain: Chain
    with_whole_layers: float | None = None  # the least bottleneck of cuts between repeated layers, if it was looked for

    @property
    def summary(self) -> str:
        """Time of the longest rank, the mean, a lower bound of all cuts, and why any of them is inside of a layer."""
        found = self.balance
        return (
            f"the busiest rank takes {_milliseconds(found.bottleneck)} for a microbatch, {found.imbalance:.3f} times "
            f"the mean of {_milliseconds(found.mean)}; no cut takes less than {_milliseconds(found.lower_bound)} "
            f"({found.proof}){self._cuts_inside_layers()}"
        )

    def _cuts_inside_layers(self) -> str:
        inside = sum(self.chain.places[cut - 1].inside_layer for cut in self.balance.cuts)
        if not inside:
            return ""
        share, verb = f"{inside} of {counted(len(self.balance.cuts), 'cut')}", "is" if inside == 1 else "are"
        if self.with_whole_layers is None:
            return f"; {share} {verb} inside of a layer"
        if math.isinf(self.with_whole_layers):
            return f"; {share} {verb} inside of a layer: no cut between whole layers fits"
        longer = self.with_whole_layers / self.balance.bottleneck - 1
        return f"; {share} {verb} inside of a layer: with whole layers the busiest rank would take {longer:.1%} longer"


def balanced_cut(
    chain: Chain,
    stages: int | Sequence[int],
    *,
    speeds: Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    in_flight: Sequence[float] | Callable[[int], float] | None = None,
    slack: float = _SLACK,
    cut_inside_layers: bool | None = None,
) -> BalancedCut:
    """Return the cut of a chain with the least bottleneck, at the outermost modules that allow it.

    Repeated layers stay whole, unless a cut inside of one is better by more than 5 per cent with its transfer counted,
    or by more than 3 if a rank would take more than 1.1 times the mean; then as few are cut as it takes to come near
    the best. `cut_inside_layers` False keeps them whole in any case, True makes no difference between layers and other
    modules.

    >>> import torch
    >>> from pipecut import pipeline
    >>> from pipecut.split import chain_of
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> found = balanced_cut(chain_of(pipeline(model, (torch.ones(2, 64),), num_stages=1).traced), 2)
    >>> [cut.label for cut in found.plan.cuts], found.balance.cuts
    (["the cut after '1'"], (2,))
    """
    count = stages if isinstance(stages, int) else len(stages)
    between_layers = chain.between_layers()
    if cut_inside_layers is False:
        chain = between_layers
    blocks = chain.blocks()
    if count > blocks.count:
        raise SplitError(
            f"{count} stages were asked for, and this model can be cut into {blocks.count} at the most: there are "
            f"{blocks.count - 1} places between its modules where a cut leaves work on both sides. Use fewer stages, "
            f"{'cut_inside_layers=True, ' if cut_inside_layers is False else ''}or divide the model into more modules"
            f"{modules_left_out(chain.traced)}"
        )

    def solve(part: Chain, slack: float) -> Balance:
        # Of equally good cuts those with the fewest inside of layers, then those that send least.
        blocks = part.blocks(layers_first=cut_inside_layers is None)
        return balance_stages(
            blocks, stages, speeds=speeds, memory_limit=memory_limit, in_flight=in_flight, slack=slack
        )

    best = solve(chain, 0.0)
    whole = math.inf if cut_inside_layers is None else None
    depths = sorted({place.depth for place in chain.places})
    limit = best.bottleneck * (1 + slack)
    # The outermost modules whose boundaries allow a good enough balance: blocks before the layers inside them.
    choices = [chain.up_to(depth) for depth in depths]
    if cut_inside_layers is None and len(between_layers.times) < len(chain.times):
        limit = max(limit, min(best.bottleneck * (1 + _LAYER_SLACK), _EVEN * best.mean))
        choices = [*(between_layers.up_to(depth) for depth in depths), *choices]
    for outer in choices:
        if len(outer.times) < count:
            continue
        try:
            found = solve(outer, 0.0)
        except SplitError:  # too little memory for the larger blocks; the smaller ones are known to fit
            continue
        if whole is not None and not any(place.inside_layer for place in outer.places):
            whole = min(found.bottleneck, whole)
        elif whole is not None:
            # What is given up for fewer cuts inside of layers must leave a gain over none.
            limit = min(limit, max(best.bottleneck, whole / (1 + slack)))
        if found.bottleneck <= limit:
            found = solve(outer, limit / found.bottleneck - 1) if found.bottleneck else found
            bounded = Balance(
                found.cuts,
                found.loads,
                found.bottleneck,
                found.mean,
                min(best.lower_bound, found.bottleneck),
                found.memory,
            )
            return BalancedCut(outer.plan(found.cuts), bounded, outer, whole)
    return BalancedCut(chain.plan(best.cuts), best, chain, whole)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms"


def dominant_block(found: BalancedCut) -> str | None:
    """Describe the one block that is longer than a rank should take, if there is one: no cut helps there."""
    times, reached = [each.total for each in found.chain.times], found.balance
    dominant, ranks, bounds = max(range(len(times)), key=times.__getitem__), len(reached.loads), (0, *reached.cuts)
    if ranks == 1 or times[dominant] <= _DOMINANT * sum(times) / ranks:
        return None
    # What its stage sends and receives comes on top of what it computes.
    stage = bisect.bisect_right(bounds, dominant) - 1
    ends = [*reached.cuts[max(0, stage - 1) : stage + 1]]
    if times[dominant] + sum(found.chain.blocks().crossing[ends]) < _BLAMED * reached.bottleneck:
        return None
    word, of_all = ("stages", "longest") if ranks == len(bounds) else ("ranks", "busiest")
    return (
        f"{found.chain.name(dominant)} takes {times[dominant] / sum(times):.0%} of the model's time and cannot be cut: "
        f"the {of_all} of {ranks} {word} takes {reached.imbalance:.2f} times the mean. Use fewer {word}, or divide it "
        "into modules"
    )


def _same_cuts(traced: TracedModel, plan: SplitPlan) -> SplitPlan | None:
    """Return the same cuts in another trace of the model, if it can be cut there too."""
    places = {place.cut.label: place.cut for place in allowed_places(traced)}
    found = [places.get(cut.label) for cut in plan.cuts]
    cuts = tuple(cut for cut in found if cut is not None)
    return SplitPlan(cuts, plan.balance) if len(cuts) == len(found) else None


CostName = Literal["analytic", "measured"]


@dataclass(frozen=True)
class Balancing:
    """Options for balancing stages."""

    cost: CostName = "analytic"
    speeds: Sequence[float] | None = None
    memory_limit: Memory = None
    machine: MachineLike | None = None
    cut_inside_layers: bool | None = None

    def check(self, num_stages: int | None) -> None:
        """Raise SplitError for options that contradict each other, before anything is traced."""
        if self.cost not in ("analytic", "measured"):
            raise SplitError(f'cost={self.cost!r}: give "analytic" or "measured"')
        cost = None if self.cost == "analytic" else self.cost
        if cost is not None and self.machine is not None:
            raise SplitError('cost="measured" measures this machine: leave out machine=, or the cost')
        given = {"speeds": self.speeds, "memory_limit": self.memory_limit, "cost": cost, "machine": self.machine}
        given["cut_inside_layers"] = self.cut_inside_layers
        named = [name for name, value in given.items() if value is not None]
        if named and num_stages is None:
            raise SplitError(f"{named[0]} is for cuts that are found automatically: give num_stages too")
        if num_stages is not None:
            self.limits(num_stages)
        machine_of(self.machine)

    def limits(self, num_stages: int) -> list[float] | None:
        """Return the bytes of each rank."""
        return None if self.memory_limit is None else parse_memory(self.memory_limit, num_stages, "memory_limit")


_Solve = Callable[[Chain], BalancedCut]


class AutomaticCuts:
    """Finds the cuts of one model; in a second trace of it they are the same.

    `measured_cut` finds those with cost="measured", from the chain and the function that cuts it by given times.
    """

    def __init__(
        self, num_stages: int, balancing: Balancing, measured_cut: Callable[[Chain, _Solve], BalancedCut]
    ) -> None:
        self.num_stages, self.balancing, self._measured_cut = num_stages, balancing, measured_cut
        self._found: SplitPlan | None = None

    def plan(self, traced: TracedModel) -> SplitPlan:
        """Return the cuts of a trace."""
        again = _same_cuts(traced, self._found) if self._found is not None else None
        if again is not None:
            return again
        machine = (machine_of(self.balancing.machine) or default_machine(traced)).linking(self.num_stages)
        chain = chain_of(traced, machine)
        found = self._solve(chain) if self.balancing.cost == "analytic" else self._measured_cut(chain, self._solve)
        text = dominant_block(found)
        if text is not None:
            warn(text)
        where = f" on {machine.name}" if self.balancing.cost == "analytic" else ""
        plan = replace(found.plan, balance=f"{found.summary}, by {self.balancing.cost} times{where}")
        self._found = self._found or plan
        return plan

    def _solve(self, chain: Chain) -> BalancedCut:
        return balanced_cut(
            chain,
            self.num_stages,
            speeds=self.balancing.speeds,
            memory_limit=self.balancing.limits(self.num_stages),
            in_flight=lambda stage: self.num_stages - stage,
            cut_inside_layers=self.balancing.cut_inside_layers,
        )
