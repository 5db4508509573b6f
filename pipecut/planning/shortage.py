"""Why no choice fits the memory: the least that would do, whose it is, and what could help."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PipeError, PlanError
from ..split.balance import TooLittleMemoryError
from ..split.memory_size import as_bytes, enough_bytes
from .choices import Choice


def nothing_fits(
    problems: Sequence[PipeError], limits: Sequence[float] | None, remedies: Sequence[str]
) -> PipeError:
    """The error for what was tried; `problems` has one for each choice."""
    too_little = [error.needs for error in problems if isinstance(error, TooLittleMemoryError)]
    if limits is None or not too_little:
        return problems[0]
    needs = min(too_little, key=lambda needs: max(need / limit for need, limit in zip(needs, limits, strict=True)))
    helps = f"Use {', or '.join(remedies)}."
    if len(set(limits)) == 1:
        return PlanError(
            f"Nothing fits memory={as_bytes(limits[0])} on each rank: the least that would do is about "
            f"{enough_bytes(max(needs))}. {helps}"
        )
    given = ", ".join(map(as_bytes, limits))
    short = [
        f"rank {rank} has {as_bytes(limit)}, and needs about {enough_bytes(need)} at the least"
        for rank, (need, limit) in enumerate(zip(needs, limits, strict=True))
        if need > limit
    ]
    return PlanError(f"Nothing fits memory=[{given}]: {'; '.join(short)}. {helps}")


def remedies_of(choices: Sequence[Choice], may_recompute: bool) -> list[str]:
    """What was not tried and would need less memory."""
    found = ["more ranks"]
    if min(choice.microbatch for choice in choices) > 1:
        found.append("a smaller microbatch")
    if may_recompute and not any(choice.recompute for choice in choices):
        found.append("recompute='auto'")
    return found
