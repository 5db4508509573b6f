"""What pipeline(num_stages=...) does: a chain with analytic or measured times, balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import SplitError
from ..pipe_ir.traced import TracedModel
from ..split.automatic import BalancedCut, balanced_cut, same_cuts, warn_of_a_giant
from ..split.chain import Chain
from ..split.chain_maker import chain_of
from ..split.memory_size import Memory, read_memory
from ..split.points import SplitPlan
from .chain import measured_chain
from .refinement import refined_cut

CostName = Literal["analytic", "measured"]


@dataclass(frozen=True)
class Balancing:
    """How stages are to be balanced."""

    cost: CostName = "analytic"
    speeds: Sequence[float] | None = None
    memory_limit: Memory = None

    def check(self, num_stages: int | None) -> None:
        """Refuse what cannot be meant, before anything is traced."""
        if self.cost not in ("analytic", "measured"):
            raise SplitError(f'cost={self.cost!r}: give "analytic" or "measured"')
        cost = None if self.cost == "analytic" else self.cost
        given = {"speeds": self.speeds, "memory_limit": self.memory_limit, "cost": cost}
        named = [name for name, value in given.items() if value is not None]
        if named and num_stages is None:
            raise SplitError(f"{named[0]} is for cuts that are found automatically: give num_stages too")
        if num_stages is not None:
            self.limits(num_stages)

    def limits(self, num_stages: int) -> list[float] | None:
        """The bytes of each rank."""
        return read_memory(self.memory_limit, num_stages, "memory_limit")


class AutomaticCuts:
    """Finds the cuts of one model; in a second trace of it they are the same."""

    def __init__(
        self, num_stages: int, balancing: Balancing, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        self.num_stages, self.balancing = num_stages, balancing
        self._args, self._kwargs = args, kwargs
        self._found: SplitPlan | None = None

    def plan(self, traced: TracedModel) -> SplitPlan:
        """Where to cut a trace."""
        again = same_cuts(traced, self._found) if self._found is not None else None
        if again is not None:
            return again
        found = self._balanced(traced)
        warn_of_a_giant(found)
        self._found = replace(found.plan, balance=f"{found.words}, by {self.balancing.cost} times")
        return self._found

    def _balanced(self, traced: TracedModel) -> BalancedCut:
        chain = chain_of(traced)
        if self.balancing.cost == "analytic":
            return self._solve(chain)
        measured = measured_chain(chain, self._args, self._kwargs, stages=self.num_stages)
        return refined_cut(measured, self._solve, self._args, self._kwargs, speeds=self.balancing.speeds)

    def _solve(self, chain: Chain) -> BalancedCut:
        return balanced_cut(
            chain,
            self.num_stages,
            speeds=self.balancing.speeds,
            memory_limit=self.balancing.limits(self.num_stages),
            in_flight=lambda stage: self.num_stages - stage,
        )
