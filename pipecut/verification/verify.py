"""verify(): run a step of the stages and one of the uncut model, and report every difference on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe import Pipe
from ..pipe_ir import clone, flatten
from ..run import digest, exchange
from ..schedule import Plan
from ..text import listed
from ..torch_internals import BatchNorm
from .isolated import obstacle_to_isolation, run_isolated
from .report import (
    MISSING,
    Difference,
    Tolerance,
    Verification,
    by_badness,
    compare_gradients,
    compare_numbers,
    compare_tensors,
    compare_values,
    magnitudes_of,
    module_of,
    plain,
    tolerance_for,
)
from .runs import InMicrobatches, SavedState, StepInputs, StepResult, check_finite, run_cut, run_uncut, schedule_of
from .stages import (
    HeldParameter,
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
    isolated: bool = True,
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

    In one process every stage gets memory of its own, as on a rank of its own (`isolated=False`: all share that of the
    model): copies of its parameters and buffers, and of the lists, dicts, attributes, closures and variables that its
    hooks, its classes and loss_fn lead to. Both train for a step of gradient descent, and the weights and a second step
    are compared too, so that what drifts apart shows. A parameter that gets a gradient in a stage that does not hold it
    is listed as a leak, and notes say what stages share past the values that are sent. It takes memory for the model
    twice, and once more for each stage that has a way to all of it. Not seen is what goes through objects that are
    written in C, installed packages or files.

    All ranks of the schedule run in this process. Where torch.distributed is initialised (under torchrun, or in
    `launch`), every rank calls this with the same model and batch and its own stages, or the same Pipe; the result
    is the same on all of them. `schedule` is a name, a class or a Plan; other options go to the schedule, such as
    `scale_grads=False` for a loss that sums.

    The tolerance is a part of the largest element of what is compared, by the shortest dtype that takes part: 1e-11 for
    float64, 1e-5 for float32, 1e-2 for float16, 5e-2 for bfloat16. `rtol` and `atol` replace it. Microbatches have
    other batch statistics than the whole batch: a model with batch normalisation in training mode differs, unless it is
    compared in eval mode or with n_microbatches=1. Of a traced model in training mode that draws random numbers, such
    as dropout, the uncut forward of a training step runs microbatch by microbatch too, under
    `pipecut.random_streams()`, so that it draws what the stages draw; the loss is that of the whole batch. Without a
    loss_fn, and in modules that you cut by hand, the stages draw other numbers than the uncut model, unless there is
    one microbatch, in one process.

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
    inputs = replace(inputs, parts=_parts(stages, model, inputs, schedule_options))
    held = _prepare_on_all_ranks(stages, model, inputs, lambda: match_parameters(stages.stages, model, names))
    isolates = isolated and loss_fn is not None and not stages.is_distributed
    obstacle = obstacle_to_isolation(stages.stages) if isolates else ""
    run = _run_isolated if isolates and not obstacle else _run_together
    step = run(stages, model, inputs, schedule_options, held, (rtol, atol))
    everywhere = _all_differences(_gather(step.found, step.stages), step.uncut, step.tolerance)
    differences = by_badness([*everywhere, *step.later])
    notes = _notes_on(step, is_wrong=any(not difference.ok for difference in differences))
    if obstacle:
        notes = (*notes, f"all stages were in one memory, and not as on separate ranks: {obstacle}")
    verification = Verification(_title(model, stages, step), differences, notes, str(step.tolerance))
    if check:
        verification.raise_if_wrong()
    return verification


def _parts(
    stages: PlannedStages, model: nn.Module, inputs: StepInputs, options: Mapping[str, Any]
) -> InMicrobatches | None:
    """Return how the uncut model draws what the stages draw; None if it draws nothing, or stages draw their own."""
    first = stages.stages[0]
    info = first.pipe_info if first.variants is None else first.variants.info(first.variants.number_for(*inputs.call))
    draws = info is not None and info.is_random and model.training and inputs.loss_fn is not None
    if info is None or not draws or options.get("random_numbers") not in _AS_UNCUT:
        return None
    specs = (options.get("args_chunk_spec"), options.get("kwargs_chunk_spec"))
    return InMicrobatches(info, stages.plan.microbatches, specs, options.get("output_merge_spec"))


_AS_UNCUT = (None, "as_uncut")
_SEED = 0  # of both runs on ranks, each of which has random numbers of its own


def _begin(state: SavedState, stages: PlannedStages) -> None:
    state.begin()
    if stages.is_distributed:
        torch.manual_seed(_SEED)


def _run_together(
    stages: PlannedStages,
    model: nn.Module,
    inputs: StepInputs,
    options: Mapping[str, Any],
    held: Sequence[HeldParameter],
    limits: _Limits,
) -> _ComparedSteps:
    """Run one step of each: stages on ranks of their own, or all of them in the memory of this process."""
    state = SavedState([model, *(stage.submod for stage in stages.stages)])
    try:
        _begin(state, stages)
        # A copy that shares the model's tensors: attributes that the forward sets are the copy's.
        uncut = run_uncut(clone(model), inputs.copied(), stages.stages[0].select_output)
        check_finite(uncut)
        is_random = state.drew_random_numbers() and inputs.parts is None
        _begin(state, stages)
        schedule = schedule_of(stages, inputs, options)
        cut = run_cut(schedule, stages, inputs.copied(), match_buffers(stages.stages, model))
        tolerance = _tolerance(model, uncut, stages, limits)
        found = _compare_steps(stages, cut, uncut, held, tolerance)
    finally:
        state.restore()
    return _ComparedSteps(stages, model, cut, uncut, is_random, options.get("scale_grads", True), tolerance, found)


def _run_isolated(
    stages: PlannedStages,
    model: nn.Module,
    inputs: StepInputs,
    options: Mapping[str, Any],
    held: Sequence[HeldParameter],
    limits: _Limits,
) -> _ComparedSteps:
    """Run two steps of each, with an optimizer, and every stage in memory of its own."""

    def tolerance_of(uncut: StepResult) -> Tolerance:
        return _tolerance(model, uncut, stages, limits)

    steps, found = run_isolated(stages, model, inputs, options, held, tolerance_of, _compare_steps)
    scaled = options.get("scale_grads", True)
    tolerance = tolerance_of(steps.uncut)
    return _ComparedSteps(
        steps.stages,
        model,
        steps.cut,
        steps.uncut,
        steps.is_random,
        scaled,
        tolerance,
        found,
        steps.differences,
        steps.suspects,
        is_isolated=True,
    )


_Limits = tuple[float | None, float | None]  # rtol, atol


def _tolerance(model: nn.Module, uncut: StepResult, stages: PlannedStages, limits: _Limits) -> Tolerance:
    return tolerance_for(_dtypes(model, uncut.output), stages.stages[0].device.type, *limits)


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


def _title(model: nn.Module, stages: PlannedStages, step: _ComparedSteps) -> str:
    plan = stages.plan
    where = "in one process, every stage in memory of its own" if step.is_isolated else "in one process"
    sizes = f"stages={plan.stages}, ranks={plan.ranks}, microbatches={plan.microbatches}"
    return f"{type(model).__name__} by {plan.name} with {sizes}{'' if stages.is_distributed else f', {where}'}"


# The differences that one process finds, together with those of the other ranks.

_T = TypeVar("_T")
_FAULT = "fault"


@dataclass(frozen=True)
class _RankDifferences:
    """Differences that one process found; the norms of its stages' gradients, and the names of their parameters."""

    differences: tuple[Difference, ...]
    norms: Mapping[str, float]
    held: frozenset[str]


