"""Charts for every renderer: plans, timelines and reports as rows of spans on one clock that starts at 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Protocol

from ...errors import PlanError, printable
from ..action import COMPUTE, Op
from ..lower import add_bubbles
from ..plan import Plan
from ..report import Span, Timeline

_SLOTS = "slots"
# Microseconds of each unit. A time without a unit, and a slot of a plan, is taken for a millisecond.
_MICROSECONDS = {"": 1e3, _SLOTS: 1e3, "ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_RELATIVE = ("", _SLOTS)
_FARTHEST, _MOMENT = 1e300, 1e-100  # times with which one can reckon


class _HasTimeline(Protocol):
    """The report of a simulation; `bubble_rate` and `makespan` are shown if it has them."""

    @property
    def timeline(self) -> Timeline:
        """The spans."""
        ...


_Source = Plan | Timeline | _HasTimeline
Sources = _Source | Sequence[_Source]


@dataclass(frozen=True)
class Chart:
    """One source, ready to be drawn."""

    name: str
    rows: tuple[tuple[Span, ...], ...] = field(repr=False)  # of each rank, by start
    unit: str
    extent: float  # when the last span ends
    facts: str  # makespan and, if known, bubble rate
    chunk_of: dict[tuple[int, int], int] = field(repr=False)  # (rank, stage) -> which of the rank's stages it is
    chunks: int  # the most stages that a rank has, in this chart or one beside it


def charts(source: Sources) -> tuple[Chart, ...]:
    """Put the sources, one or several, on one time scale."""
    given = list(source) if isinstance(source, list | tuple) else [source]
    if not given:
        raise PlanError(
            "There is nothing to draw: the list is empty. Give a Plan, a Timeline or a simulation's report."
        )
    timelines = [_timeline(each) for each in given]
    unit = _common_unit([timeline.unit for timeline in timelines])
    names: list[str] = []
    for timeline in timelines:
        name = printable(timeline.name, lines=False)
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    drawn = [_chart(each, timeline, name, unit) for each, timeline, name in zip(given, timelines, names, strict=True)]
    chunks = max(chart.chunks for chart in drawn)
    return tuple(replace(chart, chunks=chunks) for chart in drawn)


def whole_time(drawn: Sequence[Chart]) -> float:
    """Return the time that a picture covers; 1 where all is over in a moment, so that there is a scale."""
    extent = max(chart.extent for chart in drawn)
    return extent if extent > _MOMENT else 1.0


def microseconds(unit: str) -> float:
    """Return the number of microseconds of one unit of a timeline."""
    if unit not in _MICROSECONDS:
        known = ", ".join(f"'{each}'" for each in _MICROSECONDS)
        raise PlanError(f"The unit '{unit}' of a timeline is not known: use one of {known}.")
    return _MICROSECONDS[unit]


def number(value: float) -> str:
    """Write a time in a few characters.

    >>> number(12.0), number(1 / 3)
    ('12', '0.333333')
    """
    return f"{value:.6g}"


def with_unit(value: float, unit: str) -> str:
    """Write a time and its unit, if it has one."""
    return f"{number(value)} {unit}".rstrip()


def axis_name(unit: str) -> str:
    """Return the name of a time axis."""
    return unit if unit == _SLOTS else f"time ({unit or 'relative'})"


def _timeline(source: object) -> Timeline:
    """Return the timeline of a source, its spans checked."""
    timeline = getattr(source, "timeline", source)
    if isinstance(timeline, Plan):
        timeline = _one_slot_each(timeline)
    if not isinstance(timeline, Timeline):
        raise PlanError(f"{source!r:.80} cannot be drawn: give a Plan, a Timeline or a simulation's report.")
    if not timeline.spans:
        raise PlanError(
            f"'{timeline.name}' has nothing to draw: it has no spans. Give a plan or a timeline with at "
            "least one action."
        )
    for rank, action, start, end in timeline.spans:
        if not (-_FARTHEST < start <= end < _FARTHEST and 0 <= rank < timeline.ranks):
            raise PlanError(
                f"'{timeline.name}' cannot be drawn: {action} is on rank {rank} of {timeline.ranks} "
                f"from {start} to {end}. A span needs a rank below the number of ranks, and two finite times, the "
                "start no later than the end."
            )
    return timeline


def _one_slot_each(plan: Plan) -> Timeline:
    rows = add_bubbles(plan).actions if any(plan.actions) else ()
    spans = (
        Span(rank, action, float(slot), slot + 1.0)
        for rank, row in enumerate(rows)
        for slot, action in enumerate(row)
        if action is not None
    )
    return Timeline(plan.name, max(plan.ranks, len(rows)), tuple(spans), _SLOTS)


def _common_unit(units: Sequence[str]) -> str:
    """Return the one unit of all; where they differ, the first that is a real one."""
    if len(set(units)) == 1:
        return units[0]
    return next((unit for unit in units if unit not in _RELATIVE), "")


def _chart(source: object, timeline: Timeline, name: str, unit: str) -> Chart:
    factor = 1.0 if timeline.unit == unit else microseconds(timeline.unit) / microseconds(unit)
    first = timeline.start
    rows = tuple(
        tuple(
            Span(rank, action, (start - first) * factor, (end - first) * factor)
            for rank, action, start, end in sorted(row, key=attrgetter("start"))
        )
        for row in timeline.by_rank
    )
    extent = max(span.end for row in rows for span in row)
    makespan = getattr(source, "makespan", None)
    facts = [f"makespan {with_unit(extent if makespan is None else makespan * factor, unit)}"]
    bubble_rate = getattr(source, "bubble_rate", None)
    if bubble_rate is not None:
        facts.append(f"bubble rate {bubble_rate:.2%}")
    if timeline.unit in _RELATIVE and timeline.unit != unit:
        facts.append(f"{timeline.unit or 'relative times'}, 1 drawn as {with_unit(factor, unit)}")
    shown = printable(", ".join(facts), lines=False)
    chunk_of = _chunk_of(rows)
    return Chart(
        name, rows, printable(unit, lines=False), extent, shown, chunk_of, max(chunk_of.values(), default=0) + 1
    )


def _chunk_of(rows: Sequence[Sequence[Span]]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        stages: set[int] = set()
        for _, action, _, _ in row:
            if action.op is Op.OVERLAP_F_B:
                stages.update(part.stage for part in action.parts)
            elif action.op in COMPUTE:
                stages.add(action.stage)
        found.update({(rank, stage): chunk for chunk, stage in enumerate(sorted(stages))})
    return found


def group_narrow(row: Iterable[Span], least: float) -> Iterator[list[Span]]:
    """Group the spans of a row, so that a picture stays small: those shorter than `least` with their neighbours.

    Two groups of short spans start at least `least` apart, so a row has no more groups than fit in its time.
    """
    together: list[Span] = []
    for span in row:
        alone = span.end - span.start >= least
        if together and (alone or span.start - together[0].start >= least):
            yield together
            together = []
        if alone:
            yield [span]
        else:
            together.append(span)
    if together:
        yield together


def least_time(rows: Sequence[Sequence[Span]], first: float, most_groups: int) -> float:
    """Double `first` until the rows have no more than `most_groups` groups, or each row is down to one."""
    least = first
    extent = max((span.end for row in rows for span in row), default=0.0)
    while least <= extent and not _fits(rows, least, most_groups):
        least *= 2
    return least


def _fits(rows: Sequence[Sequence[Span]], least: float, most_groups: int) -> bool:
    left = most_groups
    for row in rows:
        for _ in group_narrow(row, least):
            left -= 1
            if left < 0:
                return False
    return True
