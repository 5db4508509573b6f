"""plan(): everything that can be chosen for a training run, searched together."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, PipeWarning
from ..pipe_ir import ModelTracer, TracedModel, flatten
from ..split import Machine, changed_state
from ..text import Memory, dtype_name, parse_memory
from .candidate import remedies_of
from .choices import Choice, all_choices, check_request, known_schedules, microbatch_counts
from .costs import Pricing
from .group import check_alike, check_member, on_each_rank, on_first_rank
from .ranking import Ranking, nothing_runs, refused_sizes, rehearse, rehearse_best
from .training_plan import Alternative, Source, TrainingPlan, fingerprint

# MERGED: What is there before costs are known: the trace, the sizes of microbatches, and all choices.


@dataclass(frozen=True)
class _Prepared:
    """A request that was found to be sound. `limits` are the bytes of each rank.

    `dropped` are choices with microbatches that the model cannot run, and why.
    """

    source: Source
    traced: TracedModel
    choices: Sequence[Choice]
    dropped: Mapping[Choice, str]
    limits: Sequence[float] | None
    remedies: Sequence[str]

    @property
    def sizes(self) -> list[int]:
        """The sizes of microbatches, without those that the model cannot run."""
        return sorted({choice.microbatch for choice in self.choices})


def _prepared(
    source: Source, traced: TracedModel, choices: Sequence[Choice], batch: int, limits: Sequence[float] | None
) -> _Prepared:
    """The choices that the model can run, apart from the others; an error if there are none."""
    sizes = {choice: {choice.microbatch, batch // choice.microbatches} for choice in choices}
    refused = refused_sizes(traced, source, set().union(*sizes.values()))
    dropped = {choice: refused[size] for choice, each in sizes.items() for size in sorted(each) if size in refused}
    left = [choice for choice in choices if choice not in dropped]
    if not left:
        raise nothing_runs(dropped.values())
    remedies = remedies_of(left, True in _may_recompute(traced, "auto"))
    return _Prepared(source, traced, left, dropped, limits, remedies)


def _check_mode() -> None:
    """Refuse to plan where nothing could train: what autograd keeps, and what a backward takes, cannot be seen."""
    if torch.is_inference_mode_enabled():
        raise InputError(
            "plan() prices forwards and backwards, and torch.inference_mode() allows no backward: call it outside of it"
        )


def _check_measurable(ranks: int, group: dist.ProcessGroup | None) -> None:
    """Refuse to measure where there are not the ranks for it."""
    size = ranks if group is None else dist.get_world_size(group)
    if size % ranks:
        raise InputError(
            f'plan(ranks={ranks}, group=...): cost="measured" runs the stages of {ranks} ranks, and the group has '
            f"{size}: pass a group whose size is a multiple of {ranks}, a number of ranks that divides {size}, or "
            'cost="analytic"'
        )


def _counts_of(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    """The numbers of microbatches to try."""
    if "batch" not in {str(symbol) for symbol in traced.dims}:
        return [batch // _only_size(traced, microbatch, batch)]
    if microbatch is None:
        return microbatch_counts(batch, ranks)
    given = (
        [microbatch] if isinstance(microbatch, int) else list(microbatch) if isinstance(microbatch, Sequence) else []
    )
    wrong = [size for size in given if type(size) is not int or size < 1 or size > batch]
    if wrong or not given:
        raise InputError(f"microbatch={microbatch!r}: give sizes from 1 to the batch, {batch}")
    return list(dict.fromkeys(-(-batch // size) for size in given))


def _only_size(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int) -> int:
    """The size of microbatches for which the trace holds."""
    fixed = traced.hints.get("batch")
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
    return size


def _may_recompute(traced: TracedModel, recompute: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Whether activations may be computed again: not where a forward changes buffers, which it would do twice."""
    changed = sorted(changed_state(traced))
    if changed and recompute is True:
        raise InputError(
            f"recompute=True runs forwards twice, and this model's forward changes {changed[0]!r}: it would be changed "
            "twice; put the model in evaluation mode, or leave recompute at 'auto'"
        )
    if recompute == "auto":
        return (False,) if changed else (False, True)
    return (bool(recompute),)


# MERGED: What ranks that plan together must agree on, as short texts that can be sent and shown.


_PLAIN = (bool, int, float, str, type(None))


def _facts_of(asked: Mapping[str, object], traced: TracedModel, source: Source) -> dict[str, str]:
    """The facts by their names; the first that differs is shown."""
    model, args, kwargs = source
    facts = {"the model": fingerprint(model), "the mode of the model": _mode(model)}
    facts |= {name: _text(value) for name, value in asked.items()}
    facts["the example"] = ", ".join(map(_leaf, flatten((args, kwargs))[0]))
    # Two models may have the same parameters, and compute other things with them.
    operations = [_operation(op.target) for op in traced.operations if op.kind == "op"]
    spans = [f"{span.kind} {span.label}" for span in traced.spans()]
    facts["what was traced"] = f"{len(operations)} operations ({_digest([*operations, *spans])})"
    return facts


def _text(value: object) -> str:
    """A list and a tuple of the same are the same."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _mode(model: nn.Module) -> str:
    evaluated = [name for name, module in model.named_modules() if not module.training]
    if not evaluated:
        return "training"
    if len(evaluated) == sum(1 for _ in model.modules()):
        return "evaluation"
    return f"evaluation in {len(evaluated)} modules, {evaluated[0]!r} among them ({_digest(evaluated)})"


def _leaf(value: Any) -> str:
    """Values of tensors may differ; what the trace fixes may not."""
    if isinstance(value, Tensor):
        gradient = " with a gradient" if value.requires_grad else ""
        return f"{tuple(value.shape)} {dtype_name(value.dtype)}{gradient}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _operation(target: Any) -> str:
    """No address in memory, as the text of a callable may have it."""
    return str(getattr(target, "__name__", type(target).__name__))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


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

    def prepare() -> _Prepared:
        check_request(ranks, batch, recompute, time_budget, speeds, cost)
        _check_mode()
        if cost == "measured":
            _check_measurable(ranks, group)
        names, limits = known_schedules(schedules), parse_memory(memory, ranks)
        source = (model, inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
        tell("tracing the model")
        traced = ModelTracer("auto", *source).trace()
        counts = _counts_of(traced, microbatch, batch, ranks)
        choices = all_choices(names, counts, batch, _may_recompute(traced, recompute))
        return _prepared(source, traced, [*choices], batch, limits)

    ready = on_each_rank(group, prepare)
    example = ready.source[1:]
    asked: dict[str, object] = {"ranks": ranks, "batch": batch, "cost": cost, "schedules": schedules}
    asked |= {"memory": ready.limits, "microbatch": ready.sizes, "recompute": recompute, "speeds": speeds}
    asked |= {"time_budget": time_budget, "machine": machine}
    check_alike(group, lambda: _facts_of(asked, ready.traced, ready.source))
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
