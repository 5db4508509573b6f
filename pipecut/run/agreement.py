"""Calls between steps in which all ranks take part: sums over ranks and exchanges of facts, or an error on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from ..errors import LostConnectionError
from ..schedule import Plan
from .connection import CALLS, Connection
from .failure import ANY_PARTNER
from .transport import connection_to, wait_for

_T = TypeVar("_T")


class Agreement:
    """Calls of all ranks of a schedule, for functions around the step. They wait no longer than its timeout.

    A rank that is in another call, or makes one more, is an error on every rank, as it is for steps.
    """

    def __init__(self, connection: Connection, source: int, handshake: Callable[[], None]) -> None:
        self._connection = connection
        self._source = source  # the rank that begins steps too
        self._handshake = handshake

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the pipeline that are in this process."""
        return self._connection.ranks

    def reporting(self, where: str) -> AbstractContextManager[None]:
        """Return a context in which an exception of this rank ends the step or call in which other ranks wait for it.

        `where` follows "rank 0 failed" in their error.
        """
        return self._connection.reporting(where)

    @property
    def timeout(self) -> timedelta:
        """The time that a rank waits for others."""
        return self._connection.timeout

    def sum(
        self,
        call: int,
        count: int,
        prepare: Callable[[], _T],
        finish: Callable[[_T], Sequence[float]],
        alike: Callable[[_T], int | None] = lambda prepared: 0,
    ) -> list[float]:
        """Return the sums over all ranks of `count` numbers that each of them makes.

        They are means over copies of a stage. `prepare` is what this rank does alone. If it raises on one rank, this
        raises StepError on all, and the next call is possible. `finish` makes the numbers of what was prepared, and may
        reduce tensors together with the ranks that hold parts of the same stages: it is called if none of those has
        failed, and what was prepared has the same number by `alike` on each. If that is None on one of them, only such
        ranks finish, which then reduce nothing.
        """
        with self._calling(call) as where:
            made: Sequence[float] = [0.0] * count
            prepared, error = _attempt(prepare)
            number = 0 if error is not None or prepared is None else alike(prepared)
            error, together = self._connection.agree_with_partners(error, number)
            if prepared is not None and error is None and (together or number is None):
                finished, error = _attempt(lambda: finish(prepared))
                made = made if finished is None else finished
            try:
                return list(self._connection.agree(error, made, where))
            finally:
                del error  # whose traceback has this frame: they would keep each other, and the schedule

    def exchange(self, call: int, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the facts of every rank of the pipeline, in their order."""
        with self._calling(call) as where:
            self._connection.agree(None, (), where)  # all are here: nothing wakes a rank that waits for the store
            return [dict(facts)] if self._connection.in_process else self._connection.exchange(facts)

    def reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor over another group, such as that of the shards of a stage, within `numbers` of a sum."""
        with connection_to(ANY_PARTNER):
            wait_for(dist.all_reduce(tensor, op, group, async_op=True), self._connection.timeout)

    @contextmanager
    def _calling(self, call: int) -> Iterator[str]:
        connection, where = self._connection, f"in {CALLS[call]}"
        connection.begin_call(call)
        try:
            with connection.reporting(where):
                if not connection.is_ready:
                    self._handshake()
                connection.share(call, self._source, [] if self._source in connection.ranks else None)
                yield where
        finally:
            connection.end_call()


def _attempt(function: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return the value of a function, or the error that it raises."""
    try:
        return function(), None
    except LostConnectionError:
        raise  # which nobody could agree on
    except Exception as error:
        return None, error


class HasAgreement:
    """Base class of schedules: the calls between steps in which all ranks take part."""

    plan: Plan
    _connection: Connection

    @property
    def agreement(self) -> Agreement:
        """Calls between steps in which all ranks take part, for functions such as `pipecut.clip_grad_norm_`."""
        return Agreement(self._connection, self.plan.placement.rank_of[0], self._run_handshake)

    def _run_handshake(self) -> None:
        """Compare with the other ranks what is about to be run."""
        raise NotImplementedError
