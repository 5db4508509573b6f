"""What differs and is not wrong, and where to look if something is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .runs import Run
from .subject import Subject

_SHOWN = 3


@dataclass(frozen=True)
class Circumstances:
    """All that notes may be about."""

    subject: Subject
    model: nn.Module
    cut: Run
    uncut: Run
    is_random: bool  # the uncut model drew random numbers
    scales_gradients: bool


def notes_on(case: Circumstances, *, is_wrong: bool) -> tuple[str, ...]:
    """What to know of a verification."""
    reasons = [*_reasons_to_differ(case), *(_sum_of_losses(case) if is_wrong else ())]
    if is_wrong and not reasons and case.subject.plan.microbatches > 1 and not case.subject.is_distributed:
        reasons.append(
            "with n_microbatches=1 the stages see the whole batch: if they agree then, the model or the loss does more "
            "than treat each sample by itself and take the mean"
        )
    return *reasons, *_left_out(case)


def _reasons_to_differ(case: Circumstances) -> Iterator[str]:
    """Why cut and uncut may differ although both are right."""
    count, is_distributed = case.subject.plan.microbatches, case.subject.is_distributed
    if case.is_random and (count > 1 or is_distributed):
        yield (
            "the model draws random numbers (dropout in training mode?), and the stages draw others: call eval() on "
            f"the model and on the stages{'' if is_distributed else ', or pass n_microbatches=1'}"
        )
    normalising = [name for name, part in case.model.named_modules() if isinstance(part, _BatchNorm) and part.training]
    if normalising and count > 1:
        yield (
            f"{listed(normalising)} normalise by the batch, and have {count} microbatches instead of it: call eval() "
            "on the model and on the stages, or pass n_microbatches=1"
        )


def _sum_of_losses(case: Circumstances) -> Iterator[str]:
    count, cut, uncut = case.subject.plan.microbatches, case.cut.loss, case.uncut.loss
    if case.scales_gradients and count > 1 and cut and uncut and abs(uncut / cut / count - 1) < 0.1:
        yield (
            f"the loss of the uncut model is {uncut / cut:.3g} times that of the stages, with {count} microbatches: "
            "if loss_fn sums over the samples, pass scale_grads=False to verify() and to the schedule"
        )


def _left_out(case: Circumstances) -> Iterator[str]:
    if case.uncut.loss is None:
        yield "without a loss_fn the backward pass is not compared"
    if case.uncut.updated and case.subject.plan.microbatches > 1:
        yield f"buffers that are updated once a microbatch are not compared: {listed(case.uncut.updated)}"


def listed(names: Sequence[str]) -> str:
    """The first few names.

    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
