"""What stands around the boxes of an SVG picture: hatches, headings, time axes and the legend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ..action import TRANSFERS, Op
from .palette import HATCH, HUE, LETTER, NAMES, TILE, is_neutral, look
from .rows import Chart, number
from .svg_boxes import pattern_name

SMALL_LETTER, CAPITAL = 0.57, 0.74  # of a font's size, on average and a little more
LEGEND_FONT, LEGEND_ROW = 12, 22
TICK_APART = 80.0
# The lines of one tile of hatch; the short ones are the corners of the neighbours' lines.
LINES = {"/": "M-1 1L1-1M0 8L8 0M7 9L9 7", "\\": "M-1 7L1 9M0 0L8 8M7-1L9 1"}


def hatches(chunks: int) -> str:
    """The hatched fills for ranks with so many stages."""
    found = []
    for op, chunk in ((op, chunk) for op in HATCH for chunk in range(chunks)):
        fill, hatch, _ = look(op, chunk, chunks)
        lines = "".join(LINES[line] for line in hatch)
        found.append(
            f'<pattern id="{pattern_name(op, chunk, chunks)}" width="{TILE}" height="{TILE}" '
            f'patternUnits="userSpaceOnUse"><rect width="{TILE}" height="{TILE}" fill="{fill}"/>'
            f'<path d="{lines}" stroke="#000" stroke-opacity=".35" fill="none"/></pattern>'
        )
    return f"<defs>{''.join(found)}</defs>"


def heading(chart: Chart, left: float, baseline: float, width: float) -> str:
    """The name of a source and what is known of it, cut off where the picture ends."""
    facts = f" \N{EM DASH} {chart.facts}"
    room = max(12, int(width / (15 * SMALL_LETTER)) - len(facts))
    name = chart.name if len(chart.name) <= room else chart.name[: room - 1] + "…"
    return (
        f'<text class="h" x="{left:g}" y="{baseline:g}"><tspan font-weight="bold">{escape(name)}</tspan>'
        f"{escape(facts)}</text>"
    )


def ticks(extent: float, apart: float) -> list[float]:
    """Round times from 0 to the extent, at least `apart` from each other.

    >>> ticks(10, 1.5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    power = 10.0 ** math.floor(math.log10(apart)) if apart > 0 else 1.0
    step = next((power * times for times in (1, 2, 5, 10) if power * times >= apart), power * 10)
    return [place * step for place in range(int(extent / step + 1e-9) + 1)]


def axis(extent: float, scale: float, left: float, top: float, bottom: float, name: str) -> list[str]:
    """Lines across the lanes at round times, the times below them, and what they are."""
    apart = TICK_APART / scale
    found = []
    for time in ticks(extent, max(apart, 1.0) if name == "steps" else apart):
        x = left + time * scale
        found.append(f'<path class="a" d="M{x:.2f} {top:.2f}V{bottom + 4:.2f}"/>')
        found.append(f'<text class="a" x="{x:.2f}" y="{bottom + 16:.2f}">{number(time)}</text>')
    found.append(f'<text class="n" x="{left:g}" y="{bottom + 31:.2f}">{escape(name)}</text>')
    return found


def legend(charts: Sequence[Chart], left: float, top: float, width: float) -> tuple[list[str], float]:
    """What the colours and hatches mean, for what is there to see; and the height that takes."""
    found, x, y = [], left, top
    for swatch, swatch_width, text in _entries(charts):
        needed = swatch_width + 6 + _width(text) + 18
        if x > left and x + needed > left + width:
            x, y = left, y + LEGEND_ROW
        found.append(f'<g transform="translate({x:.1f} {y:.1f})">{swatch}')
        found.append(f'<text class="l" x="{swatch_width + 6}" y="12">{escape(text)}</text></g>')
        x += needed
    return found, y + LEGEND_ROW - top


def _entries(charts: Sequence[Chart]) -> Iterator[tuple[str, int, str]]:
    """(swatch, its width, text) of every entry."""
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
    return f"url(#{pattern_name(op, chunk, chunks)})" if hatch else fill


def _swatch(fill: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="b" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def _width(text: str) -> float:
    """About how wide a text of the legend is."""
    return LEGEND_FONT * sum(CAPITAL if letter.isupper() else SMALL_LETTER for letter in text)
