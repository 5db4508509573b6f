"""RankPool: local processes in one group that take calls one after the other, and never outlive their pool."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from ..errors import LaunchError
from ..run import PATIENCE
from ..text import numbered
from .rank import (
    END,
    GROUP_TIMEOUT,
    INTERRUPTED,
    SHOW_STACK,
    Call,
    Outcome,
    RankSettings,
    SharedFiles,
    changed_environment,
    run_rank,
    starting_environment,
)

_REPORT_GUARD = 15.0 * PATIENCE  # seconds for the rank at fault to report, once others have lost their connection to it
_CLOSE_GUARD = 300.0 * PATIENCE  # seconds for idle ranks to end
_GRACE = 2.0 * PATIENCE  # seconds between terminating a rank and killing it

_T = TypeVar("_T")


class RankPool:
    """Local ranks that join one process group, and run calls until the pool is closed.

    The ranks start with the first call, and stay for the next. After a call that failed they are replaced: the next
    call has new ones, in a new group. Process groups that a call makes end with it. No process outlives the pool, nor
    the process that made it.

    `start_method` is one of multiprocessing's. By default ranks are new processes ("spawn") if these can import the
    function, and otherwise forks of this one ("fork"), made anew for each such call. `group_timeout` is the timeout of
    the process group, in seconds. `env` is added to the environment of the ranks; the other options are those of
    `launch()`, which is a pool used once.

    >>> import torch.distributed as dist
    >>> with RankPool(2) as pool:
    ...     pool.run(lambda: dist.get_rank() + 1)
    [1, 2]
    """

    def __init__(
        self,
        ranks: int,
        *,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        start_method: str | None = None,
        group_timeout: float = GROUP_TIMEOUT,
    ) -> None:
        self.ranks = ranks
        self.backend = backend
        self.env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(env or {})}
        self.start_method = start_method
        self.group_timeout = group_timeout
        self._processes: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        self._calls = 0
        self._needs_new_group = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # A pool that nobody closed ends with this process, before multiprocessing waits for its children.
        util.Finalize(self, _stop, args=(self._processes,), exitpriority=10)

    def run(self, function: Callable[..., _T], *args: Any, timeout: float | None = None) -> list[_T]:
        """Call `function(*args)` on every rank, and return the values in rank order.

        The first failure of a rank raises LaunchError, with that rank and its traceback; so does the timeout.
        """
        call = self._start_call(function, args, timeout)
        with self._stopping_on_error():
            call.collect(stop_at_failure=True)
            if any(outcome.failed for outcome in call.outcomes.values()):
                _stop(self._processes)
                raise call.first_failure()
            return [outcome.value for outcome in self._finish(call)]

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Outcome]:
        """Call `function(*args)` on every rank, and return what became of it on each, failures too."""
        call = self._start_call(function, args, timeout)
        with self._stopping_on_error():
            call.collect(stop_at_failure=False)
            return self._finish(call)

    def close(self, timeout: float | None = _CLOSE_GUARD) -> None:
        """Let idle ranks end by themselves, and stop those that do not within the timeout."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(END)
        end = None if timeout is None else time.monotonic() + timeout
        for process in self._processes:
            process.join(None if end is None else max(0.0, end - time.monotonic()))
        self.stop()

    def stop(self) -> None:
        """Stop all ranks, whatever they do."""
        _stop(self._processes)
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()  # the list itself stays: its end is in the hands of the finalizer
        self._pipes = []
        self._needs_new_group = False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.stop()

    @contextlib.contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _finish(self, call: _RunningCall) -> list[Outcome]:
        outcomes = [call.outcomes[rank] for rank in range(self.ranks)]
        if any(outcome.failed for outcome in outcomes):
            self.stop()  # messages of the call may still be in transit: its group is of no use any more
        else:
            call.files.remove(call.number)
            self._needs_new_group = any(outcome.made_groups for outcome in outcomes)
        return outcomes

    def _start_call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float | None) -> _RunningCall:
        """Write the call for the ranks and notify them, after starting them if needed."""
        self._calls += 1
        call = (function, args)
        with self._stopping_on_error():
            obstacle = self._write_call(call)
            if obstacle is not None:
                _check_fork(name_of(function), obstacle)
                self.stop()
            if not self._processes:
                self._start(None if obstacle is None else call)
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # it has ended, which is found when its outcome is awaited
                    pipe.send(-self._calls if self._needs_new_group else self._calls)
        return _RunningCall(self._processes, self._pipes, self._files(), self._calls, name_of(function), timeout)

    def _files(self) -> SharedFiles:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="pipecut-", ignore_cleanup_errors=True)
        return SharedFiles(self._folder.name)

    def _write_call(self, call: Call) -> str | None:
        """Write the call for the ranks; return the reason why a new process could not run it, if there is one."""
        files = self._files()
        try:
            files.write_call(self._calls, call)
        except Exception as error:
            return f"it, or one of its arguments, cannot be sent to a new process ({error})"
        if files.call_mentions(self._calls, "__main__") and not _has_file(sys.modules["__main__"]):
            return "a new process cannot import what was defined in a notebook or at a prompt"
        return None

    def _start(self, first: Call | None) -> None:
        """Start the ranks: forks, which have the first call in memory, if it is given."""
        method = "fork" if first is not None else self.start_method or "spawn"
        context: Any = multiprocessing.get_context(method)
        files = self._files()
        for rank in range(self.ranks):
            mine, theirs = context.Pipe()
            self._pipes.append(mine)
            settings = RankSettings(
                rank,
                self.ranks,
                files,
                self.backend,
                self.group_timeout,
                self.env,
                forked=method != "spawn",
                inherits_groups=method == "fork",
            )
            process = context.Process(target=run_rank, args=(settings, theirs, first), name=f"rank {rank}")
            with changed_environment(starting_environment(settings)):
                process.start()
            self._processes.append(process)
            theirs.close()


