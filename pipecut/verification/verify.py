"""verify(): cut and uncut side by side, and every difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import InputError
from ..pipe import Pipe
from ..pipe_ir import flatten
from ..schedule import Plan
from ..text import listed
from .compare import tolerance_for
from .evidence import agreed, conclusions, evidence_of, gathered
from .report import Verification, by_badness
from .runs import Kept, Run, Task, run_cut, run_uncut
from .subject import Naming, Request, Stages, Subject, match_buffers, match_names, subject_of

# MERGED: What differs and is not wrong, and where to look if something is.


_SHOWN = 3


@dataclass(frozen=True)
class _Circumstances:
    """All that notes may be about."""

    subject: Subject
    model: nn.Module
    cut: Run
    uncut: Run
    is_random: bool  # the uncut model drew random numbers
    scales_gradients: bool


def _notes_on(case: _Circumstances, *, is_wrong: bool) -> tuple[str, ...]:
    """What to know of a verification."""
    reasons = [*_reasons_to_differ(case), *(_sum_of_losses(case) if is_wrong else ())]
    if is_wrong and not reasons and case.subject.plan.microbatches > 1 and not case.subject.is_distributed:
        reasons.append(
            "with n_microbatches=1 the stages see the whole batch: if they agree then, the model or the loss does more "
            "than treat each sample by itself and take the mean"
        )
    return *reasons, *_left_out(case)


def _reasons_to_differ(case: _Circumstances) -> Iterator[str]:
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
            f"{listed(map(repr, normalising), _SHOWN)} normalise by the batch, and have {count} microbatches instead "
            "of it: call eval() "
            "on the model and on the stages, or pass n_microbatches=1"
        )


def _sum_of_losses(case: _Circumstances) -> Iterator[str]:
    count, cut, uncut = case.subject.plan.microbatches, case.cut.loss, case.uncut.loss
    if case.scales_gradients and count > 1 and cut and uncut and abs(uncut / cut / count - 1) < 0.1:
        yield (
            f"the loss of the uncut model is {uncut / cut:.3g} times that of the stages, with {count} microbatches: "
            "if loss_fn sums over the samples, pass scale_grads=False to verify() and to the schedule"
        )


def _left_out(case: _Circumstances) -> Iterator[str]:
    if case.uncut.loss is None:
        yield "without a loss_fn the backward pass is not compared"
    if case.uncut.updated and case.subject.plan.microbatches > 1:
        yield (
            "buffers that are updated once a microbatch are not compared: "
            f"{listed(map(repr, case.uncut.updated), _SHOWN)}"
        )


def verify(
    pipe_or_stages: Stages,
    model: nn.Module,
    args: tuple[Any, ...],
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    schedule: str | type | Plan = "1F1B",
    n_microbatches: int | None = None,
    ranks: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    check: bool = True,
    names: Naming | None = None,
    loss_kwargs: Mapping[str, Any] | None = None,
    **schedule_options: Any,
) -> Verification:
    """Run one training step of the stages, and one of the uncut model, and compare all that comes out.

    That is the loss, the outputs, the gradient of every parameter by name and the norm of them all, gradients of
    arguments, and buffers. The result lists the differences, the worst first: print it. With `check`, a difference
    beyond the tolerance is raised as a VerificationError, which has the same table. Without a `loss_fn` only the
    forward pass is compared. Weights, gradients, buffers, modes and random numbers are left as they were. Keyword
    arguments of the model are passed as `kwargs`.

    The stages are those of a Pipe, or PipelineStages that hold the model's parameters, or copies of them under the
    same names; for other names pass `names`, a function of (stage index, name in the stage) to the name in the model.

    All ranks of the schedule run in this process. Where torch.distributed is initialised (under torchrun, or in
    `launch`), every rank calls this with the same model and batch and its own stages, or the same Pipe; the result
    is the same on all of them. `schedule` is a name, a class or a Plan; other options go to the schedule, such as
    `scale_grads=False` for a loss that sums.

    The tolerance is a part of the largest element of what is compared, by the shortest dtype that takes part: 1e-11 for
    float64, 1e-5 for float32, 1e-2 for float16, 5e-2 for bfloat16. `rtol` and `atol` replace it. Microbatches draw
    other random numbers than the whole batch, and have other batch statistics. So a model with dropout or batch
    normalisation in training mode differs: compare it in eval mode or, in one process, with n_microbatches=1.

    >>> from pipecut import pipeline
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    >>> x, y = torch.ones(8, 4).double(), torch.ones(8, 1).double()
    >>> pipe = pipeline(model, (x,), num_stages=2)
    >>> found = verify(pipe, model, (x,), y, nn.functional.mse_loss)
    >>> found.ok, sorted(each.name for each in found.differences if each.what == "gradient")
    (True, ['0.bias', '0.weight', '2.bias', '2.weight'])
    """
    _check(model, args, loss_fn, target)
    task = Task((tuple(args), kwargs or {}), target, loss_fn, loss_kwargs or {})
    specs = (schedule_options.get("args_chunk_spec"), schedule_options.get("kwargs_chunk_spec"))
    subject = subject_of(pipe_or_stages, task.call, Request(schedule, n_microbatches, ranks, specs))
    if loss_fn is not None and not subject.plan.training:
        raise InputError(f"{subject.plan.name} has no backward pass: leave out loss_fn, and the outputs are compared")
    holdings = agreed(subject, model, task, lambda: match_names(subject.stages, model, names))
    kept = Kept([model, *(stage.submod for stage in subject.stages)])
    try:
        kept.begin()
        uncut = run_uncut(model, task.fresh(), subject.stages[0].select_output)
        is_random = kept.drew_random_numbers()
        kept.begin()
        cut = run_cut(subject, task.fresh(), schedule_options, match_buffers(subject.stages, model))
        tolerance = tolerance_for(_dtypes(model, uncut.output), subject.stages[0].device.type, rtol, atol)
        evidence = evidence_of(subject, cut, uncut, holdings, tolerance)
    finally:
        kept.restore()
    differences = by_badness(conclusions(gathered(evidence, subject), uncut, tolerance))
    case = _Circumstances(subject, model, cut, uncut, is_random, schedule_options.get("scale_grads", True))
    notes = _notes_on(case, is_wrong=any(not difference.ok for difference in differences))
    verification = Verification(_title(model, subject), differences, notes, str(tolerance))
    if check:
        verification.raise_if_wrong()
    return verification


def _check(model: object, args: object, loss_fn: object, target: object) -> None:
    if not isinstance(model, nn.Module):
        remedy = ": pass the model that it was made from" if isinstance(model, Pipe) else ""
        raise InputError(f"verify() compares with the uncut model, an nn.Module, got {type(model).__name__}{remedy}")
    if not isinstance(args, tuple | list):
        kind = type(args).__name__
        raise InputError(f"args must be a tuple of positional arguments, got {kind}; for a single one write (x,)")
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            f"loss_fn must be a function of (output, target), got {type(loss_fn).__name__}: the order is verify(pipe, "
            "model, args, target, loss_fn), and keyword arguments of the model are passed as kwargs="
        )
    if loss_fn is not None and target is None:
        raise InputError("verify() got a loss_fn and no target: pass target=, the second argument of loss_fn")


def _dtypes(model: nn.Module, output: Any) -> set[torch.dtype]:
    leaves, _ = flatten(output, holders=True)
    return {tensor.dtype for tensor in (*model.parameters(), *leaves) if isinstance(tensor, Tensor)}


def _title(model: nn.Module, subject: Subject) -> str:
    plan = subject.plan
    sizes = f"stages={plan.stages}, ranks={plan.ranks}, microbatches={plan.microbatches}"
    return f"{type(model).__name__} by {plan.name} with {sizes}{'' if subject.is_distributed else ', in one process'}"
