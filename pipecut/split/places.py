"""Where a traced model may be cut: between module calls, outside of all regions, with work on both sides."""

from __future__ import annotations

import bisect

from ..pipe_ir.traced import Span, TracedModel
from .chain import Place
from .points import Cut
from .regions import Regions


def allowed_places(traced: TracedModel) -> list[Place]:
    """The beginnings and ends of module calls that lie outside all regions, in order."""
    found: dict[int, Place] = {}
    regions = Regions(traced)

    def visit(span: Span, depth: int) -> None:
        for child in span.children:
            edges = ((child.begin, "before"), (child.end + 1, "after")) if child.kind == "call" else ()
            for tick, side in edges:
                settled, inside = regions.settle(tick)
                if inside is None:
                    cut = Cut(settled, f"the cut {side} {child.label!r}", child.path)
                    found.setdefault(settled, Place(cut, depth))
            visit(child, depth + (child.kind == "call"))

    visit(traced.root, 0)
    return [found[tick] for tick in sorted(found)]


def with_work_between(places: list[Place], ticks: list[int]) -> list[Place]:
    """Of places with no operation between them the outermost one; none before the first or after the last operation."""
    best: dict[int, Place] = {}
    for place in places:
        done = bisect.bisect_left(ticks, place.cut.tick)
        if 0 < done < len(ticks) and (done not in best or place.depth < best[done].depth):
            best[done] = place
    return [best[done] for done in sorted(best)]