class _RunningCall:
    """A call that runs on the ranks, and the outcomes so far."""

    def __init__(
        self,
        processes: list[BaseProcess],
        pipes: list[connection.Connection],
        files: SharedFiles,
        number: int,
        name: str,
        timeout: float | None,
    ) -> None:
        self.processes = list(processes)
        self.pipes = list(pipes)
        self.files = files
        self.number = number
        self.name = name
        self.timeout = timeout
        self.outcomes: dict[int, Outcome] = {}
        self._late: list[int] = []
        self._start = time.monotonic()

    def collect(self, stop_at_failure: bool) -> None:
        """Wait until every rank is done, or the timeout has passed, or a failure has been found."""
        end = None if self.timeout is None else self._start + self.timeout
        report_end: float | None = None
        while len(self.outcomes) < len(self.processes):
            moments = [moment for moment in (end, report_end) if moment is not None]
            news = self._receive(min(moments) - time.monotonic() if moments else None)
            failures = [outcome for outcome in self.outcomes.values() if outcome.failed]
            if stop_at_failure and any(not failure.lost_connection for failure in failures):
                return
            if stop_at_failure and failures and report_end is None:
                report_end = time.monotonic() + _REPORT_GUARD
            if not news and report_end is not None and time.monotonic() >= report_end:
                return
            if not news and end is not None and time.monotonic() >= end:
                self._give_up()

    def first_failure(self) -> LaunchError:
        """Return the error of the rank in which the failure began, after all ranks were stopped."""
        if self._late:
            return self._timeout_error()
        for rank in range(len(self.processes)):  # it may have reported before it was stopped
            if rank not in self.outcomes and self.files.has_outcome(self.number, rank):
                self.outcomes[rank] = self._outcome(rank)
        failures = [outcome for outcome in self.outcomes.values() if outcome.failed]
        first = min(failures, key=lambda outcome: (outcome.lost_connection, outcome.time))
        details = f"\n\nOn rank {first.rank}:\n{first.traceback}" if first.traceback else ""
        return LaunchError(f"rank {first.rank} failed: {first.summary}{details}", first.rank, first.traceback)

    def _receive(self, seconds: float | None) -> bool:
        """Collect the outcomes of ranks that are done; False if there is none after so many seconds."""
        waiting = [rank for rank in range(len(self.processes)) if rank not in self.outcomes]
        sources: dict[Any, int] = {self.pipes[rank]: rank for rank in waiting}
        sources |= {self.processes[rank].sentinel: rank for rank in waiting}
        ready = connection.wait(list(sources), None if seconds is None else max(0.0, seconds))
        for rank in sorted({sources[source] for source in ready}):
            self.outcomes[rank] = self._outcome(rank)
        return bool(ready)

    def _outcome(self, rank: int) -> Outcome:
        if self.files.has_outcome(self.number, rank):
            with contextlib.suppress(EOFError, OSError):
                if self.pipes[rank].poll():
                    self.pipes[rank].recv()
            try:
                return self.files.read_outcome(self.number, rank)
            except Exception as error:
                text = f"its result cannot be read here ({error}): return tensors and plain values"
                return Outcome.of_death(rank, text, self._seconds())
        self.processes[rank].join()
        return Outcome.of_death(rank, self._end_of(rank), self._seconds())

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _end_of(self, rank: int) -> str:
        code = self.processes[rank].exitcode or 0
        if code < 0:
            name = {each.value: each.name for each in signal.Signals}.get(-code, f"signal {-code}")
            reason = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
            return f"it was killed by {name} before {self.name} returned{reason}"
        if code == INTERRUPTED:
            return f"it was interrupted before {self.name} returned"
        return (
            f"it ended with exit code {code} before {self.name} returned; its own output says why. (A new rank "
            'imports the script that calls launch(). What is to run once belongs below `if __name__ == "__main__":`)'
        )

    def _give_up(self) -> None:
        """Record the stack of every rank that has not returned in time."""
        late = [rank for rank in range(len(self.processes)) if rank not in self.outcomes]
        for rank in late:
            pid = self.processes[rank].pid
            assert pid is not None  # it was started, and is waited for: the number is still its own
            os.kill(pid, SHOW_STACK)
        end = time.monotonic() + _GRACE
        while time.monotonic() < end and any(not self.files.stack(rank) for rank in late):
            time.sleep(0.05)
        for rank in late:
            stack = self.files.stack(rank) or "  (it had not begun, or does not answer)"
            died = f"did not return within {self.timeout:g} s"
            self.outcomes[rank] = Outcome.of_death(rank, died, self._seconds(), stack)
        self._late = late

    def _timeout_error(self) -> LaunchError:
        who = numbered("rank", self._late)
        lines = [
            f"{self.name} had not returned on {who} after {self.timeout:g} s, and all ranks were stopped. They were in:"
        ]
        lines += [f"rank {rank}:\n{self.outcomes[rank].traceback}" for rank in self._late]
        return LaunchError("\n".join(lines), self._late[0], self.outcomes[self._late[0]].traceback)


def name_of(function: object) -> str:
    """Return a function's name for messages; a partial is called by the function that it wraps."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else name_of(getattr(function, "func", type(function)))


def _stop(processes: Iterable[BaseProcess]) -> None:
    """Terminate the remaining processes, then kill them."""
    started = list(processes)
    try:
        for process in started:
            process.terminate()
        end = time.monotonic() + _GRACE
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            process.kill()
            process.join()


def _check_fork(name: str, obstacle: str) -> None:
    """Raise LaunchError if this process cannot be forked."""
    fork_obstacle = None
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        fork_obstacle = "this system does not allow it"
    elif _used_accelerator():
        fork_obstacle = f"{_used_accelerator()} is in use here already"
    if fork_obstacle is not None:
        raise LaunchError(
            f"launch() cannot start {name}: {obstacle}; and this process cannot be forked, for {fork_obstacle}. "
            f"Put {name} at the top level of a module, and import it from there"
        )


def _has_file(main: Any) -> bool:
    """Return True if the main module is a script or a module, which ranks can import."""
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _used_accelerator() -> str | None:
    """Return the kind of device that this process has begun to use."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return device.type
