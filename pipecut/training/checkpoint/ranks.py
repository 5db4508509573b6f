"""The ranks that save or load a checkpoint together: their places in the pipelines, and how they agree.

They talk over a process group of their own, on CPUs, so that a save beside the training does not meet its messages.
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import CheckpointError, DisagreementError, InputError
from ...run import PipelineSchedule, differences, exchange
from ...stage import is_initialized
from ...text import listed, numbered

_T = TypeVar("_T")
_WRITING = timedelta(minutes=30)  # or longer: one rank may have much more to write than another

# By the default process group, for one that is made anew needs new ones.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()  # by the call that failed
_CALLS = ("save_checkpoint", "load_checkpoint", "export_safetensors")


class _RanksError(CheckpointError):
    """An error of some ranks, which all of them raise."""


@dataclass(frozen=True)
class Ranks:
    """The processes that take part: those of a process group, or this one alone."""

    group: dist.ProcessGroup | None  # None for this process alone
    rank: int = 0
    size: int = 1
    timeout: timedelta = _WRITING
    call: str = _CALLS[0]

    @property
    def writing(self) -> Ranks:
        """The same ranks while they write, which may take some of them much longer than others."""
        return replace(self, timeout=max(self.timeout, _WRITING))

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in their order."""
        if self.group is None:
            return [value]
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        headers = self._gathered(torch.tensor([own.numel(), _CALLS.index(self.call)]))
        sizes, calls = zip(*(header.tolist() for header in headers), strict=True)
        lines = differences([{"call": _CALLS[call]} for call in calls])
        if lines:
            _closed[self.group] = self.call  # what follows is of different calls
            raise DisagreementError(f"{lines[0]}. Make the same calls in the same order on every rank")
        longest = max(sizes)
        parts = self._gathered(torch.nn.functional.pad(own, (0, longest - own.numel())))
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        assert self.group is not None  # there are others
        if self.group in _closed:
            raise CheckpointError(
                f"the ranks have lost each other in an earlier {_closed[self.group]}, and cannot save or load together "
                "any more: let all of them call torch.distributed.destroy_process_group() and make theirs anew, or "
                "start the job again; it goes on from the last complete checkpoint"
            )
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            with _connection(self.timeout):
                work = dist.all_gather(tensors, tensor, group=self.group, async_op=True)
                assert work is not None  # this rank is in the group
                work.wait(self.timeout)
        except BaseException:
            _closed[self.group] = self.call  # its message is still on its way, and would meet that of another call
            raise
        return tensors

    def agree(self, function: Callable[[], _T]) -> list[_T]:
        """Call a function on every rank, and return all values; raise on all if it raises on one."""
        value: Any = None
        failure: Exception | None = None
        try:
            value = function()
        except Exception as caught:  # whatever it is, all ranks raise it
            failure = caught
        outcomes = self.gather(("" if failure is None else _in_words(failure), value))
        failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text}
        if failed:
            if failure is not None and self.group is None:
                raise failure
            raise _RanksError(_told(failed)) from failure
        return [each for _, each in outcomes]

    def first(self, function: Callable[[], _T]) -> _T:
        """Call a function on the first rank, and return its value on all; raise on all if it raises."""
        values: list[Any] = self.agree(lambda: function() if self.rank == 0 else None)
        return values[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _connection(timeout: timedelta) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, DisagreementError) as error:
        raise CheckpointError(
            f"another rank has ended, or did not come to the checkpoint within {timeout.total_seconds():g} s: {error}. "
            "All ranks of a job call save_checkpoint and load_checkpoint together; checkpoints that were complete "
            "before still are. If a rank may take longer, pass a larger timeout= to the schedule"
        ) from error


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _told(failed: Mapping[int, str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in failed.items():
        by_text.setdefault(text, []).append(rank)
    if len(by_text) == 1:
        ((text, ranks),) = by_text.items()
        return f"on {numbered('rank', ranks)}: {text}"
    return "\n".join(f"on {numbered('rank', ranks)}: {text}" for text, ranks in by_text.items())


def ranks_of(schedule: PipelineSchedule, group: dist.ProcessGroup | None, call: str) -> Ranks:
    """Return the ranks that take part in a call for this schedule: all of the job, or those of a group.

    A schedule that holds all stages, none of them copied or sharded, needs nobody else.
    """
    if not isinstance(schedule, PipelineSchedule):
        raise InputError(
            f"got a {type(schedule).__name__} as the schedule: pass the schedule that trains the stages of this rank, "
            "such as Schedule1F1B; a model that is not cut has torch.save, or its own save_pretrained"
        )
    alone = schedule.in_process and not any(_copies(schedule).values())
    if not is_initialized() or (alone and group is None):
        return Ranks(None)
    world = dist.group.WORLD
    assert world is not None  # it is initialized
    members = tuple(dist.get_process_group_ranks(group if group is not None else world))
    if len(members) == 1:
        return Ranks(None)
    made = _groups.setdefault(world, {})
    timeout = schedule.agreement.timeout
    if members not in made:
        with _connection(timeout):
            exchange({}, group, timeout)  # all are here: the new group would be waited for as long as it waits itself
            own = dist.new_group(list(members), max(timeout, _WRITING), backend="gloo", use_local_synchronization=True)
        assert own is not None  # this rank is one of them
        made[members] = own
    return Ranks(made[members], dist.get_rank(made[members]), len(members), timeout, call)


@dataclass(frozen=True)
class Position:
    """The place of a rank: the ranks of its pipeline, and for each of its stages those that hold copies or shards."""

    own: int
    pipeline: tuple[int, ...]
    copies: Mapping[int, frozenset[int]]


def position_of(schedule: PipelineSchedule) -> Position:
    """Return the place of this process."""
    own = dist.get_rank() if is_initialized() else 0
    if schedule.in_process:
        return Position(own, (own,), _copies(schedule))
    return Position(own, tuple(dist.get_process_group_ranks(schedule.stages[0].group)), _copies(schedule))


def _copies(schedule: PipelineSchedule) -> dict[int, frozenset[int]]:
    """Return the other ranks that hold copies or shards of each stage: of its wrappers, and of its DTensors' meshes."""
    found: dict[int, frozenset[int]] = {}
    for stage in schedule.stages:
        ranks = {rank for group in stage.replica.groups for rank in dist.get_process_group_ranks(group)}
        for parameter in stage.submod.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                ranks.update(mesh.mesh.flatten().tolist())
        own = {dist.get_rank()} if ranks else set()
        found[stage.stage_index] = frozenset(ranks - own)
    return found


def places_of(positions: Sequence[Position]) -> list[tuple[int, int]]:
    """Return the number of the pipeline of each rank, and its rank there.

    >>> both = {0: frozenset()}
    >>> places_of([Position(0, (0, 2), both), Position(1, (1, 3), both), Position(2, (0, 2), both)])
    [(0, 0), (1, 0), (0, 1)]
    """
    pipelines = sorted({position.pipeline for position in positions})
    return [(pipelines.index(each.pipeline), each.pipeline.index(each.own)) for each in positions]


def check_copies(positions: Sequence[Position]) -> None:
    """Raise if two ranks hold one stage, and are not connected as copies: they may be two models."""
    holders: dict[int, list[Position]] = {}
    for position in positions:
        for stage in position.copies:
            holders.setdefault(stage, []).append(position)
    for stage, held in holders.items():
        reached, new = {held[0].own}, {held[0].own}
        while new:
            new = {rank for each in held if each.own in new for rank in each.copies[stage]} - reached
            reached |= new
        apart = [each.own for each in held if each.own not in reached]
        if apart:
            raise CheckpointError(
                f"ranks {listed(sorted(each.own for each in held))} all hold stage {stage}, and "
                f"{numbered('rank', apart)} not as a copy or shard of that of rank {held[0].own}, under "
                "DistributedDataParallel, replicate, fully_shard or a DTensor's mesh: they would be saved as one "
                "model. Pass group=, the process group of the ranks that train one model, and let these save into a "
                "folder of their own"
            )
