"""Actions, the smallest parts of a plan, their text form, and their codes."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property
from typing import NamedTuple, overload

from ..errors import PlanError, UnknownOpError
from ..text import did_you_mean


class Op(str, Enum):
    """The kinds of action. The value is the name in the text form."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FULL_BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    REDUCE_TIES = "REDUCE_TIES"
    OVERLAP_F_B = "OVERLAP_F_B"

    def __str__(self) -> str:
        return str(self.value)

    @staticmethod
    def from_str(action: str) -> Op:
        """Return the kind that a text stands for."""
        if action not in _OPS:
            raise UnknownOpError(
                f"Invalid computation type {action}.{did_you_mean(action, _OPS)} Known are {', '.join(_OPS)}."
            )
        return _OPS[action]


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD, Op.OVERLAP_F_B})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
TRANSFERS = SENDS | RECEIVES
BACKWARD = frozenset({Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD, Op.SEND_B, Op.RECV_B})

# An activation goes to the stage after, a gradient to the stage before, unless the action names another peer.
NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
_COUNTERPART = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_ARROW = {Op.SEND_F: "->", Op.SEND_B: "->", Op.RECV_F: "<-", Op.RECV_B: "<-"}


class Action(NamedTuple):
    """One slot of one rank: an Op on a stage, for a microbatch.

    >>> Action(2, Op.FORWARD, 0), Action(0, Op.UNSHARD), Action(2, Op.SEND_B, 2)
    (2F0, 0UNSHARD, 2SEND_B2)
    >>> transfer(Op.SEND_F, 0, 5, peer=3)
    0SEND_F5->3
    >>> overlap(Action(1, Op.FORWARD, 1), Action(2, Op.FULL_BACKWARD, 0))
    (1F1;2B0)OVERLAP_F_B
    """

    stage: int  # -1 for an overlap, whose parts have stages of their own
    op: Op
    microbatch: int | None = None  # for REDUCE_TIES: the number of the tie
    peer: int | None = None  # for a transfer: the stage at the other end, if that is not the neighbour
    parts: tuple[Action, ...] = ()  # of an overlap

    def __repr__(self) -> str:
        if self.parts:
            return f"({';'.join(map(repr, self.parts))}){self.op}"
        number = "" if self.microbatch is None else self.microbatch
        peer = "" if self.peer is None else f"{_ARROW.get(self.op, '@')}{self.peer}"
        return f"{self.stage}{self.op}{number}{peer}"

    @property
    def is_compute(self) -> bool:
        """True if the action runs the stage's module, forward or backward."""
        return self.op in COMPUTE

    @property
    def is_transfer(self) -> bool:
        """True if the action is one end of a message between two stages."""
        return self.op in TRANSFERS

    @property
    def leaves(self) -> tuple[Action, ...]:
        """The parts of an overlap, or the action itself."""
        return self.parts or (self,)

    @property
    def other_stage(self) -> int:
        """The stage at the other end of a transfer."""
        return self.stage + NEIGHBOUR[self.op] if self.peer is None else self.peer

    @property
    def counterpart(self) -> Action:
        """The other end of a transfer: the receive of a send, the send of a receive."""
        return transfer(_COUNTERPART[self.op], self.other_stage, self.microbatch, self.stage)


Rows = tuple[Sequence[Action | None], ...]  # the actions of each rank; None is a bubble


def transfer(op: Op, stage: int, microbatch: int | None, peer: int) -> Action:
    """Return one end of a message, without a peer that is the neighbour, so that equal actions compare equal."""
    return Action(stage, op, microbatch, None if peer == stage + NEIGHBOUR[op] else peer)


def overlap(*parts: Action) -> Action:
    """Return an action of several that may run at the same time."""
    return Action(-1, Op.OVERLAP_F_B, None, None, parts)


