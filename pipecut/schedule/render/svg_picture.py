"""A timeline as one SVG file: a lane for each rank, boxes to scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..output import FilePath, saved
from .gather import gathered, least_time
from .rows import Chart, Sources, axis_name, charts, whole_time
from .svg_boxes import Boxes, tracks
from .svg_frame import axis, hatches, heading, legend

MARGIN, HEADING, AXIS, BELOW = 16.0, 26.0, 42.0, 10.0
NARROWEST_PLOT, WIDEST_PLOT, WIDTH_A_BOX = 900.0, 2400.0, 18.0
TALLEST_LANE, LOWEST_LANE, ALL_LANES = 30.0, 5.0, 1700.0
LABEL_HEIGHT = 11.0
SEEN_FROM = 0.5  # the width from which a box stands alone, while the picture is small
MOST_BOXES = 12_000  # about 3 MB

STYLE = (
    ".h{font-size:15px}.l{fill:currentColor}.b{stroke:#222;stroke-width:.5}"
    "path.a{stroke:#888;stroke-width:.5;stroke-dasharray:2 2}"
    "text.a{font-size:11px;text-anchor:middle}.n{font-size:11px}"
)


@dataclass(frozen=True)
class Layout:
    """The measures that all charts of a picture share."""

    plot: float  # the width of the lanes
    left: float
    lane: float  # the height of one, with the gap below it
    scale: float  # from time to width
    least: float  # the time below which spans are gathered

    @classmethod
    def of(cls, drawn: Sequence[Chart]) -> Layout:
        """Measures with which the boxes can be read if that can be, and the file stays small in any case."""
        rows = [row for chart in drawn for row in chart.rows]
        split = [track for row in rows for track in tracks(row)]
        plot = min(max(max(map(len, rows)) * WIDTH_A_BOX, NARROWEST_PLOT), WIDEST_PLOT)
        extent = whole_time(drawn)
        digits = len(str(max(len(chart.rows) for chart in drawn) - 1))
        return cls(
            plot=plot,
            left=MARGIN + 38 + 7 * digits,
            lane=min(max(ALL_LANES / len(rows), LOWEST_LANE), TALLEST_LANE),
            scale=plot / extent,
            least=least_time(split, SEEN_FROM * extent / plot, MOST_BOXES),
        )

    @property
    def width(self) -> float:
        """The width of the picture."""
        return self.left + self.plot + 2 * MARGIN


def svg(source: Sources, path: FilePath | None = None) -> str:
    """The SVG picture of a plan, a timeline or a simulation's report; several in a list share one time scale.

    Every box has a tooltip with its action and times. Hue and hatch tell the op, lightness which of its rank's stages
    it works on. In a very big plan, actions too narrow to be seen share columns, and the picture says so. The times
    of a plan are steps. `path` is the file to write.

    >>> from pipecut.schedule.plan import Plan
    >>> plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> picture = svg(plan)
    >>> picture[:4], picture.count("<title>")
    ('<svg', 5)
    """
    drawn = charts(source)
    layout = Layout.of(drawn)
    extent = layout.plot / layout.scale
    body: list[str] = []
    y = MARGIN
    for chart in drawn:
        body.append(heading(chart, MARGIN, y + 15, layout.width - 2 * MARGIN))
        y += HEADING
        bottom = y + layout.lane * len(chart.rows)
        body += _lanes(chart, layout, y)
        body[-1:-1] = axis(extent, layout.scale, layout.left, y, bottom, axis_name(chart.unit))
        y = bottom + AXIS + BELOW
    entries, height = legend(drawn, MARGIN, y, layout.width - 2 * MARGIN)
    body += entries
    y += height
    for line in _notes(drawn, layout):
        body.append(f'<text class="l" x="{MARGIN:g}" y="{y + 12:.1f}">{escape(line)}</text>')
        y += 18
    return saved(_document(drawn, layout.width, y + MARGIN, body), path)


def _document(drawn: Sequence[Chart], width: float, height: float, body: Sequence[str]) -> str:
    names = escape("; ".join(f"{chart.name}: {chart.facts}" for chart in drawn))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            'font-family="Helvetica,Arial,\'DejaVu Sans\',sans-serif" font-size="12">',
            f"<title>{names}</title>",
            f"<style>{STYLE}</style>",
            hatches(drawn[0].chunks),
            f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _lanes(chart: Chart, layout: Layout, top: float) -> list[str]:
    """The names and grounds of the lanes, and, as the last piece, all boxes."""
    boxes = Boxes(chart, layout.left, layout.scale, layout.lane * 0.88, layout.least)
    every = -(-LABEL_HEIGHT // layout.lane)
    found, drawn = [], []
    for rank in range(len(chart.rows)):
        y = top + rank * layout.lane
        size = f'width="{layout.plot:g}" height="{boxes.height:.2f}"'
        found.append(f'<rect x="{layout.left:g}" y="{y:.2f}" {size} fill="#f0f0f0"/>')
        if rank % every == 0:
            found.append(f'<text x="{MARGIN:g}" y="{y + boxes.height / 2 + 4:.2f}">rank {rank}</text>')
        drawn += boxes.row(rank, y)
    style = f'text-anchor="middle" style="font-size:{boxes.font:.1f}px" stroke-width="3" paint-order="stroke"'
    return [*found, f"<g {style}>\n" + "\n".join(drawn) + "\n</g>"]


def _notes(drawn: Sequence[Chart], layout: Layout) -> list[str]:
    """What the reader must know of spans that do not stand alone."""
    split = [track for chart in drawn for row in chart.rows for track in tracks(row)]
    together = [len(group) for track in split for group in gathered(track, layout.least) if len(group) > 1]
    if not together:
        return []
    return [
        f"{sum(together)} actions narrower than {layout.least * layout.scale:.3g} pixels share {len(together)} "
        "columns: each has a band for every kind of action in it, as high as its share of the time."
    ]
