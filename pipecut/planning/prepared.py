"""What is there before costs are known: the trace, the sizes of microbatches, and all choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ..errors import InputError
from ..pipe_ir.traced import TracedModel
from ..split.state import changed_state
from .choices import Choice, microbatch_counts
from .runnable import nothing_runs, refused_sizes
from .shortage import remedies_of
from .training_plan import Source


@dataclass(frozen=True)
class Prepared:
    """A request that was found to be sound. `limits` are the bytes of each rank.

    `dropped` are choices with microbatches that the model cannot run, and why.
    """

    source: Source
    traced: TracedModel
    choices: Sequence[Choice]
    dropped: Mapping[Choice, str]
    limits: Sequence[float] | None
    remedies: Sequence[str]

    @property
    def sizes(self) -> list[int]:
        """The sizes of microbatches, without those that the model cannot run."""
        return sorted({choice.microbatch for choice in self.choices})


def prepared(
    source: Source, traced: TracedModel, choices: Sequence[Choice], batch: int, limits: Sequence[float] | None
) -> Prepared:
    """The choices that the model can run, apart from the others; an error if there are none."""
    sizes = {choice: {choice.microbatch, batch // choice.microbatches} for choice in choices}
    refused = refused_sizes(traced, source, set().union(*sizes.values()))
    dropped = {
        choice: refused[size] for choice, each in sizes.items() for size in sorted(each) if size in refused
    }
    left = [choice for choice in choices if choice not in dropped]
    if not left:
        raise nothing_runs(dropped.values())
    remedies = remedies_of(left, True in may_recompute(traced, "auto"))
    return Prepared(source, traced, left, dropped, limits, remedies)


def check_mode() -> None:
    """Refuse to plan where nothing could train: what autograd keeps, and what a backward takes, cannot be seen."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "plan() prices forwards and backwards, and torch.inference_mode() allows no backward: call it outside of it"
        )


def check_measurable(ranks: int, group: dist.ProcessGroup | None) -> None:
    """Refuse to measure where there are not the ranks for it."""
    size = ranks if group is None else dist.get_world_size(group)
    if size % ranks:
        raise InputError(
            f'plan(ranks={ranks}, group=...): cost="measured" runs the stages of {ranks} ranks, and the group has '
            f"{size}: pass a group whose size is a multiple of {ranks}, a number of ranks that divides {size}, or "
            'cost="analytic"'
        )


def counts_of(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    """The numbers of microbatches to try."""
    if "batch" not in {str(symbol) for symbol in traced.dims}:
        return [batch // _only_size(traced, microbatch, batch)]
    if microbatch is None:
        return microbatch_counts(batch, ranks)
    given = (
        [microbatch] if isinstance(microbatch, int) else list(microbatch) if isinstance(microbatch, Sequence) else []
    )
    wrong = [size for size in given if type(size) is not int or size < 1 or size > batch]
    if wrong or not given:
        raise InputError(f"microbatch={microbatch!r}: give sizes from 1 to the batch, {batch}")
    return list(dict.fromkeys(-(-batch // size) for size in given))


def _only_size(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int) -> int:
    """The size of microbatches for which the trace holds."""
    fixed = traced.hints.get("batch")
    example = next((entry.spec for entry in traced.inputs if entry.spec is not None and entry.spec.shape), None)
    size = int(example.shape[0]) if example is not None else fixed or 1
    if microbatch not in (None, size):
        raise InputError(
            f"microbatch={microbatch!r}: the trace holds for microbatches of {size} samples only, as in the example"
        )
    if batch % size:
        raise InputError(
            f"the trace holds for microbatches of {size} samples only, and a batch of {batch} is no multiple of "
            "that: pass an example of another size"
        )
    return size


def may_recompute(traced: TracedModel, recompute: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Whether activations may be computed again: not where a forward changes buffers, which it would do twice."""
    changed = sorted(changed_state(traced))
    if changed and recompute is True:
        raise InputError(
            f"recompute=True runs forwards twice, and this model's forward changes {changed[0]!r}: it would be changed "
            "twice; put the model in evaluation mode, or leave recompute at 'auto'"
        )
    if recompute == "auto":
        return (False,) if changed else (False, True)
    return (bool(recompute),)
