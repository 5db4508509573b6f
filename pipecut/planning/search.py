"""plan(): search the cut, schedule, size of microbatches and recomputation together."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, PipeWarning
from ..pipe_ir import ModelTracer, TracedModel, flatten
from ..run import digest
from ..split import USED, Machine, MachineLike, RequestedOutputs, default_machine, machine_of
from ..text import Memory, dtype_name, parse_memory, phase, still
from .candidate import memory_remedies
from .choices import (
    Choice,
    Source,
    all_choices,
    check_request,
    failing_sizes,
    known_schedules,
    microbatch_counts,
    no_size_error,
    recompute_options,
)
from .costs import CostSource
from .group import check_member, check_same_facts, on_each_rank, on_first_rank
from .ranking import Ranking, measure_best, measure_cut
from .replicas import checked_wrappers, layouts, replica_counts
from .training_plan import Alternative, TrainingPlan, fingerprint

_LOG = logging.getLogger(__name__)
_PLAIN = (bool, int, float, str, type(None))


@phase(_LOG, "planning")
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
    machine: MachineLike | None = None,
    replicas: int | Literal["auto"] = 1,
    wrapper: Literal["auto", "ddp", "fully_shard"] = "auto",
    cost: Literal["analytic", "measured"] = "analytic",
    time_budget: float = 5.0,
    progress: Callable[[str], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> TrainingPlan:
    """Find the cut, schedule, size of microbatches and recomputation with the shortest step.

    The model is traced once; costs of every size of microbatch follow from the trace. `memory` is that of each rank,
    such as "24GB", for parameters, gradients, optimizer state (as Adam has it) and activations. `machine` gives the
    speed of ranks, by a name such as "h100", as a `Machine`, or as a file of machines; by default this one is measured,
    and for a model on the meta device it is an H100. `cost="measured"` runs every part of the model, instead of
    computing its time. Print the result for a table of the alternatives.

    `microbatch` is the size of the largest microbatch, or several such sizes to choose from. A batch need not be a
    multiple of its microbatches: 10 samples in 4 of them are 3, 3, 2 and 2, and each is priced as the largest. Sizes
    that the model cannot run are left out, and the table says why.

    `replicas` pipelines run side by side, each on its part of the ranks and of the batch; "auto" tries all numbers that
    divide both, and prints a table of them. Their stages are copies under DistributedDataParallel, or shards under
    `fully_shard`, by `wrapper`. The time of their collectives is that of rings over the slowest link between the
    copies of a stage: within a host of the machine's `ranks_per_host`, or between hosts. `build()` makes the process
    groups and wraps the stages.

    With a `group` all its ranks call this, and get the same plan: they measure at the same time, as they will compute
    at the same time, and measure the link between them. The first of them searches.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    >>> found = plan(model, torch.ones(8, 32), ranks=2, batch=16, schedules=["1F1B"], time_budget=0.0)
    >>> found.ranks, found.schedule_plan.stages, found.microbatch * found.microbatches
    (2, 2, 16)
    """
    check_member(group)
    report = progress or _report

    def prepare() -> _SearchSpace:
        check_request(ranks, batch, recompute, time_budget, speeds, cost)
        machine_of(machine)
        _check_mode()
        if cost == "measured":
            _check_measurable(ranks, group)
        names, limits = known_schedules(schedules), parse_memory(memory, ranks)
        counts, uneven = replica_counts(replicas, ranks, batch)
        wrappers = checked_wrappers(wrapper)
        _check_speeds(speeds, ranks, counts)
        source = (model, inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
        report("tracing the model")
        traced = RequestedOutputs.of(USED).marked(ModelTracer("auto", *source).trace())  # as the plan will be cut
        again = recompute_options(traced, recompute)
        links = machine_of(machine) or default_machine(traced)
        choices: list[Choice] = []
        for count in counts:
            part = batch // count
            try:
                sizes = microbatch_counts(traced, _fitting(microbatch, part), part, ranks // count)
            except InputError as error:
                if len(counts) == 1:
                    raise
                uneven[count] = str(error)
                continue
            choices += all_choices(names, sizes, part, again, layouts(ranks, count, wrappers, links))
        return _search_space(source, traced, choices, batch, limits, uneven)

    space = on_each_rank(group, prepare)
    example = space.source[1:]
    request: dict[str, object] = {"ranks": ranks, "batch": batch, "cost": cost, "schedules": schedules}
    request |= {"memory": space.limits, "microbatch": space.sizes, "recompute": recompute, "speeds": speeds}
    request |= {"time_budget": time_budget, "machine": machine, "replicas": replicas, "wrapper": wrapper}
    check_same_facts(group, lambda: _facts_of(request, space.traced, space.source))
    costs = CostSource(machine_of(machine), cost == "measured", ranks, group)
    chains = costs.chains(space.traced, space.sizes, *example, report)
    dropped = [Alternative(choice, None, None, None, why) for choice, why in space.dropped.items()]
    ranking = Ranking(space.choices, chains, speeds, space.limits, space.remedies, report, alternatives=dropped)
    best_cuts = on_first_rank(group, ranking.try_all)
    if cost == "measured":
        measure = functools.partial(measure_cut, space.traced, *example, group, report)
        times = measure_best(ranking, best_cuts, measure, group)
        on_first_rank(group, lambda: ranking.use_measured_times(times, speeds if group is None else None))
    best = on_first_rank(group, lambda: ranking.select(time_budget))
    if best.dominant_block is not None:
        warnings.warn(best.dominant_block, PipeWarning, stacklevel=3)  # past the phase around this
    return TrainingPlan(
        model_name=type(model).__name__,
        fingerprint=fingerprint(model),
        batch=batch,
        microbatch=best.choice.microbatch,
        recompute=best.choice.recompute,
        cuts=best.labels,
        report=best.report,
        memory=best.memory,
        layout=best.choice.layout,
        alternatives=best.alternatives,
        factorisations=best.factorisations,
        left_out=tuple(f"{count} pipelines: {why}" for count, why in sorted(space.uneven.items())),
        balance=f"{best.balance}, by {cost} times on {next(iter(chains.values())).machine.name}",
        times=_times_text(next(iter(chains.values())).machine, cost == "measured", group is not None),
        source=space.source,
    )


def _report(text: str) -> None:
    _LOG.debug("%s", text)
    still(text)


@dataclass(frozen=True)
class _SearchSpace:
    """The trace and all choices, before costs are known. `limits` are the bytes of each rank.

    `dropped` are choices with microbatches that the model cannot run, each with the reason.
    """

    source: Source
    traced: TracedModel
    choices: Sequence[Choice]
    dropped: Mapping[Choice, str]
    limits: Sequence[float] | None
    remedies: Sequence[str]
    uneven: Mapping[int, str]  # numbers of pipelines that the batch cannot be divided among

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of microbatches, without those that the model cannot run."""
        return sorted({choice.microbatch for choice in self.choices})


