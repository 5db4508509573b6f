"""The boxes of one rank in an SVG picture, each with a tooltip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from ...text import numbered
from ..action import COMPUTE, TRANSFERS, Action, Op
from ..timeline import Span
from .palette import LETTER, ORDER, is_neutral, look
from .rows import Chart, group_narrow, number, with_unit

_THINNEST = 0.8  # of a mark that is to be seen
_HATCHED_FROM, _FRAMED_FROM = 6.0, 3.0  # widths
_DIGIT = 0.62  # of a font's size
_LISTED = 4  # names in the tooltip of a column

_Tracks = tuple[Sequence[Span], Sequence[Span], Sequence[Span]]


@dataclass(frozen=True)
class Boxes:
    """Rows of spans drawn to scale. Spans shorter than `least` stand together in columns."""

    chart: Chart
    left: float
    scale: float  # from time to width
    height: float  # of a rank's boxes
    least: float

    @cached_property
    def tracks(self) -> tuple[_Tracks, ...]:
        """The tracks of each rank."""
        return tuple(map(tracks, self.chart.rows))

    @cached_property
    def main(self) -> float:
        """The height of a computation; other actions show below it."""
        return self.height * (0.78 if any(back or foot for back, _, foot in self.tracks) else 1.0)

    @property
    def font(self) -> float:
        """The size of the numbers in the boxes."""
        return min(12.0, self.main * 0.62)

    def row(self, rank: int, top: float) -> list[str]:
        """Draw all boxes of a rank."""
        back, front, foot = self.tracks[rank]
        strip = self.height - self.main
        return [
            *self._track(back, top, self.height),
            *self._track(front, top, self.main),
            *self._track(foot, top + self.main + strip * 0.25, strip * 0.75),
        ]

    def _track(self, spans: Iterable[Span], top: float, height: float) -> list[str]:
        return [
            self._box(group[0], top, height) if len(group) == 1 else self._column(group, top, height)
            for group in group_narrow(spans, self.least)
        ]

    def _box(self, span: Span, top: float, height: float) -> str:
        x, width = self._place(span.start, span.end)
        leaves = span.action.leaves
        part = height / len(leaves)
        framed = width >= _FRAMED_FROM or span.start == span.end  # otherwise a mark in a pale colour would be lost
        drawn = []
        for place, leaf in enumerate(leaves):
            y = top + place * part
            drawn.append(self._rect(x, y, width, part, self._paint(span.rank, leaf, width >= _HATCHED_FROM), framed))
            drawn.append(self._label(span.rank, leaf, x + width / 2, y, width, part))
        return f"<g><title>{escape(described(span, self.chart.unit))}</title>{''.join(drawn)}</g>"

    def _column(self, group: Sequence[Span], top: float, height: float) -> str:
        """Draw many spans in one place: a band for each kind, as high as its share of the time."""
        time: dict[tuple[int, int, str], float] = {}
        for rank, action, start, end in group:
            for leaf in action.leaves:
                chunk = self.chart.chunk_of.get((rank, leaf.stage), 0)
                key = ORDER[leaf.op], chunk, look(leaf.op, chunk, self.chart.chunks).fill
                time[key] = time.get(key, 0.0) + (end - start) / len(action.leaves)
        start, end = group[0].start, max(span.end for span in group)
        whole = max(end - start, sum(time.values()))
        x, width = self._place(start, end)
        drawn = []
        for key in sorted(time):
            band = height * (time[key] / whole if whole else 1 / len(time))
            drawn.append(self._rect(x, top, width, band, key[2], whole == 0))
            top += band
        return f"<g><title>{escape(self._listed(group, start, end))}</title>{''.join(drawn)}</g>"

    def _listed(self, group: Sequence[Span], start: float, end: float) -> str:
        if len(group) <= _LISTED:
            names = ", ".join(repr(span.action) for span in group)
        else:
            names = f"{len(group)} actions, {group[0].action!r} to {group[-1].action!r}"
        return f"{names}: rank {group[0].rank}, {number(start)} to {with_unit(end, self.chart.unit)}"

    def _place(self, start: float, end: float) -> tuple[float, float]:
        return self.left + start * self.scale, max((end - start) * self.scale, _THINNEST)

    def _rect(self, x: float, y: float, width: float, height: float, fill: str, framed: bool) -> str:
        frame = ' class="b"' if framed else ""
        return f'<rect{frame} x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}"/>'

    def _paint(self, rank: int, leaf: Action, hatched: bool) -> str:
        chunk, chunks = self.chart.chunk_of.get((rank, leaf.stage), 0), self.chart.chunks
        looks = look(leaf.op, chunk, chunks)
        return f"url(#{pattern_name(leaf.op, chunk, chunks)})" if hatched and looks.hatch else looks.fill

    def _label(self, rank: int, leaf: Action, middle: float, y: float, width: float, height: float) -> str:
        """Return the number of the microbatch, or a letter for an action that is no computation, where it fits."""
        text = LETTER[leaf.op] if is_neutral(leaf.op) else str(leaf.microbatch)
        size = min(self.font, height * 0.8)
        if leaf.op in TRANSFERS or len(text) * size * _DIGIT + 2 > width or size < 4:
            return ""
        looks = look(leaf.op, self.chart.chunk_of.get((rank, leaf.stage), 0), self.chart.chunks)
        smaller = "" if size == self.font else f' font-size="{_n(size)}"'
        return (
            f'<text x="{_n(middle)}" y="{_n(y + height / 2 + size * 0.36)}" fill="{looks.ink}" '
            f'stroke="{looks.fill}"{smaller}>{text}</text>'
        )


def tracks(row: Sequence[Span]) -> _Tracks:
    """Divide spans into back, front, and thin marks at the foot, so that no transfer hides a computation."""
    back = [span for span in row if is_neutral(span.action.op)]
    foot = [span for span in row if span.action.op in TRANSFERS]
    front = row if not back and not foot else [span for span in row if span.action.op in COMPUTE]
    return back, front, foot


def described(span: Span, unit: str) -> str:
    """Describe a span on one line."""
    leaves = span.action.leaves
    facts = [numbered("stage", [leaf.stage for leaf in leaves], " and ")]
    numbers = [str(leaf.microbatch) for leaf in leaves if leaf.microbatch is not None]
    if numbers:
        what = "tie" if span.action.op is Op.REDUCE_TIES else "microbatch"
        facts.append(numbered(what, numbers, " and "))
    facts.append(f"rank {span.rank}")
    facts.append(f"start {number(span.start)}, end {with_unit(span.end, unit)}")
    return f"{span.action!r}: {', '.join(facts)}"


def pattern_name(op: Op, chunk: int, chunks: int) -> str:
    """Return the id of a hatched fill, of all that it depends on, so that pictures in one page may share it."""
    return f"{op}{chunk}of{chunks}"


def _n(value: float) -> str:
    """Round a coordinate to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
