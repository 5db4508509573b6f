"""What one rank tells all others at the start of a call: which call it is, of which schedule, and some numbers."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import PipeError
from .transport import Transport

EVAL, STEP, MEAN_LOSS = range(3)
CALLS = {EVAL: "eval()", STEP: "step()", MEAN_LOSS: "mean_loss()"}
SIZE = 256  # numbers that a call shares, or a multiple of it


def share(
    transports: Sequence[Transport], schedule: int, kind: int, source: int, numbers: list[int] | None, count: int
) -> list[int]:
    """Numbers of one rank on all, in a message of one size for all calls, so that calls that differ are seen."""
    size = SIZE * ((3 + count + SIZE - 1) // SIZE)
    if numbers is not None:
        numbers = [kind, schedule, len(numbers), *numbers] + [0] * (size - 3 - len(numbers))
    shared = [transport.share(source, numbers, size) for transport in transports][-1]
    if shared[:2] != [kind, schedule]:
        raise PipeError(
            f"rank {source} called {CALLS.get(shared[0], 'something else')} of schedule {shared[1]}, and this rank "
            f"{CALLS[kind]} of schedule {schedule}: make the same calls in the same order on every rank"
        )
    return shared[3 : 3 + shared[2]]
