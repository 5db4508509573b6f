"""The ranks of a plan that are in this process, one or all of them, and their ways to the others."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import DisagreementError, InputError, PipeError, PipeWarning, StepError
from ..schedule import Op, Plan
from ..stage import PipelineStage, check_not_within_pipeline, is_distributed, is_initialized
from ..torch_internals import is_compiled
from .failure import ANY_PARTNER, ANY_RANK, BEGIN, END, FailureReports, describe, step_error
from .handshake import Exchange, Handshake
from .transport import (
    HostMeeting,
    Selection,
    SharedMemoryTransport,
    TimedTransport,
    Transport,
    TransportOption,
    clock_of,
    connection_to,
    device_of_numbers,
    wait_for,
)

EVAL, STEP, NORM, CLIP, UNSCALE = range(5)
_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.Lock] = weakref.WeakKeyDictionary()


class Connection:
    """The ranks of a plan that are in this process, with their ways to all others.

    The stages have to be those that the plan puts here.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], plan: Plan, timeout: timedelta, transport: TransportOption = None
    ) -> None:
        distributed = _is_distributed(stages, plan)
        self.in_process = len(stages) == plan.stages and not distributed
        _check_stages(stages, plan, in_process=self.in_process, distributed=distributed)
        self.failure_reports: FailureReports | None = None
        self._number = 0  # the ranks count their schedules alike
        self._calls = 0  # of this schedule, which they count alike too
        self._step_number: int | None = None  # of the user's loop, if it is given
        self._agreed: StepError | None = None  # the failure of this call, if all ranks know of it
        self._running = threading.Lock()
        self.timeout = timeout
        group, device = stages[0].group, stages[0].device
        self._group = group
        partners = _distinct(group for stage in stages for group in stage.groups.partners)
        # Of whole pipelines, with batches of their own: tensor-parallel partners share one.
        self.copies = [] if self.in_process else _distinct(one for stage in stages for one in stage.groups.replicas)
        self._sharding = _distinct(one for stage in stages if _is_sharded(stage) for one in stage.groups.partners)
        self._sharing_batches = {group.group_name for stage in stages for group in stage.groups.tensors}
        self.seed = 0  # of the random numbers of this call, which those that share its batch must have too, if
        self.draws = False  # any of them draws some
        pipeline = None
        self._selection = Selection(transport)
        self._on_host: SharedMemoryTransport | None = None
        self._devices = [stage.device for stage in stages]
        self._meeting: HostMeeting | None = None
        self.is_ready = False  # True once the ranks have compared what they do, and found their way to each other
        self.clock = clock_of(device)
        self.transports: Sequence[Transport]
        if self.in_process:
            self.transports = self._selection.in_process(plan.ranks)
        else:
            used = _distinct(group for stage in stages for group in stage.groups.used)
            self.failure_reports = reports = FailureReports(group, device, partners, timeout, used)
            self._running = _locks.setdefault(reports.groups[0], self._running)
            self.timeout = timeout = reports.timeout
            if dist.get_world_size(group) != plan.ranks:
                raise InputError(
                    f"the plan is for {plan.ranks} ranks, and the process group has {dist.get_world_size(group)}"
                )
            pipeline = Exchange(group, timeout, Handshake.late, reports.check_reported)
            self._number = pipeline.number
            self._timed = TimedTransport(self._selection.before_meeting(group, device, timeout), self.clock)
            self.transports = [self._timed]
            self._meeting = HostMeeting(pipeline.rank, pipeline.ranks, pipeline.run, timeout.total_seconds())
            for stage in stages:
                check_not_within_pipeline(stage.groups, stage.stage_index, stage.group)
        self.handshake = Handshake(pipeline, [Exchange(group, timeout, Handshake.late) for group in partners])
        self._check_placement(stages, plan)

    def _check_placement(self, stages: Sequence[PipelineStage], plan: Plan) -> None:
        given = {stage.stage_index for stage in stages}
        wanted = {stage for rank in self.ranks for stage in plan.placement.stages_of[rank]}
        if given != wanted:
            where = "a process without torch.distributed" if self.in_process else f"rank {self.ranks[0]}"
            raise InputError(f"in this plan {where} has stages {sorted(wanted)}, and was given {sorted(given)}")

    @property
    def ranks(self) -> list[int]:
        """The ranks that are here."""
        return [transport.rank for transport in self.transports]

    def make_ready(self) -> None:
        """Take the quickest transport that all ranks can use; all of them call this after their handshake."""
        if self._meeting is not None and self.failure_reports is not None:
            reports = self.failure_reports
            found = self._selection.meet(self._meeting, reports.groups[0], self._devices, self.timeout)
            if found is not None:
                self._timed.use(found)
                self._on_host = found
                reports.shut_down = found.channels.shut_down
            self._meeting = None
        self.is_ready = True

    def begin_call(self, kind: int, step_number: int | None = None) -> None:
        """Begin a step or an evaluation; raise if another is running, or the ranks cannot reach each other.

        `step_number` is that of the user's loop, if it is given, which the ranks compare.
        """
        if not self._running.acquire(blocking=False):
            raise PipeError(
                f"{CALLS[kind]} was called while a step or an evaluation over the same ranks was running: in another "
                "thread, or in a hook or loss_fn of that step. Make one call after the other"
            )
        try:
            if self.failure_reports is not None:
                self.failure_reports.check_open()
                self.failure_reports.call = f"{_Call(kind, self._number, 0)}, its call {self._calls + 1}"
        except BaseException:
            self._running.release()
            raise
        self._calls += 1
        self._step_number = step_number

    def end_call(self) -> None:
        """Let the next call begin."""
        self._agreed = None  # its traceback has all values of the step
        self.seed, self.draws = 0, False
        self._running.release()

    def share(self, kind: int, source: int, numbers: list[int] | None) -> list[int]:
        """Return the numbers of one rank on all; `numbers` is None elsewhere."""
        position = _NO_NUMBER if self._step_number is None else self._step_number
        if not isinstance(position, int):
            raise InputError(
                f"schedule.step_number is {position!r}: set it to the number of the batch, an int, or None"
            )
        return _share(self.transports, _Call(kind, self._number, self._calls, position), source, numbers)

    def exchange(self, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the facts of every rank, in their order; all of them call this at the same time."""
        return Exchange(self._group, self.timeout).run(facts)

    @contextlib.contextmanager
    def reporting(self, where: str = BEGIN, undo: Callable[[], str] = str) -> Iterator[None]:
        """Report what goes wrong before the first action or after the last: others may be waiting.

        `undo` takes back what the call has changed, and returns what to say of it.
        """
        try:
            yield
        except BaseException as error:
            note = undo()
            if isinstance(error, DisagreementError):
                self._calls -= 1  # nothing was run, and the call may be made again, as for a rank that came too early
            raised = self._reported(error, where, note)
            if raised is error:
                raise
            raise raised from error

    def _reported(self, error: BaseException, where: str, note: str) -> BaseException:
        """Return the error to raise. All ranks find out about a disagreement, and a failure at the end, by themselves.

        A KeyboardInterrupt stays one on this rank.
        """
        if self.failure_reports is None or isinstance(error, DisagreementError) or error is self._agreed:
            if not note or not isinstance(error, Exception):
                return error
            return (
                type(error)(f"{error}{note}") if isinstance(error, StepError) else step_error(f"{error}{note}", error)
            )
        raised = self.failure_reports.raise_on_all(describe(self.ranks[0], None, None, error, where), error, note)
        return raised if isinstance(error, Exception) else error

    def agree(self, error: Exception | None, figures: Sequence[float], where: str = END) -> Sequence[float]:
        """Wait until all ranks have come to the end of the call, and raise StepError on all if one of them failed.

        Returns the sums of `figures` over the pipeline, of their means over copies of each stage. The connections stay
        open: what fails here does so after the last message.
        """
        reports = self.failure_reports
        if reports is None:
            try:
                if error is not None:
                    raise error
            finally:
                del error  # its traceback has this frame
            return figures
        call = f"{self._number}.{self._calls}"
        if error is not None:
            reports.write_outcome(call, describe(self.ranks[0], None, None, error, where))
        numbers = [0.0 if error is None else 1.0, *figures]
        # Those that share batches first, who may find that their seeds differ, then copies, then other stages: so that
        # whatever one of them finds out comes to all.
        partners_first = sorted(reports.groups[1:], key=lambda group: group.group_name not in self._sharing_batches)
        for group in (*partners_first, reports.groups[0]):
            own = [numbers[0], float(self.draws), *_spread(self.seed), *numbers[1:]]
            failed, draws, total, squares, *sums = self._added_up(own, group)
            shares = group.group_name in self._sharing_batches
            if shares and draws and _differ(total, squares, group) and not failed:
                error, failed = PipeError(_OTHER_SEEDS), 1.0
                reports.write_outcome(call, describe(self.ranks[0], None, None, error, where))
            told = reports.read_outcome(call) if failed else ""
            partners = 1 if group is reports.groups[0] else group.size()
            numbers = [failed, *(number / partners for number in sums)]
        if told:
            self._agreed = step_error(told, error or Exception())
            raise self._agreed from error
        return numbers[1:]

    def agree_with_partners(self, error: Exception | None, alike: int | None) -> tuple[Exception | None, bool]:
        """Return the error to report, and True if all ranks that hold parts of the same stages go on.

        They meet here before collectives of their own, into which one that has failed would not come. `alike` is a
        number that has to be the same on each of them; if it is None on one, that one wants nothing to be reduced.
        """
        failed, stops = float(error is not None), float(alike is None)
        for group in self._sharding:
            failed, stops, total, squares = self._added_up([failed, stops, *_spread(alike or 0)], group)
            if not failed and not stops and _differ(total, squares, group):
                error, failed = PipeError(_OTHER_PARTS), 1.0
        if failed and error is None and self.in_process:
            error = StepError("another rank that holds a part of the same stages failed: see its output")
        return error, not failed and not stops

    def _added_up(self, numbers: list[float], group: dist.ProcessGroup) -> list[float]:
        """Return the sums of numbers over the ranks of a group."""
        is_pipeline = self.failure_reports is not None and group is self.failure_reports.groups[0]
        if is_pipeline and self._on_host is not None:
            return self._on_host.add_up(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64, device=device_of_numbers(group, self._devices[0]))
        with connection_to(ANY_RANK if is_pipeline else ANY_PARTNER):
            wait_for(dist.all_reduce(shared, group=group, async_op=True), self.timeout)
        sums: list[float] = shared.tolist()
        return sums


# Numbers that have to be alike are compared by their sum and the sum of their squares, which are exact.

_ALIKE_BITS = 20
_OTHER_SEEDS = (
    "the ranks that hold parts of the same stages by tensor parallelism began this step with different random numbers, "
    "so that dropout and the like would differ between the parts of one value: call torch.manual_seed() with the same "
    "number on all of them, and let none draw more from torch's default generator than the others; or, if they are to "
    "differ, pass random_numbers='per_process' to the schedule"
)

_OTHER_PARTS = (
    "the ranks that hold parts of the same stages have gradients of different parameters, or pass different ones: make "
    "the same calls, for the same parameters, on each of them"
)


def _spread(number: int) -> tuple[float, float]:
    """Return a number, and its square: sums of both show whether ranks have different ones."""
    kept = number % (1 << _ALIKE_BITS)
    return float(kept), float(kept * kept)


def _differ(total: float, squares: float, group: dist.ProcessGroup) -> bool:
    return group.size() * squares != total * total


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return list({group.group_name: group for group in groups}.values())


def _is_sharded(stage: PipelineStage) -> bool:
    return any(map(is_distributed, stage.submod.parameters()))


def _is_distributed(stages: Sequence[PipelineStage], plan: Plan) -> bool:
    return is_initialized() and plan.ranks > 1 and dist.get_world_size(stages[0].group) > 1


# Numbers that one rank shares with all.

CALLS = {
    EVAL: "eval()",
    STEP: "step()",
    NORM: "get_total_norm()",
    CLIP: "clip_grad_norm_()",
    UNSCALE: "unscale_() or step() of GradScaler",
}
_HEADER = 5  # numbers that say which call it is, and how many follow
_NO_NUMBER = -1 << 62  # of a step, where the user gives none
_SIZE = 256  # numbers in the first message, which is the last for up to some eighty microbatches


class _Call(NamedTuple):
    """The call that a rank makes."""

    kind: int
    schedule: int
    number: int
    position: int = _NO_NUMBER  # of the step in the user's loop

    @property
    def at(self) -> str:
        """The step of the user's loop in words."""
        return "a step without a step_number" if self.position == _NO_NUMBER else f"step {self.position}"

    def __str__(self) -> str:
        return f"{CALLS.get(self.kind, 'something else')} of schedule {self.schedule}"


def _share(transports: Sequence[Transport], call: _Call, source: int, numbers: list[int] | None) -> list[int]:
    """Share numbers in a message that has one size for all calls, so that calls that differ are noticed.

    What does not fit follows in a second one: gloo ends the process if a message is longer than its receiver expects.
    """
    sent = None if numbers is None else [*call, len(numbers), *numbers]
    first = None if sent is None else (sent + [0] * _SIZE)[:_SIZE]
    shared = [transport.share(source, first, _SIZE) for transport in transports][-1]
    other = _Call(*shared[: _HEADER - 1])
    if other[:2] != call[:2]:
        raise PipeError(
            f"rank {source} called {other}, and this rank {call}: make the same calls in the same order on every rank"
        )
    if other.position != call.position:
        raise PipeError(
            f"rank {source} is at {other.at} of its loop, and this rank at {call.at}, by schedule.step_number: one of "
            "them has skipped a step, or made one more, and would train on another batch; let every rank make the same "
            "steps, with the same step_number"
        )
    if other != call:
        raise PipeError(
            f"rank {source} called {other} as its call {other.number}, and this rank as its call {call.number}: one of "
            "them has skipped a call, or made one more; make the same calls in the same order on every rank"
        )
    count = shared[_HEADER - 1]
    left = _HEADER + count - _SIZE
    if left > 0:
        rest = None if sent is None else sent[_SIZE:]
        shared = shared + [transport.share(source, rest, left) for transport in transports][-1]
    return shared[_HEADER : _HEADER + count]


# Checks of stages.


def as_list(stages: Any) -> list[PipelineStage]:
    """Return one stage, or several, as a list."""
    return list(stages) if isinstance(stages, Iterable) else [stages]


def checked(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
    """Return the stages of a schedule, checked to be a list of stages of one pipeline."""
    if not isinstance(stages, Sequence):
        raise InputError(f"stages is a list of the stages of this rank, got {type(stages).__name__}: give [stage]")
    if not stages:
        raise InputError("a schedule needs the stages of this rank; got none")
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise InputError(f"a schedule takes PipelineStages, got {type(stage).__name__}: see pipe.build_stage()")
    totals = {stage.num_stages for stage in stages}
    if len(totals) > 1:
        raise InputError(f"the stages are of pipelines with different numbers of stages: {sorted(totals)}")
    return stages


def _check_stages(stages: Sequence[PipelineStage], plan: Plan, *, in_process: bool, distributed: bool) -> None:
    """Raise on stages that are not those of the plan."""
    traced = stages[0].pipe_info is not None
    for stage in stages:
        if stage.num_stages != plan.stages:
            raise InputError(
                f"stage {stage.stage_index} is one of {stage.num_stages} stages, and the plan '{plan.name}' "
                f"has {plan.stages}"
            )
        if (stage.pipe_info is not None) != traced:
            raise InputError("some stages are traced and others cut by hand: make all of them in one way")
    if _splits_backward(plan):
        _warn_of_compiled(plan, stages)
    indices = sorted(stage.stage_index for stage in stages)
    twice = [index for index in indices if indices.count(index) > 1]
    if twice:
        raise InputError(f"stage {twice[0]} was passed twice")
    if not in_process and not distributed:
        missing = sorted(set(range(plan.stages)) - set(indices))
        raise InputError(
            f"stages {missing} are missing, and there is no rank that could hold them: without torch.distributed, or "
            "on one rank, a schedule takes all stages. On many ranks, call torch.distributed.init_process_group() "
            "before, with world_size= their number"
        )


def _splits_backward(plan: Plan) -> bool:
    leaves = (leaf for row in plan.actions for action in row if action is not None for leaf in action.leaves)
    return any(leaf.op is Op.BACKWARD_INPUT for leaf in leaves)


def _warn_of_compiled(plan: Plan, stages: Sequence[PipelineStage]) -> None:
    """Warn that the schedule cannot do what it is for; the gradients are right."""
    compiled = [stage.stage_index for stage in stages if any(map(is_compiled, stage.submod.modules()))]
    if compiled:
        which = f"stage {compiled[0]} has" if len(compiled) == 1 else f"stages {compiled} have"
        warnings.warn(
            f"{which} modules compiled by torch.compile. The backward of each is one piece: its weight gradients are "
            f"computed along with those of its inputs, and are not left for the idle time that {plan.name} fills with "
            "them. A schedule with full backwards, such as 1F1B or Interleaved1F1B, does the same with less memory",
            PipeWarning,
            stacklevel=2,
        )