_NUMBERED = {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD, Op.REDUCE_TIES} | TRANSFERS
WHOLE_STAGE = {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
_SIMPLE = re.compile(
    r"(?P<stage>\d{1,9})(?P<op>[A-Z](?:[A-Z_]*[A-Z])?)(?P<number>\d{1,9})?(?:(?P<arrow>->|<-)(?P<peer>\d{1,9}))?",
    re.ASCII,
)
_OVERLAP = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
_OPS = {op.value: op for op in Op}
_EXAMPLES = "2F0, 1I3, 0UNSHARD, 2SEND_B2, 0SEND_F1->3 or (1F1;2B0)OVERLAP_F_B"


def parse_action(text: str) -> Action | None:
    """Return the action that a text stands for; blank text is a bubble, None.

    >>> parse_action("2F0")
    2F0
    >>> parse_action(" ") is None
    True
    """
    if not isinstance(text, str):
        raise PlanError(f"{text!r} is not the text of an action. Write it like {_EXAMPLES}.")
    text = text.strip()
    if not text:
        return None
    match = _OVERLAP.fullmatch(text)
    if not match:
        return _parse_simple(text)
    texts = [part.strip() for part in match["parts"].split(";")]
    parts = [_parse_simple(part) for part in texts if part]
    if len(parts) < len(texts) or any(part.op not in COMPUTE for part in parts):
        raise PlanError(
            f"'{text}' is not an action: an overlap has parts, each F, I, W or B, as in (1F1;2B0)OVERLAP_F_B."
        )
    return overlap(*parts)


def _parse_simple(text: str) -> Action:
    match = _SIMPLE.fullmatch(text)
    if not match or match["op"] == Op.OVERLAP_F_B:
        raise PlanError(f"'{text}' is not an action. Write it like {_EXAMPLES}.")
    op = _OPS.get(match["op"])
    if op is None:
        near = did_you_mean(match["op"], _OPS)
        raise PlanError(f"'{text}' is not an action: there is no '{match['op']}'.{near} Known are {', '.join(_OPS)}.")
    if op in _NUMBERED and match["number"] is None:
        numbered = "tie" if op is Op.REDUCE_TIES else "microbatch"
        raise PlanError(
            f"'{text}' is not an action: {op} needs the number of a {numbered}, as in {match['stage']}{op}0."
        )
    if op in WHOLE_STAGE and match["number"] is not None:
        raise PlanError(f"'{text}' is not an action: {op} is for a whole stage; write {match['stage']}{op}.")
    if match["arrow"] != _ARROW.get(op) and match["arrow"] is not None:
        raise PlanError(
            f"'{text}' is not an action: a peer is written -> after a send and <- after a receive, nowhere else."
        )
    stage, number = int(match["stage"]), None if match["number"] is None else int(match["number"])
    return Action(stage, op, number) if match["peer"] is None else transfer(op, stage, number, int(match["peer"]))


# Actions as whole numbers, and rows of them: a plan of millions of actions in eight bytes for each.
#
# A code has, from the highest bit, the op, the stage, the peer and the number of the microbatch (or tie); the latter
# two count from 1, and 0 is none. So the passes of a stage have codes that follow each other. A bubble is -1. What has
# no code, an overlap or a number out of range, is kept in plain rows of actions.


_CODED_OPS = tuple(op for op in Op if op is not Op.OVERLAP_F_B)
OP_NUMBERS: dict[Op, int] = {op: number for number, op in enumerate(_CODED_OPS)}
NUMBER_BITS, _STAGE_BITS = 21, 19
MOST_NUMBERS, MOST_STAGES = (1 << NUMBER_BITS) - 1, (1 << _STAGE_BITS) - 1
_NUMBER, _STAGE = MOST_NUMBERS, MOST_STAGES  # masks
STAGE_SHIFT = NUMBER_BITS + _STAGE_BITS
OP_SHIFT = STAGE_SHIFT + _STAGE_BITS
_BUBBLE = -1


def first_code(stage: int, op: Op) -> int:
    """Return the code of an action for microbatch 0; those of the others follow it."""
    return (OP_NUMBERS[op] << OP_SHIFT) + (stage << STAGE_SHIFT) + 1


def code_of(action: Action | None) -> int | None:
    """Return the code of an action; None if it has none.

    >>> decoded(code_of(Action(2, Op.SEND_B, 5, peer=0)))
    2SEND_B5->0
    >>> code_of(Action(-1, Op.FORWARD, 0)) is None
    True
    """
    if action is None:
        return _BUBBLE
    stage, op, number, peer, parts = action
    count, end = -1 if number is None else number, -1 if peer is None else peer
    if parts or op not in OP_NUMBERS or not 0 <= stage < MOST_STAGES:
        return None
    if (number is not None and not 0 <= number < MOST_NUMBERS) or (peer is not None and not 0 <= peer < MOST_STAGES):
        return None
    return (OP_NUMBERS[op] << OP_SHIFT) + (stage << STAGE_SHIFT) + ((end + 1) << NUMBER_BITS) + count + 1


def decoded(code: int | None) -> Action | None:
    """Return the action of a code."""
    if code is None or code < 0:
        return None
    number, peer = code & _NUMBER, code >> NUMBER_BITS & _STAGE
    stage, op = code >> STAGE_SHIFT & _STAGE, _CODED_OPS[code >> OP_SHIFT]
    return Action(stage, op, number - 1 if number else None, peer - 1 if peer else None)


class CodedRow(Sequence[Action | None]):
    """The actions of a rank, kept as codes; reads and compares like the tuple of its actions.

    >>> row = CodedRow(range(first_code(2, Op.FORWARD), first_code(2, Op.FORWARD) + 3))
    >>> row
    (2F0, 2F1, 2F2)
    >>> row[1:] == (Action(2, Op.FORWARD, 1), Action(2, Op.FORWARD, 2))
    True
    """

    def __init__(self, codes: Iterable[int]) -> None:
        self.codes = codes if isinstance(codes, array) else array("q", codes)

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, slot: int) -> Action | None: ...
    @overload
    def __getitem__(self, slot: slice) -> tuple[Action | None, ...]: ...
    def __getitem__(self, slot: int | slice) -> Action | None | tuple[Action | None, ...]:
        if isinstance(slot, slice):
            return tuple(CodedRow(self.codes[slot]))
        return decoded(self.codes[slot])

    def __iter__(self) -> Iterator[Action | None]:
        new, kinds = tuple.__new__, self._kinds
        for code in self.codes:
            if code < 0:
                yield None
                continue
            kind = code >> NUMBER_BITS
            if kind not in kinds:
                stage, op, _, peer, _ = decoded(code) or Action(0, Op.FORWARD)
                kinds[kind] = stage, op, peer
            stage, op, peer = kinds[kind]
            number = code & _NUMBER
            yield new(Action, (stage, op, number - 1 if number else None, peer, ()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, CodedRow):
            return self.codes == other.codes
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[type[CodedRow], tuple[array[int]]]:
        return CodedRow, (self.codes,)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of action in the row."""
        few = len(self.codes) < _FEW
        numbers = {code >> OP_SHIFT for code in self.codes} if few else _op_numbers(self.codes)
        return frozenset(_CODED_OPS[number] for number in numbers if number >= 0)

    @cached_property
    def _kinds(self) -> dict[int, tuple[int, Op, int | None]]:
        return {}


_FEW = 4096  # codes below which it is quicker without numpy


def _op_numbers(codes: array[int]) -> set[int]:
    import numpy as np

    counts = np.bincount((np.frombuffer(codes, dtype=np.int64) >> OP_SHIFT) + 1)  # from 0: bubbles, then the ops
    return set((np.flatnonzero(counts) - 1).tolist())