def _search_space(
    source: Source,
    traced: TracedModel,
    choices: Sequence[Choice],
    batch: int,
    limits: Sequence[float] | None,
    uneven: Mapping[int, str],
) -> _SearchSpace:
    """Separate the choices that the model can run from the others; raise if there are none."""
    sizes = {choice: {choice.microbatch, batch // choice.layout.replicas // choice.microbatches} for choice in choices}
    failing = failing_sizes(traced, source, set().union(*sizes.values()))
    dropped = {choice: failing[size] for choice, each in sizes.items() for size in sorted(each) if size in failing}
    left = [choice for choice in choices if choice not in dropped]
    if not left:
        raise no_size_error([*dropped.values(), *uneven.values()])
    remedies = memory_remedies(left, True in recompute_options(traced, "auto"))
    return _SearchSpace(source, traced, left, dropped, limits, remedies, uneven)


def _times_text(machine: Machine, measured: bool, together: bool) -> str:
    """Return how the times of a plan were got, in words."""
    if measured and together:
        return "measured together, by all ranks of the group at the same time: parts of the model, then stages"
    if measured:
        return "measured alone, in one process: parts of the model one by one, then the stages of the best cuts"
    source = f" (source: {machine.source})" if machine.source else ""
    return f"computed from operations and bytes, for {machine}{source}"


def _fitting(microbatch: int | Sequence[int] | None, batch: int) -> int | Sequence[int] | None:
    """Return those of several sizes that are not larger than the batch of a pipeline; all if that leaves none."""
    if not isinstance(microbatch, list | tuple):
        return microbatch
    return [size for size in microbatch if not isinstance(size, int) or size <= batch] or microbatch


def _check_speeds(speeds: Sequence[float] | None, ranks: int, counts: Sequence[int]) -> None:
    """Raise if speeds are not those of all ranks; with one pipeline the balance checks them."""
    if speeds is not None and len(speeds) != ranks and max(counts) > 1:
        raise InputError(f"speeds has {len(speeds)} values, and there are {ranks} ranks: give one for each rank")


def _check_mode() -> None:
    """Raise in inference mode: the memory of autograd and the time of a backward cannot be found there."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "plan() prices forwards and backwards, and torch.inference_mode() allows no backward: call it outside of it"
        )


def _check_measurable(ranks: int, group: dist.ProcessGroup | None) -> None:
    """Raise if the group has not the ranks to measure all stages at the same time."""
    size = ranks if group is None else dist.get_world_size(group)
    if size % ranks:
        raise InputError(
            f'plan(ranks={ranks}, group=...): cost="measured" runs the stages of {ranks} ranks, and the group has '
            f"{size}: pass a group whose size is a multiple of {ranks}, a number of ranks that divides {size}, or "
            'cost="analytic"'
        )


# Facts that ranks that plan together must agree on.


def _facts_of(request: Mapping[str, object], traced: TracedModel, source: Source) -> dict[str, str]:
    """Return the facts by name."""
    model, args, kwargs = source
    facts = {"the model": fingerprint(model), "the mode of the model": _mode(model)}
    facts |= {name: _text(value) for name, value in request.items()}
    facts["the example"] = ", ".join(map(_leaf, flatten((args, kwargs))[0]))
    # Two models may have the same parameters, and compute other things with them.
    operations = [_operation(op.target) for op in traced.operations if op.kind == "op"]
    spans = [f"{span.kind} {span.label}" for span in traced.spans()]
    facts["what was traced"] = f"{len(operations)} operations ({digest([*operations, *spans])})"
    return facts


def _text(value: object) -> str:
    """Return the same text for a list and a tuple of the same."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _mode(model: nn.Module) -> str:
    evaluated = [name for name, module in model.named_modules() if not module.training]
    if not evaluated:
        return "training"
    if len(evaluated) == sum(1 for _ in model.modules()):
        return "evaluation"
    return f"evaluation in {len(evaluated)} modules, {evaluated[0]!r} among them ({digest(evaluated)})"


def _leaf(value: Any) -> str:
    """Return the facts of a leaf of the example that the trace fixes: not the values of tensors."""
    if isinstance(value, Tensor):
        gradient = " with a gradient" if value.requires_grad else ""
        return f"{tuple(value.shape)} {dtype_name(value.dtype)}{gradient}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _operation(target: Any) -> str:
    """Return the name of an operator; the text of a callable may have an address in memory."""
    return str(getattr(target, "__name__", type(target).__name__))
