"""Report a failure to all ranks, so that none waits forever.

The rank that fails writes what happened into the store of its process group, and closes its connections. Whoever waits
for it, or comes to, gets an error at once, reads the store, and does the same.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from ..errors import LostConnectionError, StageMetadataError, StepError, StepMetadataError
from ..schedule import Action, Op
from ..torch_internals import LOST_CONNECTION, abort_connections

_KEY = "pipecut/failure"
# Factor on every limit that only guards against hanging, for machines that are slow or busy.
PATIENCE = float(os.environ.get("PIPECUT_PATIENCE", "1"))
_REPORT_WAIT = 2.0 * PATIENCE  # seconds for the first failure to be written down, once a connection has broken
BEGIN, END = "before its first action", "after its last action"


def step_error(text: str, cause: Exception) -> StepError:
    """Make the error to raise for a step that failed here or elsewhere; a StageMetadataError stays one."""
    kind = StepMetadataError if isinstance(cause, StageMetadataError) else StepError
    return kind(f"the step failed: {text}")


class _StoreIsGoneError(Exception):
    """The process that holds the store has ended."""


@dataclass(frozen=True)
class Failure:
    """The place where a step failed first, and its error."""

    rank: int
    where: str
    error: str
    lost: int | None = None  # the rank to which the connection broke, if that is all that is known
    waited: bool = False  # until the timeout
    text: str = ""  # all of it in words

    def __str__(self) -> str:
        return self.text or self.in_words(_plain_name)

    def in_words(self, name_of: Callable[[int], str]) -> str:
        """Return the failure in words, with names for ranks."""
        rank = name_of(self.rank)
        if self.lost is None:
            return f"{rank} failed {self.where}: {self.error}"
        other = "another rank" if self.lost < 0 else name_of(self.lost)
        if self.waited:
            return (
                f"{rank} timed out waiting for {other} {self.where}: that one is busy for longer than the "
                "process group's timeout, or did not call step(), eval() or mean_loss() as this rank did"
            )
        return (
            f"{rank} lost its connection to {other} {self.where}: the process of {other} has ended or was killed; see "
            "that process's output"
        )


def _plain_name(rank: int) -> str:
    return f"rank {rank}"


def describe(
    rank: int, action: Action | None, module: nn.Module | None, error: BaseException, where: str = BEGIN
) -> Failure:
    """Describe an error on this rank for the others."""
    if action is not None:
        where = f"in {action} (stage {action.stage}"
        number = "tie" if action.op is Op.REDUCE_TIES else "microbatch"
        where += ")" if action.microbatch is None else f", {number} {action.microbatch})"
        path = "" if module is None else _module_path(module, error.__traceback__)
        where += f", in module '{path}'" if path else ""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, LostConnectionError):
        return Failure(rank, where, text, error.peer, error.waited)
    return Failure(rank, where, text)


def _module_path(root: nn.Module, trace: TracebackType | None) -> str:
    """Return the path of the innermost module of a stage whose forward was running."""
    paths = {id(module): path for path, module in root.named_modules()}
    found = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = paths.get(id(owner), found)
        trace = trace.tb_next
    return found


class FailureReports:
    """Reports of failures between the ranks of a process group and, over `copies`, those of other pipelines."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, copies: Iterable[dist.ProcessGroup] = ()
    ) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None  # torch.distributed is initialised
        self.groups: list[dist.ProcessGroup] = [world, *copies]
        self.device = device
        self.stores = [group.get_group_store() for group in self.groups]

    def raise_on_all(self, failure: Failure, cause: Exception) -> StepError:
        """Report to the others, and return the error to raise here: the first failure of all, whoever had it."""
        # In words from here on: another pipeline numbers its ranks in its own way.
        failure = replace(failure, text=failure.in_words(self._name))
        try:
            first = self._first_of(failure)
        except _StoreIsGoneError:
            first = failure
        for group in self.groups:
            self._close_connections(group)
        return step_error(str(first), cause)

    def _name(self, rank: int) -> str:
        """Return the name of a rank of the pipeline as the user knows it."""
        everywhere = dist.get_global_rank(self.groups[0], rank)
        return f"rank {rank}" if everywhere == rank else f"rank {everywhere} (rank {rank} of its pipeline)"

    def _first_of(self, failure: Failure) -> Failure:
        end = time.monotonic() + (_REPORT_WAIT if failure.lost is not None else 0)
        while (first := self._read()) is None and time.monotonic() < end:
            time.sleep(0.05)
        self._write(failure if first is None else first)
        return self._read() or failure

    def _write(self, failure: Failure) -> None:
        try:
            for store in self.stores:
                store.compare_set(_KEY, "", json.dumps(asdict(failure)))
        except (RuntimeError, OSError) as error:
            raise _StoreIsGoneError from error

    def _read(self) -> Failure | None:
        try:
            written = [store for store in self.stores if store.check([_KEY])]
            return Failure(**json.loads(written[0].get(_KEY))) if written else None
        except (RuntimeError, OSError) as error:
            raise _StoreIsGoneError from error

    def _close_connections(self, group: dist.ProcessGroup) -> None:
        """Break what others may wait for. gloo closes a connection on which a receive has timed out."""
        if dist.get_backend(group) != "gloo":
            abort_connections(group, self.device)
            return
        for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
            try:
                work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=1)
                assert work is not None  # this rank is in the group
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # that is what was wanted


# An error of a transfer has no words of the user in it: whatever is said of a connection counts.
_CONNECTION_WORDS = (*LOST_CONNECTION, "onnection", "Socket")


def is_about_connection(error: BaseException) -> bool:
    """Return True if an error of torch.distributed comes from a lost connection."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONNECTION_WORDS)
