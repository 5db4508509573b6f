"""plan(): everything that can be chosen for a training run, searched together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir.traced import TracedModel
from ..pipe_ir.tracer import ModelTracer
from ..split.costs.machine import Machine
from ..split.state import written_state
from .chains import Pricing
from .choices import all_choices, check_request, known_schedules, microbatch_sizes
from .memory_size import Memory, read_memory
from .ranking import Ranking
from .rehearse import rehearse
from .together import check_group, on_first_rank
from .training_plan import TrainingPlan, fingerprint

Result = TypeVar("Result")


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
    group: dist.ProcessGroup | None = None,
) -> TrainingPlan:
    """The cut, schedule, size of microbatches and choice about recomputation that make a step short.

    The model is traced once; costs of every size of microbatch follow from the trace. `memory` is what each rank has,
    such as "24GB", for parameters, gradients, optimizer state (as Adam has it) and activations. `machine` says how fast
    ranks compute; by default this one is measured. `cost="measured"` runs every part of the model, instead of
    computing its time. Print the result for a table of the alternatives.

    With a `group` all its ranks call this, and get the same plan: they measure at the same time, as they will compute
    at the same time, and measure the link between them. The first of them searches.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    >>> found = plan(model, torch.ones(8, 32), ranks=2, batch=16, schedules=["1F1B"], time_budget=0.0)
    >>> found.ranks, found.schedule_plan.stages, found.microbatch * found.microbatches
    (2, 2, 16)
    """
    check_request(ranks, batch, recompute, time_budget, speeds, cost)
    names = known_schedules(schedules)
    limits = read_memory(memory, ranks)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    source = (model, args, dict(kwargs or {}))
    facts = {"the model": fingerprint(model), "ranks": ranks, "batch": batch, "microbatch": microbatch, "cost": cost}
    facts |= {"machine": str(machine)}
    check_group(group, facts)
    tell = progress or (lambda text: None)
    tell("tracing the model")
    traced = ModelTracer("auto", *source).trace()
    sizes = _sizes(traced, microbatch, batch, ranks)
    choices = [*all_choices(names, sizes, batch, _recompute(traced, recompute))]
    chains = Pricing(machine, cost == "measured", ranks, group).chains(traced, sizes, *source[1:], tell)

    ranking = Ranking(choices, chains, ranks, speeds, limits, tell)

    def first(call: Callable[[], Result]) -> Result:
        return call() if group is None else on_first_rank(group, call)

    best_cuts = first(ranking.find)
    if cost == "measured":
        times = []
        for each in best_cuts:
            tell(f"running the stages of {each.choice.schedule}")
            times.append(rehearse(each, traced, *source[1:], group))
        first(lambda: ranking.rehearsed(times, speeds if group is None else None))
    best = first(lambda: ranking.winner(time_budget))
    return TrainingPlan(
        model_name=type(model).__name__,
        fingerprint=fingerprint(model),
        batch=batch,
        microbatch=best.choice.microbatch,
        recompute=best.choice.recompute,
        cuts=best.labels,
        report=best.report,
        memory=best.memory,
        alternatives=best.alternatives,
        source=source,
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
