"""Planning on all ranks of a group: what each finds is known to all, and all get one plan.

A rank that fails must say so before the others wait for it: whatever may fail runs inside of one of these calls.
Without a group they are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import InputError, PlanError

Result = TypeVar("Result")


def check_member(group: object) -> None:
    """Refuse what is no group, and a group that this process is not in."""
    if group is None:
        return
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"plan(group={group!r}): that is no process group: give torch.distributed.group.WORLD, or what "
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


def check_alike(group: dist.ProcessGroup | None, facts: Callable[[], dict[str, str]]) -> None:
    """Refuse ranks that plan different things. The facts are found on all ranks; what fails on one fails on all."""
    first, *others = found = on_all_ranks(group, facts)
    mine = first if group is None else found[dist.get_rank(group)]
    if all(other == first for other in others):
        return
    for rank, other in enumerate(found):
        for name, value in mine.items():
            if other[name] != value:
                raise InputError(
                    f"plan(group=...): {name} is {value} on this rank, and {other[name]} on rank {rank} of the group: "
                    "give the same on all ranks"
                )


def on_all_ranks(group: dist.ProcessGroup | None, call: Callable[[], Result]) -> list[Result]:
    """What a call gives on each rank, on all at the same time. If it fails on one, it fails on all."""
    if group is None:
        return [call()]
    dist.barrier(group)
    result, failure = _attempt(call)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (result, _told(failure)), group)
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(found):
        if text is not None:
            raise PlanError(f"Rank {rank} of the group failed: {text}")
    return [each for each, _ in found]


def on_each_rank(group: dist.ProcessGroup | None, call: Callable[[], Result]) -> Result:
    """What a call gives on this rank: the others get their own, and nothing is sent. If it fails on one, on all."""
    made: list[Result] = []
    on_all_ranks(group, lambda: made.append(call()))
    return made[0]


def on_first_rank(group: dist.ProcessGroup | None, call: Callable[[], Result]) -> Result:
    """What a call gives on the first rank, on all of them."""
    if group is None:
        return call()
    first = dist.get_rank(group) == 0
    result, failure = _attempt(call) if first else (None, None)
    sent: list[Any] = [(result, _told(failure))]
    dist.broadcast_object_list(sent, dist.get_global_rank(group, 0), group)
    if failure is not None:
        raise failure
    result, text = sent[0]
    if text is not None:
        raise PlanError(f"Rank 0 of the group failed: {text}")
    return cast(Result, result)


def _attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """The failure is raised by the caller, once the other ranks know of it."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def _told(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"
