"""A timeline as one SVG file: a lane for each rank, boxes to scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from ...text import numbered
from ..action import COMPUTE, TRANSFERS, Action, Op
from ..plan_text import FilePath, save_text
from ..report import Span
from .palette import HATCH, HUE, LETTER, NAMES, ORDER, TILE, is_neutral, look
from .rows import Chart, Sources, axis_name, charts, group_narrow, least_time, number, whole_time, with_unit

_MARGIN, _HEADING, _AXIS, _BELOW = 16.0, 26.0, 42.0, 10.0
_NARROWEST_PLOT, _WIDEST_PLOT, _WIDTH_A_BOX = 900.0, 2400.0, 18.0
_TALLEST_LANE, _LOWEST_LANE, _ALL_LANES = 30.0, 5.0, 1700.0
_LABEL_HEIGHT = 11.0
_SEEN_FROM = 0.5  # the width from which a box stands alone, while the picture is small
_MOST_BOXES = 12_000  # about 3 MB

_STYLE = (
    ".h{font-size:15px}.l{fill:currentColor}.b{stroke:#222;stroke-width:.5}"
    "path.a{stroke:#888;stroke-width:.5;stroke-dasharray:2 2}"
    "text.a{font-size:11px;text-anchor:middle}.n{font-size:11px}"
)
_SMALL_LETTER, _CAPITAL = 0.57, 0.74  # of a font's size, on average and a little more
_LEGEND_FONT, _LEGEND_ROW = 12, 22
_TICK_APART = 80.0
# The lines of one tile of hatch; the short ones are the corners of the neighbours' lines.
_LINES = {"/": "M-1 1L1-1M0 8L8 0M7 9L9 7", "\\": "M-1 7L1 9M0 0L8 8M7-1L9 1"}


def svg(source: Sources, path: FilePath | None = None) -> str:
    """Draw the SVG picture of a plan, a timeline or a simulation's report; several in a list share one time scale.

    Every box has a tooltip with its action and times. Hue and hatch show the op, lightness which of its rank's stages
    it works on. In a very big plan, actions too narrow to be seen share columns, and the picture says so. The times
    of a plan are slots. `path` is the file to write.

    >>> from pipecut.schedule.plan import Plan
    >>> plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> picture = svg(plan)
    >>> picture[:4], picture.count("<title>")
    ('<svg', 5)
    """
    drawn = charts(source)
    layout = _Layout.of(drawn)
    extent = layout.plot / layout.scale
    body: list[str] = []
    y = _MARGIN
    for chart in drawn:
        body.append(_heading(chart, _MARGIN, y + 15, layout.width - 2 * _MARGIN))
        y += _HEADING
        bottom = y + layout.lane * len(chart.rows)
        body += _lanes(chart, layout, y)
        body[-1:-1] = _axis(extent, layout.scale, layout.left, y, bottom, axis_name(chart.unit))
        y = bottom + _AXIS + _BELOW
    entries, height = legend(drawn, _MARGIN, y, layout.width - 2 * _MARGIN)
    body += entries
    y += height
    for line in _notes(drawn, layout):
        body.append(f'<text class="l" x="{_MARGIN:g}" y="{y + 12:.1f}">{escape(line)}</text>')
        y += 18
    return save_text(_document(drawn, layout.width, y + _MARGIN, body), path)


def _document(drawn: Sequence[Chart], width: float, height: float, body: Sequence[str]) -> str:
    names = escape("; ".join(f"{chart.name}: {chart.facts}" for chart in drawn))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            'font-family="Helvetica,Arial,\'DejaVu Sans\',sans-serif" font-size="12">',
            f"<title>{names}</title>",
            f"<style>{_STYLE}</style>",
            hatches(drawn[0].chunks),
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _lanes(chart: Chart, layout: _Layout, top: float) -> list[str]:
    """Draw the names and grounds of the lanes and, as the last piece, all boxes."""
    boxes = _Boxes(chart, layout.left, layout.scale, layout.lane * 0.88, layout.least)
    every = -(-_LABEL_HEIGHT // layout.lane)
    found, drawn = [], []
    for rank in range(len(chart.rows)):
        y = top + rank * layout.lane
        size = f'width="{layout.plot:g}" height="{boxes.height:.2f}"'
        found.append(f'<rect x="{layout.left:g}" y="{y:.2f}" {size} fill="#f0f0f0"/>')
        if rank % every == 0:
            found.append(f'<text x="{_MARGIN:g}" y="{y + boxes.height / 2 + 4:.2f}">rank {rank}</text>')
        drawn += boxes.row(rank, y)
    style = f'text-anchor="middle" style="font-size:{boxes.font:.1f}px" stroke-width="3" paint-order="stroke"'
    return [*found, f"<g {style}>\n" + "\n".join(drawn) + "\n</g>"]


def _notes(drawn: Sequence[Chart], layout: _Layout) -> list[str]:
    """Tell the reader of spans that do not stand alone."""
    split = [track for chart in drawn for row in chart.rows for track in _tracks(row)]
    together = [len(group) for track in split for group in group_narrow(track, layout.least) if len(group) > 1]
    if not together:
        return []
    return [
        f"{sum(together)} actions narrower than {layout.least * layout.scale:.3g} pixels share {len(together)} "
        "columns: each has a band for every kind of action in it, as high as its share of the time."
    ]


@dataclass(frozen=True)
class _Layout:
    """The measures that all charts of a picture share."""

    plot: float  # the width of the lanes
    left: float
    lane: float  # the height of one, with the gap below it
    scale: float  # from time to width
    least: float  # the time below which spans are gathered

    @classmethod
    def of(cls, drawn: Sequence[Chart]) -> _Layout:
        """Choose measures with which boxes can be read if possible, and the file stays small in any case."""
        rows = [row for chart in drawn for row in chart.rows]
        split = [track for row in rows for track in _tracks(row)]
        plot = min(max(max(map(len, rows)) * _WIDTH_A_BOX, _NARROWEST_PLOT), _WIDEST_PLOT)
        extent = whole_time(drawn)
        digits = len(str(max(len(chart.rows) for chart in drawn) - 1))
        return cls(
            plot=plot,
            left=_MARGIN + 38 + 7 * digits,
            lane=min(max(_ALL_LANES / len(rows), _LOWEST_LANE), _TALLEST_LANE),
            scale=plot / extent,
            least=least_time(split, _SEEN_FROM * extent / plot, _MOST_BOXES),
        )

    @property
    def width(self) -> float:
        """The width of the picture."""
        return self.left + self.plot + 2 * _MARGIN


def hatches(chunks: int) -> str:
    """Return the hatched fills for ranks with so many stages."""
    found = []
    for op, chunk in ((op, chunk) for op in HATCH for chunk in range(chunks)):
        fill, hatch, _ = look(op, chunk, chunks)
        lines = "".join(_LINES[line] for line in hatch)
        found.append(
            f'<pattern id="{_pattern_name(op, chunk, chunks)}" width="{TILE}" height="{TILE}" '
            f'patternUnits="userSpaceOnUse"><rect width="{TILE}" height="{TILE}" fill="{fill}"/>'
            f'<path d="{lines}" stroke="#000" stroke-opacity=".35" fill="none"/></pattern>'
        )
    return f"<defs>{''.join(found)}</defs>"


def _heading(chart: Chart, left: float, baseline: float, width: float) -> str:
    """Return the name and the facts of a source, cut off where the picture ends."""
    facts = f" \N{EM DASH} {chart.facts}"
    room = max(12, int(width / (15 * _SMALL_LETTER)) - len(facts))
    name = chart.name if len(chart.name) <= room else chart.name[: room - 1] + "…"
    return (
        f'<text class="h" x="{left:g}" y="{baseline:g}"><tspan font-weight="bold">{escape(name)}</tspan>'
        f"{escape(facts)}</text>"
    )


def _ticks(extent: float, apart: float) -> list[float]:
    """Return round times from 0 to the extent, at least `apart` from each other.

    >>> _ticks(10, 1.5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    power = 10.0 ** math.floor(math.log10(apart)) if apart > 0 else 1.0
    step = next((power * times for times in (1, 2, 5, 10) if power * times >= apart), power * 10)
    return [place * step for place in range(int(extent / step + 1e-9) + 1)]


def _axis(extent: float, scale: float, left: float, top: float, bottom: float, name: str) -> list[str]:
    """Draw lines across the lanes at round times, the times below them, and the name of the axis."""
    apart = _TICK_APART / scale
    found = []
    for time in _ticks(extent, max(apart, 1.0) if name == "slots" else apart):
        x = left + time * scale
        found.append(f'<path class="a" d="M{x:.2f} {top:.2f}V{bottom + 4:.2f}"/>')
        found.append(f'<text class="a" x="{x:.2f}" y="{bottom + 16:.2f}">{number(time)}</text>')
    found.append(f'<text class="n" x="{left:g}" y="{bottom + 31:.2f}">{escape(name)}</text>')
    return found


def legend(charts: Sequence[Chart], left: float, top: float, width: float) -> tuple[list[str], float]:
    """Explain the colours and hatches in use; return the entries and their height."""
    found, x, y = [], left, top
    for swatch, swatch_width, text in _entries(charts):
        needed = swatch_width + 6 + _width(text) + 18
        if x > left and x + needed > left + width:
            x, y = left, y + _LEGEND_ROW
        found.append(f'<g transform="translate({x:.1f} {y:.1f})">{swatch}')
        found.append(f'<text class="l" x="{swatch_width + 6}" y="12">{escape(text)}</text></g>')
        x += needed
    return found, y + _LEGEND_ROW - top


def _entries(charts: Sequence[Chart]) -> Iterator[tuple[str, int, str]]:
    """Return (swatch, its width, text) of every entry."""
    seen = {action.op for chart in charts for row in chart.rows for _, action, _, _ in row}
    overlapped = Op.OVERLAP_F_B in seen
    if overlapped:
        seen |= {p.op for chart in charts for row in chart.rows for _, action, _, _ in row for p in action.parts}
    chunks = charts[0].chunks
    computed = [op for op in NAMES if op in seen and op in HUE]
    for op in computed:
        yield _swatch(_fill(op, 0, chunks), 0, 0, 22, 16), 22, f"{op} {NAMES[op]}"
    if chunks > 1 and computed:
        strip = "".join(_swatch(_fill(computed[0], chunk, chunks), 16 * chunk, 0, 16, 16) for chunk in range(chunks))
        yield strip, 16 * chunks, "stages of a rank, first to last"
    if overlapped:
        halves = _swatch(_fill(Op.FORWARD, 0, chunks), 0, 0, 22, 8)
        yield halves + _swatch(_fill(Op.FULL_BACKWARD, 0, chunks), 0, 8, 22, 8), 22, NAMES[Op.OVERLAP_F_B]
    neutral = [op for op in NAMES if op in seen and is_neutral(op)]
    if neutral:
        yield _swatch(look(neutral[0]).fill, 0, 0, 22, 16), 22, ", ".join(f"{LETTER[op]} {op}" for op in neutral)
    for op, text in ((Op.SEND_F, "send"), (Op.RECV_F, "receive")):
        if seen & TRANSFERS:
            yield _swatch(look(op).fill, 0, 6, 22, 4), 22, text


def _fill(op: Op, chunk: int, chunks: int) -> str:
    fill, hatch, _ = look(op, chunk, chunks)
    return f"url(#{_pattern_name(op, chunk, chunks)})" if hatch else fill


def _swatch(fill: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="b" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _width(text: str) -> float:
    """Estimate the width of a text of the legend."""
    return _LEGEND_FONT * sum(_CAPITAL if letter.isupper() else _SMALL_LETTER for letter in text)


# The boxes of one rank in an SVG picture, each with a tooltip.

_THINNEST = 0.8  # of a mark that is to be seen
_HATCHED_FROM, _FRAMED_FROM = 6.0, 3.0  # widths
_DIGIT = 0.62  # of a font's size
_LISTED = 4  # names in the tooltip of a column

_Tracks = tuple[Sequence[Span], Sequence[Span], Sequence[Span]]


@dataclass(frozen=True)
class _Boxes:
    """Rows of spans drawn to scale. Spans shorter than `least` stand together in columns."""

    chart: Chart
    left: float
    scale: float  # from time to width
    height: float  # of a rank's boxes
    least: float

    @cached_property
    def tracks(self) -> tuple[_Tracks, ...]:
        """The tracks of each rank."""
        return tuple(map(_tracks, self.chart.rows))

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
        return f"<g><title>{escape(_described(span, self.chart.unit))}</title>{''.join(drawn)}</g>"

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
        return f"url(#{_pattern_name(leaf.op, chunk, chunks)})" if hatched and looks.hatch else looks.fill

    def _label(self, rank: int, leaf: Action, middle: float, y: float, width: float, height: float) -> str:
        """Return the number of the microbatch, or a letter for an action that is not a computation, where it fits."""
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


def _tracks(row: Sequence[Span]) -> _Tracks:
    """Divide spans into back, front, and thin marks at the foot, so that no transfer hides a computation."""
    back = [span for span in row if is_neutral(span.action.op)]
    foot = [span for span in row if span.action.op in TRANSFERS]
    front = row if not back and not foot else [span for span in row if span.action.op in COMPUTE]
    return back, front, foot


def _described(span: Span, unit: str) -> str:
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


def _pattern_name(op: Op, chunk: int, chunks: int) -> str:
    """Return the id of a hatched fill, of all that it depends on, so that pictures in one page may share it."""
    return f"{op}{chunk}of{chunks}"


def _n(value: float) -> str:
    """Round a coordinate to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
