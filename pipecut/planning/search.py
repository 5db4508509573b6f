"""plan(): everything that can be chosen for a training run, searched together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import InputError, PipeError, PlanError, SplitError
from ..measurement.chain import measured_chain
from ..pipe_ir.traced import TracedModel
from ..pipe_ir.tracer import ModelTracer
from ..schedule.auto.search import search_schedule
from ..schedule.placement import Placement
from ..split.balance import as_bytes
from ..split.chain import Chain, chain_of
from ..split.costs.machine import Machine
from .candidate import Candidate, make_candidate
from .choices import Choice, all_choices, check_numbers, known_schedules, microbatch_sizes
from .memory_size import read_memory
from .training_plan import Alternative, TrainingPlan, fingerprint

BEST = 3  # cuts for which a schedule of their own is searched


def plan(
    model: nn.Module,
    inputs: tuple[Any, ...] | Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    batch: int,
    memory: float | str | None = None,
    schedules: Sequence[str] | None = None,
    microbatch: int | Sequence[int] | None = None,
    recompute: bool | Literal["auto"] = "auto",
    speeds: Sequence[float] | None = None,
    machine: Machine | None = None,
    cost: Literal["analytic", "measured"] = "analytic",
    time_budget: float = 5.0,
    progress: Callable[[str], None] | None = None,
) -> TrainingPlan:
    """The cut, schedule, size of microbatches and choice about recomputation that make a step short.

    The model is traced once; costs of every size of microbatch follow from the trace. `memory` is what each rank has,
    such as "24GB", for parameters, gradients, optimizer state (as Adam has it) and activations. `machine` says how fast
    ranks compute; by default this one is measured. `cost="measured"` runs every part of the model, instead of
    computing its time. Print the result for a table of the alternatives.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    >>> found = plan(model, torch.ones(8, 32), ranks=2, batch=16, schedules=["1F1B"], time_budget=0.0)
    >>> found.ranks, found.schedule_plan.stages, found.microbatch * found.microbatches
    (2, 2, 16)
    """
    check_numbers(ranks, batch)
    names = known_schedules(schedules)
    limit = read_memory(memory)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    tell = progress or (lambda text: None)
    tell("tracing the model")
    traced = ModelTracer("auto", model, args, kwargs).trace()
    machine = machine or Machine.measure(traced.device, {parameter.dtype for parameter in model.parameters()})
    sizes = _sizes(traced, microbatch, batch, ranks)
    chains = _chains(traced, machine, sizes, cost, (args, dict(kwargs or {})), ranks, tell)
    candidates: list[Candidate] = []
    alternatives: list[Alternative] = []
    problems: list[PipeError] = []
    for choice in all_choices(names, sizes, batch, (False, True) if recompute == "auto" else (bool(recompute),)):
        tell(f"{choice.schedule}, {choice.microbatches} microbatches of {choice.microbatch}")
        try:
            candidate = make_candidate(choice, chains[choice.microbatch], ranks, speeds, limit)
        except (SplitError, PlanError) as error:
            alternatives.append(Alternative(choice, None, None, None, str(error)))
            problems.append(error)
            continue
        worst = max(candidate.memory)
        if limit is not None and worst > limit:
            reason = f"needs {as_bytes(worst)} on rank {candidate.memory.index(worst)}"
            alternatives.append(Alternative.of(candidate, reason))
            continue
        candidates.append(candidate)
    if not candidates:
        unlimited = partial(make_candidate, ranks=ranks, speeds=speeds, limit=None)
        raise _nothing_fits(
            [each.choice for each in alternatives], problems, limit, lambda it: unlimited(it, chains[it.microbatch])
        )
    candidates.sort(key=lambda each: each.step_time)
    best = _with_searched_schedules(candidates, limit, time_budget, tell)
    alternatives += [
        Alternative.of(each, f"{each.step_time / best.step_time - 1:.1%} slower")
        for each in candidates
        if each is not best
    ]
    return TrainingPlan(
        model_name=type(model).__name__,
        fingerprint=fingerprint(model),
        batch=batch,
        microbatch=best.choice.microbatch,
        recompute=best.choice.recompute,
        cuts=best.labels,
        report=best.report,
        memory=best.memory,
        alternatives=tuple(sorted(alternatives, key=lambda each: each.step_time or float("inf"))),
        source=(model, args, dict(kwargs or {})),
    )


def _sizes(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    fixed = traced.hints.get("batch")
    if "batch" not in {str(symbol) for symbol in traced.dims}:
        example = next((entry.spec for entry in traced.inputs if entry.spec is not None and entry.spec.shape), None)
        size = int(example.shape[0]) if example is not None else fixed or 1
        if batch % size:
            raise InputError(
                f"the trace holds for microbatches of {size} samples only, and a batch of {batch} is no multiple of "
                "that: pass an example of another size"
            )
        return [size]
    if microbatch is None:
        return microbatch_sizes(batch, ranks)
    given = [microbatch] if isinstance(microbatch, int) else list(microbatch)
    wrong = [size for size in given if size < 1 or size > batch]
    if wrong or not given:
        raise InputError(f"microbatch={microbatch!r}: give sizes from 1 to the batch, {batch}")
    return given


def _chains(
    traced: TracedModel,
    machine: Machine,
    sizes: Sequence[int],
    cost: str,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    ranks: int,
    tell: Callable[[str], None],
) -> dict[int, Chain]:
    """The model as a chain of blocks with the costs of one microbatch, for each size."""
    chains = {size: chain_of(traced, machine, {**traced.hints, "batch": size}) for size in sizes}
    if cost == "analytic":
        return chains
    if cost != "measured":
        raise InputError(f"cost must be 'analytic' or 'measured', got {cost!r}")
    tell("measuring the parts of the model")
    example = chain_of(traced, machine)
    measured = measured_chain(example, *call, stages=2 * ranks)
    factors = [
        (_ratio(seen.forward, said.forward), _ratio(seen.backward_input, said.backward_input),
         _ratio(seen.backward_weight, said.backward_weight))
        for seen, said in zip(measured.times, example.times, strict=True)
    ]  # fmt: skip
    # Other sizes than the example's are computed, each block as much off as it was at the example's.
    return {
        size: chain.with_times([times.scaled(*each) for times, each in zip(chain.times, factors, strict=True)])
        for size, chain in chains.items()
    }


def _ratio(seen: float, said: float) -> float:
    return seen / said if said else 1.0


def _with_searched_schedules(
    candidates: list[Candidate], limit: float | None, time_budget: float, tell: Callable[[str], None]
) -> Candidate:
    """The best candidate; for the best few cuts a schedule is searched that is made for their costs."""
    best = candidates[0]
    begin = time.monotonic()
    for candidate in candidates[:BEST]:
        left = time_budget - (time.monotonic() - begin)
        if left <= 0:
            break
        tell(f"searching a schedule for the cut of {candidate.choice.schedule}")
        room = None if limit is None else [limit - kept for kept in candidate.kept]
        try:
            found = search_schedule(
                ranks=candidate.plan.ranks,
                microbatches=candidate.choice.microbatches,
                costs=candidate.report.costs,
                memory_limit=room,
                placement="v" if _is_v(candidate.plan.placement) else "loop",
                chunks=candidate.plan.stages // candidate.plan.ranks,
                time_budget=left / BEST,
                objective="makespan",
            )
        except PlanError:  # nothing fits this memory; the candidate itself does
            continue
        searched = candidate.with_plan(found.plan)
        if searched.step_time < best.step_time and (limit is None or max(searched.memory) <= limit):
            best = searched
    return best


def _is_v(placement: Placement) -> bool:
    """Whether the way through the ranks turns around at the last one."""
    ranks = placement.ranks
    return placement.stages == 2 * ranks and placement.rank_of[ranks] == ranks - 1 and ranks > 1


def _nothing_fits(
    choices: Sequence[Choice], problems: Sequence[PipeError], limit: float | None, make: Callable[[Choice], Candidate]
) -> PipeError:
    """Why there is no plan: say the least memory that would do."""
    needed = []
    for choice in choices if limit is not None else ():
        try:
            needed.append(max(make(choice).memory))
        except (SplitError, PlanError):  # not for want of memory
            continue
    if not needed:
        return problems[0]
    return PlanError(
        f"Nothing fits memory={as_bytes(limit or 0)} on each rank: the least that would do is {as_bytes(min(needed))}. "
        "Use more ranks, a smaller microbatch, or recompute='auto'."
    )
