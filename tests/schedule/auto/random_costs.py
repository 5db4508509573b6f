"""Random costs, the fixed schedules that have them, and what is measured."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from pipecut.schedule import Costs, Plan, Report, plan_for, schedule_names
from pipecut.schedule.registry import FAMILIES

MEASURES: dict[str, Callable[[Report], float]] = {
    "span": lambda report: max(row[-1].end - row[0].start for row in report.timeline.by_rank),
    "makespan": lambda report: report.makespan,
}
FIXED = [name for name in schedule_names() if name != "ForwardOnly"]
CHUNKS = {name: (1, 2) if family.any_chunks else (family.chunks,) for name, family in FAMILIES.items()}
amounts = st.floats(0.0, 10.0).map(lambda value: round(value, 2))
changes = st.floats(-10.0, 10.0).map(lambda value: round(value, 2))


def fixed_plans(ranks: int, microbatches: int, chunks: int) -> list[Plan]:
    """The plans of all schedules with so many chunks."""
    names = [name for name in FIXED if chunks in CHUNKS[name] and (name != "DualPipeV" or microbatches >= 2 * ranks)]
    return [plan_for(name, ranks=ranks, microbatches=microbatches, chunks=chunks) for name in names]


@st.composite
def random_costs(draw: st.DrawFn, stages: int) -> Costs:
    """Uneven times and memory, sometimes with a full backward that is quicker than its halves.

    An input gradient frees what its weight gradient does not need, or takes memory of its own until that.
    """
    column = st.lists(amounts, min_size=stages, max_size=stages)
    held, kept = draw(column), draw(st.floats(0.0, 1.8))
    inputs, weights = draw(column), draw(column)
    quick = draw(st.sampled_from([None, 0.8]))
    return Costs(
        forward=draw(column),
        backward_input=inputs,
        backward_weight=weights,
        transfer=draw(amounts),
        full_backward=None if quick is None else [quick * (i + w) for i, w in zip(inputs, weights, strict=True)],
        memory_forward=held,
        memory_backward_input=[(kept - 1) * each for each in held],
        memory_backward_weight=[-kept * each for each in held],
    )


@st.composite
def random_changes(draw: st.DrawFn, stages: int) -> Costs:
    """Memory that input and weight gradients take or free as they like: also more or less than the forwards took."""
    column = st.lists(changes, min_size=stages, max_size=stages)
    return Costs(
        memory_forward=draw(st.lists(amounts, min_size=stages, max_size=stages)),
        memory_backward_input=draw(column),
        memory_backward_weight=draw(column),
        transfer=draw(amounts),
    )
