"""Search the plan of least time within a memory limit: fixed schedules, then greedy scheduling, then local search."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from random import Random

from ...errors import PlanError
from ...text import phase, still
from ..costs import Costs, HasLink, checked_number
from ..plan import Plan, collector_paused
from ..simulate import simulate
from .candidate import OBJECTIVES, Candidate, FoundPlan, Tried, fixed_candidates
from .greedy import Rules, greedy_candidates, tune_rules
from .local_search import local_search, placed_weights
from .pattern import Pattern, pattern_candidates, tune_pattern
from .problem import Arrangement, Excess, MemoryLimit, arrangements, limits_of, no_plan_fits, problem_for
from .timing import Budget, Clock, lower_bound

_LOG = logging.getLogger(__name__)

# The parts of the budget. Fixed schedules and the move of their weight gradients have none: they are always tried.
PARTS = {"patterns": 0.3, "greedy": 0.2, "tuned greedy": 0.1, "local search": 0.4}
_FINALISTS = 2  # arrangements, and plans to start from, that are improved


def auto_schedule(
    *,
    ranks: int,
    microbatches: int | Sequence[int],
    costs: Costs | None = None,
    memory_limit: MemoryLimit = None,
    placement: str = "any",
    chunks: int | None = None,
    time_budget: float = 10.0,
    seed: int = 0,
    objective: str = "span",
    machine: HasLink | None = None,
    verbose: bool = True,
) -> Plan:
    """Return the plan that `search_schedule` finds; print its time, lower bound and gap unless `verbose=False`.

    `machine`, such as `pipecut.Machine.named("h100")`, has the link between the ranks, over which the `message_bytes`
    of costs in seconds go; without it the costs say what a transfer takes.

    >>> plan = auto_schedule(ranks=2, microbatches=4, memory_limit=2, placement="loop", chunks=1, time_budget=0.2)
    auto (ZB-H1): span 13, lower bound 13, gap 0.00%, bubble 7.69%, peak memory 2
    >>> print(plan.grid())
    rank 0 │ 0F0 0F1 ·   0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    rank 1 │ ·   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """
    found = search_schedule(
        ranks=ranks,
        microbatches=microbatches,
        costs=costs if machine is None else (costs or Costs()).on(machine, ranks),
        memory_limit=memory_limit,
        placement=placement,
        chunks=chunks,
        time_budget=time_budget,
        seed=seed,
        objective=objective,
    )
    if verbose:
        print(found)
    return found.plan


@phase(_LOG, "searching a schedule")
@collector_paused
def search_schedule(
    *,
    ranks: int,
    microbatches: int | Sequence[int],
    costs: Costs | None = None,
    memory_limit: MemoryLimit = None,
    placement: str = "any",
    chunks: int | None = None,
    time_budget: float = 10.0,
    seed: int = 0,
    objective: str = "span",
) -> FoundPlan:
    """Search the best plan for these costs; the result has a report, a lower bound, and all candidates.

    `memory_limit` is in the unit of the costs' memory: a number for all ranks, or one for each, inf for none. No rank
    of the plan holds more, and no fixed schedule of the same placement that fits is better. `placement` is "loop", "v"
    or "any" of them. `chunks` is the number of stages per rank: by default that of costs given for each stage,
    otherwise 1 and 2. `microbatches` may be a list of allowed numbers: the costs are then those of one microbatch if
    the batch is cut into the first number of them, and scale with its size; the latency of a Link stays.

    `objective="span"` makes the longest time from a rank's first pass to its last small: the time of a step, if ranks
    begin the next one without waiting for the others. `"makespan"` counts from the first start to the last end.

    `time_budget` is in seconds of computing. How much is tried follows from it as a count, so that the same arguments
    give the same plan; only where the clock ends the search sooner (`ended_by_clock`), the result depends on the
    machine. The fixed schedules are looked at in any case, and count.

    >>> found = search_schedule(ranks=4, microbatches=8, memory_limit=4, placement="v", time_budget=0.5)
    >>> found.time, found.lower_bound, found.gap
    (24.0, 24.0, 0.0)
    """
    costs = Costs() if costs is None else costs
    if objective not in OBJECTIVES:
        raise PlanError(f"objective={objective!r}: give one of {', '.join(map(repr, OBJECTIVES))}.")
    budget = Budget(checked_number("time_budget", time_budget))
    every = arrangements(ranks, microbatches, costs, placement, chunks)
    return search_arrangements(every, memory_limit, objective, budget, Random(seed), PARTS)


def search_arrangements(
    every: list[Arrangement],
    memory_limit: MemoryLimit,
    objective: str,
    budget: Budget,
    random: Random,
    parts: Mapping[str, float],
) -> FoundPlan:
    """Search with the given parts of the budget; a strategy without a part is left out."""
    search = _Search(every, memory_limit, objective, budget, parts)
    best = search.run(random)
    plan = best.problem.plan_of(f"auto ({best.name})", best.rows).validate()
    return FoundPlan(
        plan=plan,
        report=simulate(plan, best.problem.costs),
        time=best.merit(objective)[0],
        lower_bound=min(search.bounds.values()),
        objective=objective,
        tried=search.table(best),
        ended_by_clock=budget.ended_by_clock,
    )


class _Search:
    """All candidates of all arrangements."""

    def __init__(
        self,
        every: list[Arrangement],
        memory_limit: MemoryLimit,
        objective: str,
        budget: Budget,
        parts: Mapping[str, float],
    ) -> None:
        self.objective, self.budget, self.parts = objective, budget, parts
        self.candidates: list[tuple[Arrangement, Candidate]] = []
        self.out: list[Tried] = []
        self.clocks: dict[Arrangement, Clock] = {}  # of the problem of each
        self.errors: list[PlanError] = []
        limits = limits_of(memory_limit, every[0].placement.ranks)
        for arrangement in every:
            self._add(arrangement, limits)
        if not self.clocks:
            raise self.errors[0]
        self._add_fixed()
        self.bounds = {each: lower_bound(clock.problem, objective) for each, clock in self.clocks.items()}

    def _add(self, arrangement: Arrangement, limits: tuple[float, ...]) -> None:
        try:
            problem = problem_for(arrangement.placement, arrangement.microbatches, arrangement.costs, limits)
        except PlanError as error:  # raised if it is so for every arrangement, reported in the table otherwise
            self.errors.append(error)
            self.out.append(Tried("all", str(arrangement), arrangement.microbatches, None, str(error)))
            return
        self.clocks[arrangement] = Clock(problem)

    def run(self, random: Random) -> Candidate:
        """Move the weight gradients of the fixed schedules, schedule greedily, then improve the best."""
        patterns: dict[Arrangement, list[tuple[Pattern, Candidate]]] = {}
        rules: dict[Arrangement, list[tuple[Rules, Candidate]]] = {}
        for arrangement, clock in self.clocks.items():
            still(f"searching patterns for {arrangement}")
            if "patterns" in self.parts and not self._is_proven(arrangement):
                patterns[arrangement] = pattern_candidates(clock, self.objective, self.budget)
                self.candidates += [(arrangement, candidate) for _, candidate in patterns[arrangement]]
        for arrangement in self.clocks:
            self._place_weights_of(
                arrangement, [candidate for each, candidate in self.candidates if each == arrangement]
            )
        for arrangement, clock in self.clocks.items():
            still(f"scheduling greedily for {arrangement}")
            if "greedy" in self.parts and not self._is_proven(arrangement):
                bound, part = self.bounds[arrangement], self.parts["greedy"] / len(self.clocks)
                rules[arrangement] = greedy_candidates(clock, self.objective, bound, self.budget, part)
                best = [candidate for _, candidate in rules[arrangement][:1]]
                self.candidates += [(arrangement, candidate) for candidate in best]
                self._place_weights_of(arrangement, best)
        finalists = self._finalists()
        for arrangement in finalists:
            still(f"improving the best of {arrangement}")
            self._improve(
                arrangement, patterns.get(arrangement, []), rules.get(arrangement, []), 1 / len(finalists), random
            )
        return self._best()

    def _add_fixed(self) -> None:
        """Add the fixed schedules of all arrangements; arrangements that none fits are left out."""
        excesses = []
        for arrangement, clock in self.clocks.items():
            for name, found in fixed_candidates(clock):
                if isinstance(found, Candidate):
                    self.candidates.append((arrangement, found))
                    continue
                self.out.append(Tried(name, str(arrangement), arrangement.microbatches, None, str(found)))
                if isinstance(found, Excess):
                    excesses.append(found)
        if not self.candidates:
            raise no_plan_fits(excesses)
        fitting = {arrangement for arrangement, _ in self.candidates}
        self.clocks = {each: clock for each, clock in self.clocks.items() if each in fitting}

    def _place_weights_of(self, arrangement: Arrangement, candidates: list[Candidate]) -> None:
        if not self._is_proven(arrangement):
            made = placed_weights(self.clocks[arrangement], self._sorted(candidates), self.objective, self.budget)
            self.candidates += [(arrangement, candidate) for candidate in made]

    def _is_proven(self, arrangement: Arrangement) -> bool:
        """Return True if no plan of the arrangement can be better than the best candidate."""
        return self._best().merit(self.objective)[0] <= self.bounds[arrangement] * (1 + 1e-9)

    def _finalists(self) -> list[Arrangement]:
        """Return the arrangements with the best candidates that are not proven optimal."""
        ranked = sorted(self.candidates, key=lambda each: each[1].merit(self.objective))
        return [each for each in dict.fromkeys(each for each, _ in ranked) if not self._is_proven(each)][:_FINALISTS]

    def _improve(
        self,
        arrangement: Arrangement,
        patterns: list[tuple[Pattern, Candidate]],
        rules: list[tuple[Rules, Candidate]],
        part: float,
        random: Random,
    ) -> None:
        bound, objective, budget = self.bounds[arrangement], self.objective, self.budget
        clock = self.clocks[arrangement]
        shares = {name: self.parts.get(name, 0.0) * part / _FINALISTS for name in PARTS}
        for pattern in patterns[:_FINALISTS]:
            tuned = tune_pattern(clock, pattern, objective, bound, budget, shares["patterns"], random)
            self.candidates.append((arrangement, tuned))
        for start in rules[:_FINALISTS]:
            made = tune_rules(clock, start, objective, bound, budget, shares["tuned greedy"], random)
            self.candidates.append((arrangement, made))
        own = [candidate for each, candidate in self.candidates if each == arrangement]
        for first in self._sorted(own)[:_FINALISTS]:
            made = local_search(clock, first, objective, bound, budget, shares["local search"], random)
            self.candidates.append((arrangement, made))

    def _sorted(self, candidates: list[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda each: each.merit(self.objective))

    def _best(self) -> Candidate:
        return min((candidate for _, candidate in self.candidates), key=lambda each: each.merit(self.objective))

    def table(self, best: Candidate) -> tuple[Tried, ...]:
        """Return all candidates, the best first, then those that do not fit."""
        least = best.merit(self.objective)[0]
        rows: dict[tuple[str, str, int], Tried] = {}
        for arrangement, candidate in sorted(self.candidates, key=lambda each: each[1].merit(self.objective)):
            time = candidate.merit(self.objective)[0]
            why = "taken" if candidate is best else _slower(time, least)
            row = Tried(candidate.name, str(arrangement), arrangement.microbatches, time, why)
            rows.setdefault((row.name, row.placement, row.microbatches), row)
        return (*rows.values(), *self.out)


def _slower(time: float, least: float) -> str:
    return "equally good" if time <= least * (1 + 1e-9) else f"{100 * (time / least - 1):.2f}% slower"
