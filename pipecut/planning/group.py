"""Calls on all ranks of a group that plan together: results are shared, and a failure on one rank is raised on all.

A rank that fails must say so before the others wait for it: all that may fail runs inside one of these calls. Without
a group they are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import InputError, PlanError
from ..run import exchange

_Result = TypeVar("_Result")


def check_member(group: object) -> None:
    """Raise if `group` is not a process group, or one that this process is not in."""
    if group is None:
        return
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"plan(group={group!r}): that is not a process group: give torch.distributed.group.WORLD, or what "
            "torch.distributed.new_group() returned"
        )
    if not _is_member(group):
        raise InputError(
            "plan(group=...): this process is not in the group: call plan() with it on the ranks of the group only"
        )


def _is_member(group: Any) -> bool:
    try:
        return dist.is_initialized() and dist.get_rank(group) >= 0
    except ValueError:  # a group that was destroyed
        return False


def check_same_facts(group: dist.ProcessGroup | None, facts: Callable[[], dict[str, str]]) -> None:
    """Raise if ranks plan different things."""
    mine = on_each_rank(group, facts)
    if group is None:
        return
    for rank, other in enumerate(exchange(mine, group)):
        for name, value in mine.items():
            if other[name] != value:
                raise InputError(
                    f"plan(group=...): {name} is {value} on this rank, and {other[name]} on rank {rank} of the group: "
                    "give the same on all ranks"
                )


def on_all_ranks(group: dist.ProcessGroup | None, call: Callable[[], _Result]) -> list[_Result]:
    """Return the results of a call on every rank, made at the same time. If it fails on one, it fails on all."""
    if group is None:
        return [call()]
    dist.barrier(group)
    result, failure = _attempt(call)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (result, _failure_text(failure)), group)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise PlanError(f"Rank {rank} of the group failed: {text}")
    return [each for each, _ in found]


def on_each_rank(group: dist.ProcessGroup | None, call: Callable[[], _Result]) -> _Result:
    """Return the result of a call on this rank, made on every rank. If it fails on one, it fails on all."""
    made: list[_Result] = []
    on_all_ranks(group, lambda: made.append(call()))
    return made[0]


def on_first_rank(group: dist.ProcessGroup | None, call: Callable[[], _Result]) -> _Result:
    """Return the result of a call on the first rank, on all of them."""
    if group is None:
        return call()
    first = dist.get_rank(group) == 0
    result, failure = _attempt(call) if first else (None, None)
    sent: list[Any] = [(result, _failure_text(failure))]
    dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group)
    if failure is not None:
        raise failure
    result, text = sent[0]
    if text is not None:
        raise PlanError(f"Rank 0 of the group failed: {text}")
    return cast(_Result, result)


def _attempt(call: Callable[[], _Result]) -> tuple[_Result | None, Exception | None]:
    """Return the result or the failure, which the caller raises once the other ranks know of it."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def _failure_text(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"
