"""Colours and hatches: the hue and the hatch show the op, the lightness shows which of its rank's stages it works on.

The hues are those of Okabe and Ito, which readers with any common colour blindness can tell apart. The four of
F, I, W and B also differ in luminance, and I is hatched one way, W the other and B, which does the work of both, both
ways: so a grey print can be read as well.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..action import RECEIVES, SENDS, TRANSFERS, Op

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
    """The look of the box of an action."""

    fill: str
    hatch: str  # "/" for lines that rise, "\\" for lines that fall; both or none
    ink: str  # the colour of text on it


@cache
def look(op: Op, chunk: int = 0, chunks: int = 1) -> _Look:
    """Return the look of an op on the given one of its rank's stages.

    >>> look(Op.FORWARD).fill, look(Op.FORWARD, chunk=1, chunks=2).fill
    ('#0072b2', '#8cc0dc')
    """
    if op not in HUE:
        grey = _SEND_GREY if op in SENDS else _RECEIVE_GREY if op in RECEIVES else _NEUTRAL_GREY
        return _Look(grey, "", _ink_on(grey))
    fill = _with_white(HUE[op], _PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0)
    return _Look(fill, HATCH.get(op, ""), _ink_on(fill))


def is_neutral(op: Op) -> bool:
    """Return True if an op is neither a computation nor a transfer."""
    return op not in HUE and op not in TRANSFERS and op is not Op.OVERLAP_F_B


def _luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as "#0072b2": 0 for black, 1 for white (WCAG 2)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG 2 defines it.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _ink_on(fill: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    return max(_WHITE, _BLACK, key=lambda ink: contrast(ink, fill))


def _parts(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _with_white(colour: str, share: float) -> str:
    return "#" + "".join(f"{round(255 * (part + (1 - part) * share)):02x}" for part in _parts(colour))
