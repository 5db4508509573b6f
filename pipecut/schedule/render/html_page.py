"""A timeline as one HTML page with hover and zoom, which needs nothing but itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

from ..action import TRANSFERS, Action, Op
from ..plan_text import FilePath, save_text
from .gantt import text
from .html_script import SCRIPT
from .palette import HUE, LETTER, NAMES, TILE, is_neutral, look
from .rows import Chart, Sources, axis_name, charts, whole_time
from .svg import hatches, legend

_BACK, _FRONT, _FOOT = 0, 1, 2  # the tracks of a lane, as in the script
_DIGITS = 7  # of the whole time, in which times are kept
_LEGEND_WIDTH = 1000
_WITHOUT_SCRIPT = 110  # characters per line
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_KEYS_HELP = (
    "Wheel or + and − zoom, drag or ← and → move, 0 shows all. N and P step through the actions of a rank, "
    "J and K through the ranks, Esc ends that."
)
_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#000;--quiet:#555;--panel:#f4f4f4;--line:#bbb}
@media (prefers-color-scheme:dark){
:root{--ground:#16181c;--ink:#eee;--quiet:#aaa;--panel:#25282e;--line:#555}}
body{margin:12px 16px;background:var(--ground);color:var(--ink);font:14px/1.4 Helvetica,Arial,'DejaVu Sans',sans-serif}
h1{font-size:16px;margin:10px 0 4px}h1 span{font-weight:normal}
canvas{display:block;width:100%;cursor:grab;touch-action:pan-y}canvas.held{cursor:grabbing}
canvas:focus-visible{outline:2px solid #0072b2;outline-offset:2px}
nav{display:flex;flex-wrap:wrap;gap:6px;align-items:center}nav p{margin:0 0 0 8px;color:var(--quiet);font-size:12px}
button{min-width:34px;min-height:30px;border:1px solid var(--line);border-radius:4px;background:var(--panel);
color:var(--ink);font:inherit;cursor:pointer}
#tip{position:fixed;z-index:2;padding:6px 9px;border:1px solid var(--line);border-radius:4px;background:var(--panel);
color:var(--ink);white-space:pre;pointer-events:none;font-size:12px;box-shadow:0 2px 8px #0004}
#tip[hidden]{display:none}
svg{display:block;max-width:1000px;font:12px Helvetica,Arial,'DejaVu Sans',sans-serif}
.l{fill:currentColor}.b{stroke:#222;stroke-width:.5}.note{color:var(--quiet);font-size:12px}
@media print{
:root{--ground:#fff;--ink:#000;--quiet:#333;color-scheme:light}nav,#tip{display:none}body{margin:0}
canvas{width:100%!important;height:auto!important}section{break-inside:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def html(source: Sources, path: FilePath | None = None) -> str:
    """Draw the HTML page of a plan, a timeline or a simulation's report; several in a list share one time scale.

    The page needs no network. Hovering describes an action; the wheel, the buttons or + and - zoom, dragging or the
    arrows move, 0 shows all; N, P, J and K step through the actions. It follows the reader's light or dark setting, and
    prints in light. `path` is the file to write.

    >>> from pipecut.schedule.plan import Plan
    >>> page = html(Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}, name="two"))
    >>> page[:15], "<title>two</title>" in page
    ('<!DOCTYPE html>', True)
    """
    drawn = charts(source)
    data = json.dumps(_data(drawn), separators=(",", ":")).replace("<", "\\u003c")
    names = " and ".join(chart.name for chart in drawn)
    entries, height = legend(drawn, 0, 0, _LEGEND_WIDTH)
    patterns = hatches(drawn[0].chunks)
    page = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(names)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        "<nav>"
        + _button("out", "−", "Zoom out (-)")
        + _button("in", "+", "Zoom in (+)")
        + _button("left", "←", "Earlier (left arrow)")
        + _button("right", "→", "Later (right arrow)")
        + _button("whole", "Whole", "Show all (0)")
        + f"<p>{_KEYS_HELP}</p></nav>",
        *map(_section, drawn),
        f'<svg viewBox="0 0 {_LEGEND_WIDTH} {height:g}" role="img" aria-label="Legend">',
        patterns + "".join(entries) + "</svg>",
        '<p class="note">Actions too narrow to be seen share columns, in which each kind has a band as high as its',
        "share of the time; zoom in to see them.</p>",
        '<div id="tip" role="status" aria-live="polite" hidden></div>',
        f"<noscript><pre>{escape(text(source, width=_WITHOUT_SCRIPT))}</pre></noscript>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
    ]
    return save_text("\n".join(page), path)


def _button(identity: str, shown: str, label: str) -> str:
    return f'<button id="{identity}" type="button" title="{label}" aria-label="{label}">{shown}</button>'


def _section(chart: Chart) -> str:
    label = escape(f"{chart.name}: {len(chart.rows)} ranks, {chart.facts}", quote=True)
    return (
        f"<section><h1>{escape(chart.name)} <span>— {escape(chart.facts)}</span></h1>"
        f'<div><canvas tabindex="0" role="img" aria-label="{label}. {_KEYS_HELP}"></canvas></div></section>'
    )


def _data(drawn: Sequence[Chart]) -> dict[str, object]:
    """Return all that the script draws."""
    extent = whole_time(drawn)
    chunks = drawn[0].chunks
    keys = [(op, chunk) for op in NAMES for chunk in range(chunks if op in HUE else 1)]
    places = {key: place for place, key in enumerate(keys)}
    digits = _DIGITS - math.ceil(math.log10(extent))
    return {
        "axis": axis_name(drawn[0].unit),
        "unit": drawn[0].unit,
        "extent": extent,
        "tile": TILE,
        "looks": [look(op, chunk, chunks)._asdict() for op, chunk in keys],
        "charts": [_chart(chart, places, digits) for chart in drawn],
    }


def _chart(chart: Chart, places: dict[tuple[Op, int], int], digits: int) -> dict[str, object]:
    """Return the kinds of action, and for each row a run of numbers: gap, time, kind and a microbatch per part."""
    kinds: dict[tuple[object, ...], int] = {}
    described: list[dict[str, object]] = []
    rows = []
    for rank, row in enumerate(chart.rows):
        numbers: list[float | int] = []
        reached = 0.0  # the end of the last span as the script will have it, so that rounding does not add up
        for _, action, start, end in row:
            key = (rank, *((leaf.op, leaf.stage, leaf.peer) for leaf in action.leaves), action.op)
            if key not in kinds:
                kinds[key] = len(kinds)
                described.append(_kind(chart, rank, action, places))
            gap = _short(start - reached, digits)
            time = _short(end - reached - gap, digits)
            reached += gap
            reached += time
            microbatches = (-1 if leaf.microbatch is None else leaf.microbatch for leaf in action.leaves)
            numbers += (gap, time, kinds[key], *microbatches)
        rows.append(numbers)
    return {"kinds": described, "rows": rows}


def _kind(chart: Chart, rank: int, action: Action, places: dict[tuple[Op, int], int]) -> dict[str, object]:
    kind: dict[str, object] = {
        "name": NAMES[action.op],
        "track": _BACK if is_neutral(action.op) else _FOOT if action.op in TRANSFERS else _FRONT,
        "parts": [_part(chart, rank, leaf, places) for leaf in action.leaves],
    }
    if action.parts:
        kind["overlap"] = action.op
    if is_neutral(action.op):
        kind["letter"] = LETTER[action.op]
    if action.op is Op.REDUCE_TIES:
        kind["numbered"] = "tie"
    return kind


def _part(chart: Chart, rank: int, leaf: Action, places: dict[tuple[Op, int], int]) -> dict[str, object]:
    chunk = chart.chunk_of.get((rank, leaf.stage), 0) if leaf.op in HUE else 0
    bare = repr(leaf._replace(microbatch=None))
    part: dict[str, object] = {
        "op": leaf.op,
        "stage": leaf.stage,
        "peer": bare[len(f"{leaf.stage}{leaf.op}") :],  # as in the action's text
        "look": places[leaf.op, chunk],
    }
    if leaf.op in TRANSFERS:
        part["to"] = leaf.other_stage
    return part


def _short(value: float, digits: int) -> float | int:
    """Write a number in few characters: rounded, and whole where it is."""
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded
