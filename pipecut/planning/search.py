"""plan(): everything that can be chosen for a training run, searched together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import InputError, PipeError, PlanError, SplitError
from ..measurement.chain import measured_chain
from ..pipe_ir.traced import TracedModel
from ..pipe_ir.tracer import ModelTracer
from ..schedule.auto.search import search_schedule
from ..schedule.placement import Placement
from ..split.balance import TooLittleMemoryError, as_bytes
from ..split.chain import Chain, chain_of
from ..split.costs.machine import Machine
from ..split.state import written_state
from .candidate import Candidate, make_candidate
from .choices import all_choices, check_request, known_schedules, microbatch_sizes
from .memory_size import Memory, read_memory
from .training_plan import Alternative, TrainingPlan, fingerprint

BEST = 3  # cuts for which a schedule of their own is searched


def plan(
    model: nn.Module,
    inputs: tuple[Any, ...] | Tensor,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    batch: int,
    memory: Memory = None,
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
    check_request(ranks, batch, recompute, time_budget, speeds)
    names = known_schedules(schedules)
    limits = read_memory(memory, ranks)
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
    for choice in all_choices(names, sizes, batch, _recompute(traced, recompute)):
        tell(f"{choice.schedule}, {choice.microbatches} microbatches of {choice.microbatch}")
        try:
            candidate = make_candidate(choice, chains[choice.microbatch], ranks, speeds, limits)
        except (SplitError, PlanError) as error:
            alternatives.append(Alternative(choice, None, None, None, str(error)))
            problems.append(error)
            continue
        over = _over(candidate, limits)
        if over is not None:
            alternatives.append(Alternative.of(candidate, f"needs {as_bytes(candidate.memory[over])} on rank {over}"))
            continue
        candidates.append(candidate)
    if not candidates:
        raise _nothing_fits(alternatives, problems, limits)
    candidates.sort(key=lambda each: each.step_time)
    best = _with_searched_schedules(candidates, limits, time_budget, tell)
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
        if microbatch not in (None, size):
            raise InputError(
                f"microbatch={microbatch!r}: the trace holds for microbatches of {size} samples only, as in the example"
            )
        if batch % size:
            raise InputError(
                f"the trace holds for microbatches of {size} samples only, and a batch of {batch} is no multiple of "
                "that: pass an example of another size"
            )
        return [size]
    if microbatch is None:
        return microbatch_sizes(batch, ranks)
    given = (
        [microbatch] if isinstance(microbatch, int) else list(microbatch) if isinstance(microbatch, Sequence) else []
    )
    wrong = [size for size in given if type(size) is not int or size < 1 or size > batch]
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
    candidates: list[Candidate], limits: Sequence[float] | None, time_budget: float, tell: Callable[[str], None]
) -> Candidate:
    """The best candidate; for the best few cuts a schedule is searched that is made for their costs."""
    best = candidates[0]
    begin = time.monotonic()
    for candidate in candidates[:BEST]:
        left = time_budget - (time.monotonic() - begin)
        if left <= 0:
            break
        tell(f"searching a schedule for the cut of {candidate.choice.schedule}")
        room = None if limits is None else [limit - kept for limit, kept in zip(limits, candidate.kept, strict=True)]
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
        if searched.step_time < best.step_time and _over(searched, limits) is None:
            best = searched
    return best


def _is_v(placement: Placement) -> bool:
    """Whether the way through the ranks turns around at the last one."""
    ranks = placement.ranks
    return placement.stages == 2 * ranks and placement.rank_of[ranks] == ranks - 1 and ranks > 1


def _over(candidate: Candidate, limits: Sequence[float] | None) -> int | None:
    """A rank that needs more memory than it has."""
    if limits is None:
        return None
    return next((rank for rank, limit in enumerate(limits) if candidate.memory[rank] > limit), None)


def _recompute(traced: TracedModel, recompute: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Whether activations may be computed again: not where a forward changes buffers, which it would do twice."""
    written = sorted(written_state(traced))
    if written and recompute is True:
        raise InputError(
            f"recompute=True runs forwards twice, and this model's forward changes {written[0]!r}: it would be changed "
            "twice; put the model in evaluation mode, or leave recompute at 'auto'"
        )
    if recompute == "auto":
        return (False,) if written else (False, True)
    return (bool(recompute),)


def _nothing_fits(
    alternatives: Sequence[Alternative], problems: Sequence[PipeError], limits: Sequence[float] | None
) -> PipeError:
    """Why there is no plan: say the least memory that would do, of all that was tried."""
    needed = [error.needed for error in problems if isinstance(error, TooLittleMemoryError)]
    needed += [max(each.memory) for each in alternatives if each.memory is not None]
    if limits is None or not needed:
        return problems[0]
    return PlanError(
        f"Nothing fits memory={as_bytes(min(limits))} on each rank: the least that would do is about "
        f"{as_bytes(min(needed))}. Use more ranks, a smaller microbatch, or recompute='auto'."
    )