def _compare_steps(
    stages: PlannedStages, cut: StepResult, uncut: StepResult, parameters: Sequence[HeldParameter], tolerance: Tolerance
) -> _RankDifferences:
    """Compare all results that this process has. Buffers that every microbatch updates are not compared."""
    differences: list[Difference] = []
    if stages.has_output:
        if cut.loss is not None and uncut.loss is not None:
            differences.append(compare_numbers("loss", cut.loss, uncut.loss, tolerance))
        differences += compare_values("output", cut.output, uncut.output, tolerance)
    differences += _gradient_differences(parameters, uncut, tolerance)
    if stages.has_input:
        for name, gradient in uncut.input_gradients.items():
            ours = cut.input_gradients[name]
            differences += compare_gradients(name, ours, gradient, tolerance, 0.0, None, "input gradient")
    differences += [
        compare_tensors("buffer", name, buffer, uncut.buffers[name], tolerance)
        for name, buffer in cut.buffers.items()
        if stages.plan.microbatches == 1 or name not in uncut.updated
    ]
    norms = {held.name: _norm(held.parameter.grad) for held in parameters if held.parameter.grad is not None}
    return _RankDifferences(tuple(differences), norms, frozenset(held.name for held in parameters))


def _gradient_differences(
    parameters: Sequence[HeldParameter], uncut: StepResult, tolerance: Tolerance
) -> Iterator[Difference]:
    measures = magnitudes_of(uncut.gradients)
    for held in parameters:
        magnitude = measures.get(module_of(held.name), 0.0)
        gradient = uncut.gradients[held.name]
        yield from compare_gradients(held.name, held.parameter.grad, gradient, tolerance, magnitude, held.stage)


