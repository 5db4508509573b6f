"""Cuts without marks: balanced stages, at places where little has to be sent."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..errors import SplitError
from ..pipe_ir.traced import Span, TracedModel
from .balance import cheapest_cuts, lightest_bottleneck
from .cost import Weights
from .points import Cut, SplitPlan
from .regions import Regions

# A bottleneck up to this much above the best possible is accepted for a cleaner cut.
SLACK = 1.1


@dataclass(frozen=True)
class _Candidate:
    cut: Cut
    depth: int


def cuts_balanced(traced: TracedModel, num_stages: int) -> SplitPlan:
    """Cut into `num_stages` stages of about equal cost, between modules, and never inside a region."""
    weigh = Weights(traced, traced.hints)
    everywhere = _candidates(traced)
    weights, _ = _chunks(traced, weigh, everywhere)
    if num_stages > len(weights):
        raise SplitError(
            f"{num_stages} stages were asked for, and this model can be cut into {len(weights)} at the most: there are "
            f"{len(weights) - 1} places between its modules where a cut leaves work on both sides"
        )
    limit = int(lightest_bottleneck(weights, num_stages) * SLACK)
    for depth in sorted({candidate.depth for candidate in everywhere}):
        # The outermost modules whose boundaries allow a good enough balance: blocks before the layers inside them.
        weights, places = _chunks(traced, weigh, [candidate for candidate in everywhere if candidate.depth <= depth])
        if num_stages <= len(weights) and lightest_bottleneck(weights, num_stages) <= limit:
            live = _live_elements(traced, weigh, [place.cut.tick for place in places])
            chosen = cheapest_cuts(weights, live, num_stages, limit)
            return SplitPlan(tuple(places[position - 1].cut for position in chosen))
    return SplitPlan(())


def _candidates(traced: TracedModel) -> list[_Candidate]:
    """The beginnings and ends of module calls that lie outside all regions, in order."""
    found: dict[int, _Candidate] = {}
    regions = Regions(traced)

    def visit(span: Span, depth: int) -> None:
        for child in span.children:
            edges = ((child.begin, "before"), (child.end + 1, "after")) if child.kind == "call" else ()
            for tick, side in edges:
                settled, inside = regions.settle(tick)
                if inside is None:
                    cut = Cut(settled, f"the cut {side} {child.label!r}", child.path)
                    found.setdefault(settled, _Candidate(cut, depth))
            visit(child, depth + (child.kind == "call"))

    visit(traced.root, 0)
    return [found[tick] for tick in sorted(found)]


def _chunks(traced: TracedModel, weigh: Weights, candidates: list[_Candidate]) -> tuple[list[int], list[_Candidate]]:
    """Weights of the runs of steps between candidates, and the candidate at each border of two runs with work."""
    ticks = [candidate.cut.tick for candidate in candidates]
    weights = [0] * (len(ticks) + 1)
    for step in traced.steps:
        if step.kind == "op" and traced.root.begin <= step.tick < traced.root.end:
            weights[bisect.bisect_right(ticks, step.tick)] += weigh.step(step)
    merged: list[int] = []
    places: list[_Candidate] = []
    best: _Candidate | None = None
    for position, weight in enumerate(weights):
        if position and merged and (best is None or candidates[position - 1].depth < best.depth):
            best = candidates[position - 1]
        if weight == 0:
            continue
        if merged and best is not None:
            places.append(best)
        merged.append(weight)
        best = None
    return merged, places


def _live_elements(traced: TracedModel, weigh: Weights, ticks: list[int]) -> list[int]:
    """How many elements would have to cross a cut at each tick."""
    last_use: dict[int, int] = {}
    for step in traced.steps:
        for index in step.refs:
            last_use[index] = max(last_use.get(index, -1), step.tick)
    last_use.update(dict.fromkeys(traced.output.refs, traced.root.end + 1))
    changes = [0] * (len(ticks) + 1)
    for index, last in last_use.items():
        step = traced.steps[index]
        if step.kind in ("op", "input"):
            elements = weigh.elements(step.spec)
            changes[bisect.bisect_right(ticks, step.tick)] += elements
            changes[bisect.bisect_right(ticks, last)] -= elements
    live, total = [], 0
    for change in changes[:-1]:
        total += change
        live.append(total)
    return live
