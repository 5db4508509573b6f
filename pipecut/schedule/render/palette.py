"""Colours and hatches: the hue and the hatch tell the op, the lightness tells which of its rank's stages it works on.

The hues are those of Okabe and Ito, which readers with any common colour blindness can tell apart. The four of
F, I, W and B also differ in luminance, and I is hatched one way, W the other and B, which does the work of both, both
ways: so a grey print can be read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ..action import RECEIVES, SENDS, TRANSFERS, Op
from ..timeline import Span

_BLACK, _WHITE = "#000000", "#ffffff"
HUE = {
    Op.FORWARD: "#0072b2",
    Op.BACKWARD_INPUT: "#e69f00",
    Op.BACKWARD_WEIGHT: "#f0e442",
    Op.FULL_BACKWARD: "#009e73",
}
_SEND_GREY, _RECEIVE_GREY, _NEUTRAL_GREY = "#606060", "#a8a8a8", "#c0c0c0"
TILE = 8  # the side of a square of hatch
HATCH = {Op.BACKWARD_INPUT: "/", Op.BACKWARD_WEIGHT: "\\", Op.FULL_BACKWARD: "/\\"}
_PALEST = 0.55  # how much white is in the colour of a rank's last stage

# In the order of the legend, and from top to bottom where several actions share one column.
NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
    Op.FULL_BACKWARD: "full backward",
    Op.OVERLAP_F_B: "forward and backward at once",
    Op.UNSHARD: "unshard",
    Op.RESHARD: "reshard",
    Op.REDUCE_GRAD: "reduce gradients",
    Op.REDUCE_TIES: "sum tied gradients",
    Op.SEND_F: "send activation",
    Op.SEND_B: "send gradient",
    Op.RECV_F: "receive activation",
    Op.RECV_B: "receive gradient",
}
LETTER = {
    Op.OVERLAP_F_B: "X",
    Op.UNSHARD: "U",
    Op.RESHARD: "R",
    Op.REDUCE_GRAD: "G",
    Op.REDUCE_TIES: "T",
    Op.SEND_F: ">",
    Op.SEND_B: ">",
    Op.RECV_F: "<",
    Op.RECV_B: "<",
} | {op: op.value for op in HUE}
ORDER = {op: place for place, op in enumerate(NAMES)}


class _Look(NamedTuple):
    """How the box of an action is drawn."""

    fill: str
    hatch: str  # "/" for lines that rise, "\\" for lines that fall; both or none
    ink: str  # the colour of text on it


@cache
def look(op: Op, chunk: int = 0, chunks: int = 1) -> _Look:
    """How an op is drawn on the given one of its rank's stages.

    >>> look(Op.FORWARD).fill, look(Op.FORWARD, chunk=1, chunks=2).fill
    ('#0072b2', '#8cc0dc')
    """
    if op not in HUE:
        grey = _SEND_GREY if op in SENDS else _RECEIVE_GREY if op in RECEIVES else _NEUTRAL_GREY
        return _Look(grey, "", _ink_on(grey))
    fill = _with_white(HUE[op], _PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0)
    return _Look(fill, HATCH.get(op, ""), _ink_on(fill))


def is_neutral(op: Op) -> bool:
    """Whether an op is neither a computation nor a transfer."""
    return op not in HUE and op not in TRANSFERS and op is not Op.OVERLAP_F_B


def _luminance(colour: str) -> float:
    """The relative luminance of a colour such as "#0072b2", from 0 for black to 1 for white, as WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, from 1 to 21, as WCAG 2 defines it.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _ink_on(fill: str) -> str:
    """Black or white, whichever reads better on a colour."""
    return max(_WHITE, _BLACK, key=lambda ink: contrast(ink, fill))


def _parts(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _with_white(colour: str, share: float) -> str:
    return "#" + "".join(f"{round(255 * (part + (1 - part) * share)):02x}" for part in _parts(colour))


# MERGED: What each of a few equal pieces of time is mostly spent on.


_MOMENT = 1e-9  # of a cell: what is shorter is taken for a matter of rounding


@dataclass
class _Use:
    """What the spans under one letter have of a cell."""

    total: float = 0.0
    most: float = -1.0
    span: Span | None = None  # the one that has most


def owners(row: Sequence[Span], cells: int, step: float, letter: Callable[[Span], str]) -> list[Span | None]:
    """The span that stands for each cell of `step` time: the longest under the letter that has most; None if idle.

    A transfer, or what else is no computation, stands where no computation does.
    """
    in_front = _owners([span for span in row if span.action.is_compute], cells, step, letter)
    behind = _owners([span for span in row if not span.action.is_compute], cells, step, letter)
    return [front or back for front, back in zip(in_front, behind, strict=True)]


def _owners(row: Iterable[Span], cells: int, step: float, letter: Callable[[Span], str]) -> list[Span | None]:
    uses: list[dict[str, _Use]] = [{} for _ in range(cells)]
    for span in row:
        for cell, share in _shares(span, cells, step):
            use = uses[cell].setdefault(letter(span), _Use())
            use.total += share
            if share > use.most + _MOMENT:
                use.most, use.span = share, span
    return [_owner(use) for use in uses]


def _shares(span: Span, cells: int, step: float) -> Iterator[tuple[int, float]]:
    """The cells that a span has part in, and how much of each."""
    start, end = span.start / step, span.end / step
    first = min(int(start + _MOMENT), cells - 1)
    yield first, max(min(end, first + 1) - start, 0.0)
    for cell in range(first + 1, cells):
        if end - cell < _MOMENT:
            return
        yield cell, min(end - cell, 1.0)


def _owner(uses: dict[str, _Use]) -> Span | None:
    """Who has most of a cell; nobody if it is mostly idle, but a moment alone in a cell is shown."""
    spent = sum(use.total for use in uses.values())
    if not uses or _MOMENT < spent < 0.5 - _MOMENT:
        return None
    return max(uses.values(), key=lambda use: use.total).span
