"""TrainingPlan: the chosen cut, schedule and microbatches, with the predicted step and a table of alternatives."""

from __future__ import annotations

import hashlib
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ..errors import InputError, SplitError, printable
from ..pipe import Pipe, check_is_uncut_model
from ..pipe_ir import Dynamic, ModelTracer, TracedModel
from ..run import PlannedSchedule
from ..schedule import Plan, Report, lower_bound, problem_for
from ..split import USED, SplitPlan, chain_of, changed_state, cut_model
from ..text import counted, format_bytes
from .candidate import Candidate
from .choices import Choice, Source
from .costs import computations_of
from .measure import checkpoint_forward
from .replicas import Layout

if TYPE_CHECKING:
    from ..training import TrainingMesh


@dataclass(frozen=True)
class TrainingPlan:
    """Plan for training a model. `report` is the simulated step, in seconds and bytes; `memory` the bytes per rank.

    `microbatch` is the number of samples in the largest of the microbatches; the others may have one less.
    `balance` says how even the cut is. `layout` has the pipelines that run side by side: report and memory are those of
    one of them, whose batch is `batch / replicas`; `factorisations` has the best plan for each number of them.
    `times` says how the times were got, and `executed` has the steps that `pipecut.compare` compared with the plan:
    their executed time as a part of the predicted one.
    Print it for a table. `source` is the model and the example inputs, which a file does not hold.
    """

    model_name: str
    fingerprint: str
    batch: int
    microbatch: int
    recompute: bool
    cuts: tuple[str, ...]
    report: Report
    memory: tuple[float, ...]
    layout: Layout
    alternatives: tuple[Alternative, ...] = ()
    factorisations: tuple[Alternative, ...] = ()
    left_out: tuple[str, ...] = ()
    balance: str = ""
    times: str = ""
    executed: list[float] = field(default_factory=list, repr=False, compare=False)
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def schedule_plan(self) -> Plan:
        """Return the plan of the schedule."""
        return self.report.plan

    @property
    def ranks(self) -> int:
        """Return the number of ranks, of all pipelines together."""
        return self.layout.ranks

    @property
    def replicas(self) -> int:
        """Return the number of pipelines."""
        return self.layout.replicas

    @property
    def microbatches(self) -> int:
        return self.report.plan.microbatches

    @property
    def step_time(self) -> float:
        """Return the predicted seconds of a step."""
        return self.report.makespan

    def note_executed(self, ratio: float) -> None:
        """Keep the executed time of a step, as a part of the predicted one; `pipecut.compare` does so."""
        self.executed.append(ratio)

    def pipe(self, model: nn.Module | None = None, dynamic: Dynamic | None = None) -> Pipe:
        """Return the model, cut as planned; `dynamic` are sizes that change from call to call, as for `pipeline`."""
        given, args, kwargs = self._source(model)
        return _cut_at_labels(given, args, kwargs, self.cuts, dynamic)

    def build(
        self,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        dynamic: Dynamic | None = None,
        **options: Any,
    ) -> PlannedSchedule:
        """Return the schedule of a rank with its stages; without a rank, that of one pipeline in this process.

        `dynamic` are sizes that change from call to call, as for `pipeline`; `options` go to the schedule. In a plan of
        several pipelines all ranks of the job call this: it makes their process groups, and wraps the stages. Each
        pipeline takes its part of the batch, `data_rank(rank)` of `replicas`.
        """
        if rank is not None and (isinstance(rank, bool) or rank not in range(self.ranks)):
            raise InputError(f"rank {rank!r} is not one of the plan's ranks, 0 to {self.ranks - 1}")
        pipe = self.pipe(model, dynamic)
        if self.recompute:
            _check_runs_twice(pipe.traced)
        mesh = None if rank is None or self.replicas == 1 else self._mesh(rank, group)
        place = None if rank is None else self.layout.place(rank)
        held = range(pipe.num_stages) if place is None else self.schedule_plan.placement.stages_of[place]
        stages = [pipe.build_stage(index, device, group if mesh is None else mesh.pp_group) for index in held]
        for stage in stages:
            if self.recompute:
                checkpoint_forward(stage.submod)
            if mesh is not None:
                stage.submod = _wrapped(stage.submod, self.layout, mesh)
        return PlannedSchedule(stages, computations_of(self.schedule_plan), loss_fn, **options)

    def data_rank(self, rank: int) -> int:
        """Return the part of the batch that the pipeline of a rank takes, of `replicas`."""
        return rank % self.replicas if self.layout.inner == "dp" else rank // self.layout.depth

    def _mesh(self, rank: int, group: dist.ProcessGroup | None) -> TrainingMesh:
        from ..training import device_mesh  # with checkpoints and all that, slow to import

        layout = self.layout
        if group is not None or not dist.is_initialized() or dist.get_rank() != rank:
            raise InputError(
                f"a plan of {layout.replicas} pipelines makes the groups of all its {layout.ranks} ranks: call "
                "build(rank, device) without a group, in every process of a job of as many, with the rank that "
                "torch.distributed.get_rank() returns"
            )
        order = ("pp", "dp", "fsdp") if layout.inner == "dp" else ("dp", "fsdp", "pp")
        if layout.wrapper == "ddp":
            return device_mesh(layout.depth, dp=layout.replicas, order=order)
        return device_mesh(layout.depth, fsdp=layout.replicas, order=order)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; the model and the inputs stay outside."""
        from .plan_file import write_plan

        write_plan(self, Path(path))

    @classmethod
    def load(
        cls, path: str | Path, model: nn.Module, inputs: tuple[Any, ...] | Tensor, kwargs: dict[str, Any] | None = None
    ) -> TrainingPlan:
        """Read what `save` wrote, for the model that it was made for."""
        from .plan_file import read_plan

        args = inputs if isinstance(inputs, tuple) else (inputs,)
        return read_plan(Path(path), (model, args, dict(kwargs or {})))

    def _source(self, model: nn.Module | None) -> Source:
        assert self.source is not None  # by construction: plan() and load() both know the model
        given = self.source[0] if model is None else model
        if fingerprint(given) != self.fingerprint:
            raise InputError(
                f"this plan was made for a {self.model_name} with other parameters than this {type(given).__name__} "
                "has: make a plan for it with pipecut.plan()"
            )
        return (given, *self.source[1:])

    def __str__(self) -> str:
        return _plan_table(self)


@dataclass(frozen=True)
class Alternative:
    """A choice that was tried and not taken, with the reason."""

    choice: Choice
    step_time: float | None
    bubble: float | None
    memory: tuple[float, ...] | None
    reason: str
    collectives: float | None = None  # the part of the step that a rank spends in those over copies, at the most

    @classmethod
    def of(cls, candidate: Candidate, reason: str) -> Alternative:
        """Return the alternative for a candidate that was not chosen."""
        bubble = candidate.report.bubble_rate_makespan
        return cls(
            candidate.choice, candidate.step_time, bubble, candidate.memory, reason, collectives=candidate.collectives
        )


def fingerprint(model: nn.Module) -> str:
    """Return a digest of an architecture: names, shapes and dtypes of all parameters. Files of plans hold it."""
    facts = [f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in model.named_parameters()]
    return hashlib.sha256("\n".join([type(model).__name__, *facts]).encode()).hexdigest()[:16]


def _wrapped(module: nn.Module, layout: Layout, mesh: TrainingMesh) -> nn.Module:
    """Return a stage's module as a copy or a shard of its copies."""
    if layout.wrapper == "fully_shard":
        from torch.distributed.fsdp import fully_shard  # slow to import

        fully_shard(module, mesh=mesh["fsdp"])
        return module
    empty = next((name for name, each in module.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise InputError(
            f"DistributedDataParallel copies values, and {empty} is on the meta device, without values: give build() a "
            "model= with values, or plan with wrapper='fully_shard'"
        )
    from torch.nn.parallel import DistributedDataParallel

    trains = any(parameter.requires_grad for parameter in module.parameters())
    group = mesh["dp"].get_group()
    return DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True) if trains else module


def _check_runs_twice(traced: TracedModel) -> None:
    """Raise if the model's forward changes its state: it may have been planned in another mode."""
    changed = sorted(changed_state(traced))
    if changed:
        raise InputError(
            f"this plan recomputes activations, and the forward of the model, in its current mode, changes "
            f"{changed[0]!r}: it would be changed twice; put the model in evaluation mode, or make the plan again "
            "with the model in the mode in which it trains"
        )


def _cut_at_labels(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    labels: Sequence[str],
    dynamic: Dynamic | None = None,
) -> Pipe:
    """Trace the model, and cut it at the places with these labels."""

    def find_cuts(traced: TracedModel) -> SplitPlan:
        places = {place.cut.label: place.cut for place in chain_of(traced).places}
        missing = [label for label in labels if label not in places]
        if missing:
            raise SplitError(
                f"{missing[0]}, which the plan asks for, is not a place where this model can be cut: make the plan "
                "again with pipecut.plan()"
            )
        return SplitPlan(tuple(places[label] for label in labels))

    check_is_uncut_model(model)
    return cut_model(ModelTracer("auto", model, args, kwargs, dynamic), find_cuts, Pipe, USED)


# Table of a training plan: the choice, its stages, and the alternatives.

_MOST_ROWS = 20


def _plan_table(plan: TrainingPlan) -> str:
    """Return the text of a plan."""
    out = io.StringIO()
    console = Console(file=out, width=120, markup=False)
    scheduled = plan.schedule_plan
    again = ", activations computed again" if plan.recompute else ""
    console.print(
        f"{plan.model_name} on {plan.ranks} ranks: {_copies(plan)}{scheduled.name}, {plan.microbatches} microbatches "
        f"of {plan.microbatch}{again}\npredicted: {1000 * plan.step_time:.4g} ms per step, bubble "
        f"{plan.report.bubble_rate_makespan:.1%}\n{_bound(plan)}{_sums(plan)}\nbalance of the cut: {plan.balance}"
        f"\ntimes: {plan.times}; {_worth(plan.executed)}",
        highlight=False,
        soft_wrap=True,
    )
    for rank, size in enumerate(plan.memory):
        console.print(f"  rank {rank} needs at most {format_bytes(size)}", highlight=False)
    for stage, label in enumerate(plan.cuts, 1):
        console.print(
            f"  stage {stage} begins at {label}, on rank {scheduled.placement.rank_of[stage]}", highlight=False
        )
    if plan.factorisations:
        console.print(_table("pipelines side by side, the best plan for each number of them", plan.factorisations))
    for line in plan.left_out:
        console.print(f"  not tried: {line}", highlight=False, soft_wrap=True)
    if plan.alternatives:
        console.print(_table("alternatives", plan.alternatives))
    return printable(out.getvalue().rstrip())


def _bound(plan: TrainingPlan) -> str:
    """Return how far the schedule may be from the best one for this cut and placement, in words."""
    scheduled = plan.schedule_plan
    bound = lower_bound(
        problem_for(scheduled.placement, scheduled.microbatches, plan.report.costs, [float("inf")] * scheduled.ranks),
        "makespan",
    )
    computing = [span for span in plan.report.timeline if span.action.is_compute]
    taken = max(span.end for span in computing) - min(span.start for span in computing)
    gap = max(0.0, taken / bound - 1)
    aside = ", sums of shared gradients aside" if scheduled.dataflow.ties else ""
    return f"no schedule of these stages takes less than {1000 * bound:.4g} ms{aside}: at most {gap:.1%} above the best"


def _sums(plan: TrainingPlan) -> str:
    scheduled, costs = plan.schedule_plan, plan.report.costs
    total = sum(costs.tie_time(scheduled, number) for number in range(len(scheduled.dataflow.ties)))
    return f"\nof the step, {1000 * total:.4g} ms are sums of gradients that ranks share" if total else ""


def _worth(executed: Sequence[float]) -> str:
    """Return what the prediction has been worth so far, in words."""
    if not executed:
        return "no executed step was compared with them yet (pipecut.compare)"
    steps, middle = counted(len(executed), "step"), statistics.median(executed)
    return f"{steps} took {min(executed):.2f} to {max(executed):.2f} of the predicted time, {middle:.2f} at the median"


def _copies(plan: TrainingPlan) -> str:
    """Return the pipelines in words, if there are several."""
    layout = plan.layout
    if layout.replicas == 1:
        return ""
    near = "copies of a stage" if layout.inner == "dp" else "ranks of a pipeline"
    return (
        f"{layout.replicas} pipelines of {counted(layout.depth, 'rank')} under {layout.wrapper}, {near} on "
        f"neighbouring ranks, each for {plan.batch // layout.replicas} samples: "
    )


def _table(title: str, rows: Sequence[Alternative]) -> Table:
    """Return the table of some choices; pipelines and collectives are in it if one has several."""
    copied = any(each.choice.layout.replicas > 1 for each in rows)
    names = ["schedule", "microbatches", "recompute", "step, ms", "bubble", "peak memory"]
    columns = ["pipelines", *names, "collectives"] if copied else names
    table = Table(*columns, "why it lost", title=title)
    for each in rows[:_MOST_ROWS]:
        table.add_row(
            *([_pipelines(each.choice.layout)] if copied else []),
            *_words(each.choice),
            "-" if each.step_time is None else f"{1000 * each.step_time:.4g}",
            "-" if each.bubble is None else f"{each.bubble:.1%}",
            "-" if each.memory is None else format_bytes(max(each.memory)),
            *(["-" if each.collectives is None else f"{each.collectives:.1%}"] if copied else []),
            each.reason,
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} more"
    return table


def _pipelines(layout: Layout) -> str:
    return f"{layout.replicas} x {layout.depth}" + (f", {layout.wrapper}" if layout.wrapper else "")


def _words(choice: Choice) -> tuple[str, str, str]:
    return choice.schedule, f"{choice.microbatches} x {choice.microbatch}", "yes" if choice.recompute else "no"
