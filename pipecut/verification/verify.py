"""verify(): run a step of the stages and one of the uncut model, and report every difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..pipe import Pipe
from ..pipe_ir import flatten
from ..schedule import Plan
from ..text import listed
from ..torch_internals import BatchNorm
from .compare import tolerance_for
from .ranks import all_differences, compare_steps, gather, prepare_on_all_ranks
from .report import Verification, by_badness
from .runs import SavedState, StepInputs, StepResult, run_cut, run_uncut
from .stages import (
    Naming,
    PlannedStages,
    ScheduleRequest,
    Stages,
    match_buffers,
    match_parameters,
    planned_stages,
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
    """Run one training step of the stages and one of the uncut model, and compare all of their results.

    These are the loss, the outputs, the gradient of every parameter by name and the norm of them all, gradients of
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
    inputs = StepInputs((tuple(args), kwargs or {}), target, loss_fn, loss_kwargs or {})
    specs = (schedule_options.get("args_chunk_spec"), schedule_options.get("kwargs_chunk_spec"))
    stages = planned_stages(pipe_or_stages, inputs.call, ScheduleRequest(schedule, n_microbatches, ranks, specs))
    if loss_fn is not None and not stages.plan.training:
        raise InputError(f"{stages.plan.name} has no backward pass: leave out loss_fn, and the outputs are compared")
    held = prepare_on_all_ranks(stages, model, inputs, lambda: match_parameters(stages.stages, model, names))
    state = SavedState([model, *(stage.submod for stage in stages.stages)])
    try:
        state.begin()
        uncut = run_uncut(model, inputs.copied(), stages.stages[0].select_output)
        is_random = state.drew_random_numbers()
        state.begin()
        cut = run_cut(stages, inputs.copied(), schedule_options, match_buffers(stages.stages, model))
        tolerance = tolerance_for(_dtypes(model, uncut.output), stages.stages[0].device.type, rtol, atol)
        found = compare_steps(stages, cut, uncut, held, tolerance)
    finally:
        state.restore()
    differences = by_badness(all_differences(gather(found, stages), uncut, tolerance))
    step = _ComparedSteps(stages, model, cut, uncut, is_random, schedule_options.get("scale_grads", True))
    notes = _notes_on(step, is_wrong=any(not difference.ok for difference in differences))
    verification = Verification(_title(model, stages), differences, notes, str(tolerance))
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


def _title(model: nn.Module, stages: PlannedStages) -> str:
    plan = stages.plan
    sizes = f"stages={plan.stages}, ranks={plan.ranks}, microbatches={plan.microbatches}"
    return f"{type(model).__name__} by {plan.name} with {sizes}{'' if stages.is_distributed else ', in one process'}"


# ---------------------------------------------------------------- notes: reasons why cut and uncut may differ

_SHOWN = 3


@dataclass(frozen=True)
class _ComparedSteps:
    """Both steps, and the options that notes mention."""

    stages: PlannedStages
    model: nn.Module
    cut: StepResult
    uncut: StepResult
    is_random: bool  # the uncut model drew random numbers
    scales_gradients: bool


def _notes_on(step: _ComparedSteps, *, is_wrong: bool) -> tuple[str, ...]:
    """Return what a reader of the report should know."""
    reasons = [*_reasons_to_differ(step), *(_sum_of_losses(step) if is_wrong else ())]
    if is_wrong and not reasons and step.stages.plan.microbatches > 1 and not step.stages.is_distributed:
        reasons.append(
            "with n_microbatches=1 the stages see the whole batch: if they agree then, the model or the loss does more "
            "than treat each sample by itself and take the mean"
        )
    return *reasons, *_left_out(step)


def _reasons_to_differ(step: _ComparedSteps) -> Iterator[str]:
    """Yield reasons for which cut and uncut may differ although both are right."""
    count, is_distributed = step.stages.plan.microbatches, step.stages.is_distributed
    if step.is_random and (count > 1 or is_distributed):
        yield (
            "the model draws random numbers (dropout in training mode?), and the stages draw others: call eval() on "
            f"the model and on the stages{'' if is_distributed else ', or pass n_microbatches=1'}"
        )
    normalising = [name for name, part in step.model.named_modules() if isinstance(part, BatchNorm) and part.training]
    if normalising and count > 1:
        yield (
            f"{listed(map(repr, normalising), _SHOWN)} normalise by the batch, and have {count} microbatches instead "
            "of it: call eval() "
            "on the model and on the stages, or pass n_microbatches=1"
        )


def _sum_of_losses(step: _ComparedSteps) -> Iterator[str]:
    count, cut, uncut = step.stages.plan.microbatches, step.cut.loss, step.uncut.loss
    if step.scales_gradients and count > 1 and cut and uncut and abs(uncut / cut / count - 1) < 0.1:
        yield (
            f"the loss of the uncut model is {uncut / cut:.3g} times that of the stages, with {count} microbatches: "
            "if loss_fn sums over the samples, pass scale_grads=False to verify() and to the schedule"
        )


def _left_out(step: _ComparedSteps) -> Iterator[str]:
    if step.uncut.loss is None:
        yield "without a loss_fn the backward pass is not compared"
    if step.uncut.updated and step.stages.plan.microbatches > 1:
        yield (
            "buffers that are updated once a microbatch are not compared: "
            f"{listed(map(repr, step.uncut.updated), _SHOWN)}"
        )
