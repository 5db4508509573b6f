"""A timeline as text, to scale: a line for each rank, the op and the microbatch in its characters."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from ...errors import PlanError
from ..action import TRANSFERS, Action
from ..plan_text import BUBBLE
from ..report import Span
from .palette import LETTER, NAMES
from .rows import Chart, Sources, axis_name, charts, number, whole_time, with_unit

_FILL = "─"
_FEWEST_CELLS = 8
_MOMENT = 1e-9  # of a cell: what is shorter is taken for a matter of rounding
_CELLS_PER_SPAN = 6  # at most, for the shortest computation: a small plan need not fill the screen
_NAMED_FROM = 0.9  # the share of the computations that must have room for their names; half a crowd of names confuses


def text(source: Sources, *, width: int | None = None) -> str:
    """Draw a plan, a timeline or a simulation's report as text, to scale in time; several in a list share one scale.

    A character stands for the action that has most of its time; of a rank's stages the first is in capital letters, the
    others in small ones. Where there is room, the number of the microbatch follows. `width` is the number of characters
    per line, by default that of the terminal.

    >>> from pipecut.schedule.plan import Plan
    >>> print(text(Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}, name="two"), width=40))
    two — makespan 4 slots
    rank 0 │F0────············B0────
    rank 1 │······F0────B0────······
            0           2          4
    slots; 1 character = 0.166667 slots
    F forward, B full backward, · idle
    """
    drawn = charts(source)
    margin = len(f"rank {max(len(chart.rows) for chart in drawn) - 1} │")
    width = shutil.get_terminal_size().columns if width is None else width
    if width < margin + _FEWEST_CELLS:
        raise PlanError(f"width={width}: the picture needs {margin + _FEWEST_CELLS} characters per line, or more.")
    extent = whole_time(drawn)
    cells = _cells(drawn, extent, width - margin)
    time = extent / cells
    named = _room_for_names(drawn, time)
    lines = []
    for chart in drawn:
        lines += wrap(f"{chart.name} — {chart.facts}", width)
        for rank, row in enumerate(chart.rows):
            lines.append(f"{f'rank {rank}':<{margin - 1}}│{_line(chart, row, cells, time, named)}")
        lines.append(" " * margin + _axis(cells, extent))
    unit = drawn[0].unit
    lines += wrap(f"{axis_name(unit)}; 1 character = {with_unit(time, unit)}", width)
    return "\n".join(lines + wrap(_legend(drawn), width))


def _cells(drawn: Sequence[Chart], extent: float, room: int) -> int:
    """Return the number of characters of the whole time: as many as there is room for, or as a small plan needs.

    Where all times are multiples of the shortest, that one gets an integer number of characters.
    """
    spans = (span for chart in drawn for row in chart.rows for span in row if span.action.is_compute)
    times = {span.end - span.start for span in spans if span.end > span.start}
    shortest = min(times, default=extent)
    each = min(room * shortest / extent, _CELLS_PER_SPAN)
    if each < 1:
        return room
    if all(abs(time / shortest - round(time / shortest)) < 1e-6 for time in times):
        each = int(each + 1e-9)
    return min(room, max(_FEWEST_CELLS, math.ceil(extent / shortest * each - 1e-9)))


def _room_for_names(drawn: Sequence[Chart], time: float) -> bool:
    room = [
        (span.end - span.start) / time > len(_name("F", span.action)) - 1e-9
        for chart in drawn
        for row in chart.rows
        for span in row
        if span.action.is_compute and not span.action.parts
    ]
    return sum(room) >= _NAMED_FROM * len(room)


def _line(chart: Chart, row: Sequence[Span], cells: int, time: float, named: bool) -> str:
    """Return the characters of a rank, those of one span together."""
    chunk_of = chart.chunk_of

    def letter(span: Span) -> str:
        drawn = LETTER[span.action.op]
        return drawn.lower() if span.action.is_compute and chunk_of.get((span.rank, span.action.stage), 0) else drawn

    owner = _owners(row, cells, time, letter)
    line, start = [], 0
    for cell in range(1, cells + 1):
        if cell == cells or owner[cell] is not owner[start]:
            line.append(_written(owner[start], letter, cell - start, named))
            start = cell
    return "".join(line)


def _written(span: Span | None, letter: Callable[[Span], str], cells: int, named: bool) -> str:
    if span is None:
        return BUBBLE * cells
    name = _name(letter(span), span.action)
    fits = named and span.action.is_compute and len(name) <= cells
    return name.ljust(cells, _FILL) if fits else letter(span) * cells


def _name(letter: str, action: Action) -> str:
    return letter + "/".join(str(leaf.microbatch) for leaf in action.leaves)


def _axis(cells: int, extent: float) -> str:
    """Return the times at the two ends and in the middle, as far as there is room."""
    end, middle = number(extent), number(extent / 2)
    line = f"0{end:>{cells - 1}}" if len(end) + 2 <= cells else "0"
    at = cells // 2
    return line[:at] + middle + line[at + len(middle) :] if at + len(middle) + 1 < cells - len(end) else line


def _legend(drawn: Sequence[Chart]) -> str:
    """Explain the letters in use."""
    seen = {action.op for chart in drawn for row in chart.rows for _, action, _, _ in row}
    meanings: dict[str, str] = {}
    for op in (op for op in NAMES if op in seen):
        meanings.setdefault(LETTER[op], NAMES[op] if op not in TRANSFERS else NAMES[op].split()[0])
    entries = [f"{letter} {meaning}" for letter, meaning in meanings.items()]
    if any(chart.chunks > 1 for chart in drawn):
        entries.append("small letters: a rank's later stages")
    return ", ".join([*entries, f"{BUBBLE} idle"])


@dataclass
class _Use:
    """The share of a cell that the spans under one letter have."""

    total: float = 0.0
    most: float = -1.0
    span: Span | None = None  # the one that has most


def _owners(row: Sequence[Span], cells: int, time: float, letter: Callable[[Span], str]) -> list[Span | None]:
    """Return the span that stands for each cell: the longest under the letter that has most; None if idle.

    A transfer, or any other action that is not a computation, stands where no computation does.
    """
    in_front = _most_of([span for span in row if span.action.is_compute], cells, time, letter)
    behind = _most_of([span for span in row if not span.action.is_compute], cells, time, letter)
    return [front or back for front, back in zip(in_front, behind, strict=True)]


def _most_of(row: Iterable[Span], cells: int, time: float, letter: Callable[[Span], str]) -> list[Span | None]:
    uses: list[dict[str, _Use]] = [{} for _ in range(cells)]
    for span in row:
        for cell, share in _shares(span, cells, time):
            use = uses[cell].setdefault(letter(span), _Use())
            use.total += share
            if share > use.most + _MOMENT:
                use.most, use.span = share, span
    return [_owner(use) for use in uses]


def _shares(span: Span, cells: int, time: float) -> Iterator[tuple[int, float]]:
    """Yield the cells of a span, and its share of each."""
    start, end = span.start / time, span.end / time
    first = min(int(start + _MOMENT), cells - 1)
    yield first, max(min(end, first + 1) - start, 0.0)
    for cell in range(first + 1, cells):
        if end - cell < _MOMENT:
            return
        yield cell, min(end - cell, 1.0)


def _owner(uses: dict[str, _Use]) -> Span | None:
    """Return the span that has most of a cell; None if it is mostly idle, but a moment alone in a cell is shown."""
    spent = sum(use.total for use in uses.values())
    if not uses or _MOMENT < spent < 0.5 - _MOMENT:
        return None
    return max(uses.values(), key=lambda use: use.total).span
