"""Actions as whole numbers, and rows of them: a plan of millions of actions in eight bytes for each.

A code has, from the highest bit, the op, the stage, the peer and the number of the microbatch (or tie); the latter two
count from 1, and 0 is none. So the passes of a stage have codes that follow each other. A bubble is -1. What has no
code, an overlap or a number out of range, is kept in plain rows of actions.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

from .action import Action, Op

_OPS = tuple(op for op in Op if op is not Op.OVERLAP_F_B)
OP_NUMBERS: dict[Op, int] = {op: number for number, op in enumerate(_OPS)}
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
    stage, op = code >> STAGE_SHIFT & _STAGE, _OPS[code >> OP_SHIFT]
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
        return frozenset(_OPS[number] for number in numbers if number >= 0)

    @cached_property
    def _kinds(self) -> dict[int, tuple[int, Op, int | None]]:
        return {}


_FEW = 4096  # codes below which it is quicker without numpy


def _op_numbers(codes: array[int]) -> set[int]:
    import numpy as np

    counts = np.bincount((np.frombuffer(codes, dtype=np.int64) >> OP_SHIFT) + 1)  # from 0: bubbles, then the ops
    return set((np.flatnonzero(counts) - 1).tolist())
