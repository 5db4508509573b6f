"""Report a failure to all ranks, so that none waits forever.

The rank that fails writes what happened into the store of its process group, and closes its connections. Whoever waits
for it, or comes to, gets an error at once, reads the store, and does the same. A rank that waits in vain asks what the
others do: those that wait too are woken by the closed connections, and write down in which call they are.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ClosedGroupError, LostConnectionError, StageMetadataError, StepError, StepMetadataError
from ..schedule import Action, Op
from ..text import numbered
from ..torch_internals import LOST_CONNECTION, abort_connections, group_timeout

# Factor on every limit that only guards against hanging, for machines that are slow or busy.
PATIENCE = float(os.environ.get("PIPECUT_PATIENCE", "1"))
_REPORT_WAIT = 2.0 * PATIENCE  # seconds for the first failure to be written down, once a connection has broken
_ANSWER_WAIT = 1.0 * PATIENCE  # seconds for others to write down in which call they are
_STORE_LIMIT = 20.0 * PATIENCE  # seconds for all of that: the process that holds the store may be the one that hangs
_POLL = 0.05
ANY_RANK, ANY_PARTNER = -1, -2  # of a pipeline, and of a stage: a collective does not say which rank it waits for
BEGIN, END = "before its first action", "after its last action"
_ANEW = (
    "torch.distributed.destroy_process_group(), then init_process_group() with a new store or port, new stages and a "
    "new schedule, on every rank; or start the processes again"
)


def step_error(text: str, cause: BaseException) -> StepError:
    """Make the error to raise for a step that failed here or elsewhere; a StageMetadataError stays one."""
    kind = StepMetadataError if isinstance(cause, StageMetadataError) else StepError
    return kind(f"the step failed: {text}")


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

    def in_words(self, name_of: Callable[[int], str], waiting: str = "") -> str:
        """Return the failure in words, with names for ranks; `waiting` is what is known of those that wait."""
        rank = name_of(self.rank)
        if self.lost is None:
            return f"{rank} failed {self.where}: {self.error}"
        other = name_of(self.lost)
        if self.waited:
            return f"{rank} timed out waiting for {other} {self.where}{waiting}"
        return (
            f"{rank} lost its connection to {other} {self.where}: the process of {other} has ended or was killed; see "
            "that process's output"
        )


def _plain_name(rank: int) -> str:
    return {ANY_RANK: "another rank", ANY_PARTNER: "another rank of its stage"}.get(rank, f"rank {rank}")


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


class _Incarnations:
    """Numbers of process groups among those of the same name and ranks: one made anew may have the last one's store."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[weakref.ref[dist.ProcessGroup], int]] = {}

    def of(self, group: dist.ProcessGroup) -> int:
        key = (group.group_name, *dist.get_process_group_ranks(group))
        seen, number = self._seen.get(key, (lambda: None, 0))
        if seen() is not group:
            number += 1
            self._seen[key] = (weakref.ref(group), number)
        return number


incarnations = _Incarnations()
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()  # and the failure of each


