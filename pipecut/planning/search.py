"""plan(): everything that can be chosen for a training run, searched together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PipeWarning
from ..pipe_ir.tracer import ModelTracer
from ..split.costs.machine import Machine
from ..split.memory_size import Memory, read_memory
from .chains import Pricing
from .choices import all_choices, check_request, known_schedules
from .facts import facts_of
from .prepared import Prepared, check_measurable, check_mode, counts_of, may_recompute, prepared
from .ranking import Ranking
from .rehearse import rehearse, rehearse_best
from .together import check_alike, check_member, on_each_rank, on_first_rank
from .training_plan import Alternative, TrainingPlan, fingerprint


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

    `microbatch` is the most samples of one, or several such numbers to choose from.
    A batch need not be a multiple of its microbatches: 10 samples in 4 of them are 3, 3, 2 and 2, and each is priced as
    the largest. Sizes that the model cannot run are left out, and the table says why.

    With a `group` all its ranks call this, and get the same plan: they measure at the same time, as they will compute
    at the same time, and measure the link between them. The first of them searches.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    >>> found = plan(model, torch.ones(8, 32), ranks=2, batch=16, schedules=["1F1B"], time_budget=0.0)
    >>> found.ranks, found.schedule_plan.stages, found.microbatch * found.microbatches
    (2, 2, 16)
    """
    check_member(group)
    tell = progress or (lambda text: None)

    def prepare() -> Prepared:
        check_request(ranks, batch, recompute, time_budget, speeds, cost)
        check_mode()
        if cost == "measured":
            check_measurable(ranks, group)
        names, limits = known_schedules(schedules), read_memory(memory, ranks)
        source = (model, inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
        tell("tracing the model")
        traced = ModelTracer("auto", *source).trace()
        counts = counts_of(traced, microbatch, batch, ranks)
        choices = all_choices(names, counts, batch, may_recompute(traced, recompute))
        return prepared(source, traced, [*choices], batch, limits)

    ready = on_each_rank(group, prepare)
    example = ready.source[1:]
    asked: dict[str, object] = {"ranks": ranks, "batch": batch, "cost": cost, "schedules": schedules}
    asked |= {"memory": ready.limits, "microbatch": ready.sizes, "recompute": recompute, "speeds": speeds}
    asked |= {"time_budget": time_budget, "machine": machine}
    check_alike(group, lambda: facts_of(asked, ready.traced, ready.source))
    pricing = Pricing(machine, cost == "measured", ranks, group)
    chains = pricing.chains(ready.traced, ready.sizes, *example, tell)
    dropped = [Alternative(choice, None, None, None, why) for choice, why in ready.dropped.items()]
    ranking = Ranking(ready.choices, chains, ranks, speeds, ready.limits, ready.remedies, tell, alternatives=dropped)
    best_cuts = on_first_rank(group, ranking.find)
    if cost == "measured":
        rehearsing = functools.partial(rehearse, ready.traced, *example, group, tell)
        times = rehearse_best(ranking, best_cuts, rehearsing, group)
        on_first_rank(group, lambda: ranking.rehearsed(times, speeds if group is None else None))
    best = on_first_rank(group, lambda: ranking.winner(time_budget))
    if best.giant is not None:
        warnings.warn(best.giant, PipeWarning, stacklevel=2)
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
        balance=f"{best.balance}, by {cost} times",
        source=ready.source,
    )
