"""Planning on all ranks of a group: what each finds is known to all, and all get one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import InputError, PlanError

Result = TypeVar("Result")


def check_group(group: dist.ProcessGroup | None, facts: dict[str, object]) -> None:
    """Refuse a group that this process is not in, and ranks that plan different things."""
    if group is None:
        return
    if not dist.is_initialized() or dist.get_rank(group) < 0:
        raise InputError(
            "plan(group=...): this process is not in the group: call plan() with it on the ranks of the group only"
        )
    for rank, other in enumerate(on_all_ranks(group, lambda: facts)):
        for name, value in facts.items():
            if other[name] != value:
                raise InputError(
                    f"plan(group=...): {name} is {value} on this rank, and {other[name]} on rank {rank} of the group: "
                    "give the same on all ranks"
                )


def on_all_ranks(group: dist.ProcessGroup, call: Callable[[], Result]) -> list[Result]:
    """What a call gives on each rank, on all at the same time. If it fails on one, it fails on all."""
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


def on_first_rank(group: dist.ProcessGroup, call: Callable[[], Result]) -> Result:
    """What a call gives on the first rank, on all of them."""
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