class FailureReports:
    """Reports of failures between the ranks of a process group and, over `partners`, those of other pipelines.

    `partners` are groups of ranks that hold copies or parts of the same stages. Those in `used` may be waited in too,
    and are closed as well; of them it is not known who takes part in a step.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        partners: Iterable[dist.ProcessGroup] = (),
        timeout: timedelta = timedelta.max,
        used: Iterable[dist.ProcessGroup] = (),
    ) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None  # torch.distributed is initialised
        self.groups: list[dist.ProcessGroup] = [world, *partners]
        known = {each.group_name for each in self.groups}
        self._closable = [*self.groups, *(each for each in used if each.group_name not in known)]
        self.device = device
        self.call = ""  # the one that is running
        self.shut_down: Callable[[], None] = lambda: None  # wakes ranks that wait for others past the process group
        self.timeout = min(timeout, *(group_timeout(each, device) for each in self.groups))
        self._keys = [f"pipecut/failure/{incarnations.of(group)}" for group in self._closable]
        self._stores = [group.get_group_store() for group in self._closable]
        self.rank = dist.get_rank(world)
        failed = self._read()
        if failed is not None:
            for each in self._closable:
                _closed.setdefault(each, str(failed))
        self.check_open()

    @property
    def has_partners(self) -> bool:
        """True if a computation may wait for ranks of other pipelines."""
        return len(self._closable) > 1

    def check_open(self) -> None:
        """Raise if the connections of a group were closed by a failure, or the group has been destroyed."""
        for group in self._closable:
            if group in _closed:
                raise ClosedGroupError(
                    "the connections of this process group were closed when a step failed, so that no rank waits for "
                    f"another ({_closed[group]}). Make the group anew: {_ANEW}"
                )
            try:
                dist.get_backend(group)
            except (ValueError, RuntimeError) as error:
                raise ClosedGroupError(f"the process group of this schedule has been destroyed: {_ANEW}") from error

    def check_reported(self) -> None:
        """Raise if another rank has reported a failure."""
        failed = self._read()
        if failed is not None:
            raise StepError(str(failed))

    def raise_on_all(self, failure: Failure, cause: BaseException, note: str = "") -> StepError:
        """Report to the others, and return the error to raise here: the first failure of all, whoever had it."""
        first = _within(_STORE_LIMIT, lambda: self._first_of(failure), replace(failure, text=self._words(failure)))
        for group in self._closable:
            self._close_connections(group)
            _closed.setdefault(group, str(first))
        return step_error(f"{first}{note}", cause)

    def write_outcome(self, call: str, failure: Failure) -> None:
        """Write a failure after the last action, which closes no connection, for `read_outcome` on all ranks."""
        self._spread(call, self._words(failure))

    def read_outcome(self, call: str) -> str:
        """Return the failure of a call after the last action of some rank, and let those read it whom it is new to."""
        for key, store in zip(self._keys, self._stores, strict=True):
            if store.check([f"{key}/{call}"]):
                text = str(store.get(f"{key}/{call}").decode())
                self._spread(call, text)
                return text
        return "a copy of this pipeline failed after its last action; see the output of its ranks"

    def _spread(self, call: str, text: str) -> None:
        for key, store in zip(self._keys, self._stores, strict=True):
            store.compare_set(f"{key}/{call}", "", text)

    def _words(self, failure: Failure, known: str = "the process group's store does not answer") -> str:
        # In words from here on: another pipeline numbers its ranks in its own way.
        waiting = (
            f" for {self.timeout.total_seconds():g} s: {known}. A rank that does not answer is busy for longer, was "
            "stopped, or did not call step() or eval() as the others did. If it may take longer, pass a larger "
            "timeout= to the schedule, and to init_process_group() where that of the group is shorter"
        )
        return failure.in_words(self._name, waiting)

    def _name(self, rank: int) -> str:
        """Return the name of a rank of the pipeline as the user knows it."""
        if rank < 0:
            others = {each for group in self._closable[1:] for each in dist.get_process_group_ranks(group)}
            those = numbered("rank", sorted(others - {dist.get_rank()}))
            return _plain_name(rank) + (f" ({those})" if rank == ANY_PARTNER else "")
        everywhere = dist.get_global_rank(self.groups[0], rank)
        return f"rank {rank}" if everywhere == rank else f"rank {everywhere} (rank {rank} of its pipeline)"

    def _first_of(self, failure: Failure) -> Failure:
        self._answer()
        first, lost, known = self._read(), failure.lost, ""
        if first is None and lost is not None:
            self._close_connections(self.groups[0])  # wakes those that wait too
            if failure.waited:
                known = self._calls_of_all()
            else:
                first = self._wait_for_report(lost)
            failure = replace(failure, lost=self._culprit(lost))
        self._write(first or replace(failure, text=self._words(failure, known)))
        return self._read() or failure

    def _wait_for_report(self, lost: int) -> Failure | None:
        """Wait for the first failure to be written down; longer by a rank that lives, or by one that knows more."""
        start = time.monotonic()
        while (first := self._read()) is None:
            longer = lost < 0 or self._has_answered(lost)
            if time.monotonic() - start > _REPORT_WAIT * (2 if longer else 1):
                break
            time.sleep(_POLL)
        return first

    def _culprit(self, lost: int) -> int:
        """Return the rank that was waited for, or lost: if a collective does not say, the only one that is silent."""
        silent = [rank for rank in range(dist.get_world_size(self.groups[0])) if not self._has_answered(rank)]
        return silent[0] if lost == ANY_RANK and len(silent) == 1 else lost

    def _answer(self) -> None:
        self._stores[0].set(self._answer_key(self.rank), self.call or "no call")

    def _has_answered(self, rank: int) -> bool:
        return bool(self._stores[0].check([self._answer_key(rank)]))

    def _answer_key(self, rank: int) -> str:
        return f"{self._keys[0]}/call of rank {rank}"

    def _calls_of_all(self) -> str:
        """Return in words in which calls the ranks of the pipeline are, as far as they answer."""
        silent = list(range(dist.get_world_size(self.groups[0])))
        answers: dict[int, str] = {}
        end = time.monotonic() + _ANSWER_WAIT
        while silent and time.monotonic() < end:
            for rank in filter(self._has_answered, list(silent)):
                answers[rank] = self._stores[0].get(self._answer_key(rank)).decode()
                silent.remove(rank)
            time.sleep(_POLL if silent else 0)
        known = [f"{self._name(rank)} is in {answers[rank]}" for rank in sorted(answers)]
        return "; ".join([*known, *(f"{self._name(rank)} does not answer" for rank in silent)])

    def _write(self, failure: Failure) -> None:
        for key, store in zip(self._keys, self._stores, strict=True):
            store.compare_set(key, "", json.dumps(asdict(failure)))

    def _read(self) -> Failure | None:
        for key, store in zip(self._keys, self._stores, strict=True):
            if store.check([key]):
                return Failure(**json.loads(store.get(key)))
        return None

    def _close_connections(self, group: dist.ProcessGroup) -> None:
        """Break what others may wait for. gloo closes a connection on which a receive has timed out."""
        if group is self.groups[0]:
            self.shut_down()
        kinds = backends(group)
        if kinds.get(self.device.type, "gloo") != "gloo":
            abort_connections(group, self.device)
        if "gloo" not in kinds.values():
            return
        for peer in set(range(dist.get_world_size(group))) - {dist.get_rank(group)}:
            try:
                work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=1)
                assert work is not None  # this rank is in the group
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # that is what was wanted


class Watchdog:
    """Thread that reports an action of a stage with partners that takes too long.

    In it they wait for each other, in collectives of DistributedDataParallel, fully_shard and DTensors, which take no
    timeout but the group's. The report closes the connections, which ends the wait.
    """

    def __init__(self, reports: FailureReports, running: Callable[[], Action | None]) -> None:
        self._reports = reports
        self._running = running
        self._seconds = reports.timeout.total_seconds()
        self._done = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="pipecut watchdog", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        last, since = None, time.monotonic()
        while not self._done.wait(min(1.0, self._seconds / 4)):
            action = self._running()
            if action is not last:
                last, since = action, time.monotonic()
            elif action is not None and time.monotonic() - since > self._seconds:
                error = LostConnectionError(ANY_PARTNER, TimeoutError("timed out"))
                failure = describe(self._reports.rank, action, None, error)
                self._reports.raise_on_all(replace(failure, where=f"{failure.where}, or computing there,"), error)
                return


def _within(seconds: float, ask: Callable[[], Failure], otherwise: Failure) -> Failure:
    """Return what the store says, unless the process that holds it has ended, or does not answer in time."""
    found = [otherwise]

    def run() -> None:
        try:
            found[0] = ask()
        except (RuntimeError, OSError):  # the store is gone
            return

    thread = threading.Thread(target=run, name="pipecut failure report", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backends of a group by the type of device that each is for."""
    return dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))


# An error of a transfer has no words of the user in it: whatever is said of a connection counts.
_CONNECTION_WORDS = (*LOST_CONNECTION, "onnection", "Socket")


def is_about_connection(error: BaseException) -> bool:
    """Return True if an error of torch.distributed comes from a lost connection."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CONNECTION_WORDS)