def _gather(own: _RankDifferences, stages: PlannedStages) -> list[_RankDifferences]:
    """Return the differences of all ranks, on all of them."""
    if not stages.is_distributed:
        return [own]
    collected: list[_RankDifferences | None] = [None] * dist.get_world_size(stages.group)
    dist.all_gather_object(collected, own, group=stages.group)
    return [each for each in collected if each is not None]


def _all_differences(ranks: Sequence[_RankDifferences], uncut: StepResult, tolerance: Tolerance) -> list[Difference]:
    """Return all differences, with those of all stages together: the norm, and parameters that no stage holds."""
    norms: dict[str, float] = {}
    for rank in ranks:
        norms = {**rank.norms, **norms}  # a tied parameter counts once
    held = frozenset[str]().union(*(rank.held for rank in ranks))
    found = [difference for rank in ranks for difference in rank.differences]
    found += [
        Difference("gradient", name, fault=MISSING)
        for name, gradient in uncut.gradients.items()
        if gradient is not None and name not in held
    ]
    if uncut.loss is not None:
        whole = [_norm(gradient) for gradient in uncut.gradients.values() if gradient is not None]
        found.insert(0, compare_numbers("gradient norm", math.hypot(*norms.values()), math.hypot(*whole), tolerance))
    return found


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(plain(gradient)))


def _prepare_on_all_ranks(stages: PlannedStages, model: nn.Module, inputs: StepInputs, prepare: Callable[[], _T]) -> _T:
    """Return what `prepare` returns, once all ranks have the same model and batch and none of them fails in it."""
    if not stages.is_distributed:
        return prepare()
    prepared: list[_T] = []
    fault = ""
    try:
        prepared.append(prepare())
    except InputError as error:
        fault = str(error)
    values = {"parameters of the model": list(model.parameters()), "arguments": inputs.call, "target": inputs.target}
    facts = {name: digest(value) for name, value in values.items()}
    ranks = exchange({**facts, _FAULT: fault}, stages.group)
    for rank, known in enumerate(ranks):
        if known[_FAULT]:
            raise InputError(f"on rank {rank}, {known[_FAULT]}")
    for rank, known in enumerate(ranks):
        differing = [name for name in facts if known[name] != ranks[0][name]]
        if differing:
            raise InputError(
                f"the {' and '.join(differing)} on rank {rank} are not those on rank 0, and every rank compares with "
                "the uncut model: make them in the same way on all ranks, after the same torch.manual_seed()"
            )
    return prepared[0]


# Notes: reasons why cut and uncut may differ.

_SHOWN = 3


@dataclass(frozen=True)
class _ComparedSteps:
    """Both steps, and the options that notes mention."""

    stages: PlannedStages
    model: nn.Module
    cut: StepResult
    uncut: StepResult
    is_random: bool  # the uncut model drew random numbers, and not those that the stages draw
    scales_gradients: bool
    tolerance: Tolerance
    found: _RankDifferences  # in the first step
    later: tuple[Difference, ...] = ()  # with memories apart: leaks, and differences after the first step
    suspects: tuple[str, ...] = ()
    is_isolated: bool = False


def _notes_on(step: _ComparedSteps, *, is_wrong: bool) -> tuple[str, ...]:
    """Return what a reader of the report should know."""
    reasons = [*_reasons_to_differ(step), *((*_sum_of_losses(step), *step.suspects) if is_wrong else ())]
    if is_wrong and not reasons and step.stages.plan.microbatches > 1 and not step.stages.is_distributed:
        reasons.append(
            "with n_microbatches=1 the stages see the whole batch: if they agree then, the model or the loss does more "
            "than treat each sample by itself and take the mean"
        )
    return *reasons, *_left_out(step), *filter(None, [step.cut.left_out])


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
            "buffers that are updated in every microbatch are not compared: "
            f"{listed(map(repr, step.uncut.updated), _SHOWN)}"
        )
