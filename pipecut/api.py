"""pipeline(): trace a model, decide where to cut, cut it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from .errors import InputError, PipeError, SplitError
from .pipe import Pipe
from .pipe_ir import Dynamic, ModelTracer, TracedModel, TracerName, check_tracer_name, warn_of_fixed_dims
from .planning import AutomaticCuts, Balancing, CostName
from .split import (
    Modes,
    SplitPlan,
    SplitPoint,
    SplitPolicy,
    assign_state,
    check_is_uncut,
    check_split_spec,
    compare_modes,
    cut_model,
    cuts_by_marks,
    cuts_by_policy,
    cuts_by_spec,
    generated_paths,
    hooks_to_trace,
    owners_of_shared_buffers,
    partition,
    refuse_backward_hooks,
    refuse_forgotten,
    warn_of_assigned_attributes,
)
from .text import Memory


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    num_stages: int | None = None,
    dynamic: Dynamic | None = None,
    tracer: TracerName = "auto",
    *,
    cost: CostName = "analytic",
    speeds: Sequence[float] | None = None,
    memory_limit: Memory = None,
) -> Pipe:
    """Cut a model into stages.

    Say where to cut in one of four ways: `pipe_split()` marks in the model's forward; `split_spec`, which cuts before
    or after modules given by path ("blk#1" is the second call of blk), and at the marks, if there are any;
    `split_policy`, a function that inserts marks in a GraphModule; or `num_stages`, for balanced cuts found
    automatically.

    The model is traced with `mb_args` and `mb_kwargs`, example inputs of one microbatch, and is not changed: not
    patched, not moved, not run on real data. The stages share its parameters. Other batch sizes work too, unless
    the model's code fixes the size. `dynamic` names more sizes that change from call to call, by input and dim, such
    as `{"input_ids": {1: "seq"}, "labels": ("batch", "seq")}`; dims of one name have one size in every call, and the
    one called "batch" is cut into microbatches. Sizes that the model's code fixes are warned of, with the line.

    With `num_stages` the slowest stage is as fast as the places between modules allow, its transfers included. `cost`
    is "analytic", from the operations and bytes of the trace, the same on every rank; or "measured", from runs of its
    parts on this machine: then cut on one rank, and give its cuts to the others. `speeds` are those of the ranks, if
    they differ, `memory_limit` the memory of each rank or of all, such as "24GB" or a number of bytes, for parameters,
    gradients, Adam's state and the activations that 1F1B has in flight.

    A module that torch.export cannot trace, as it decides by the values of tensors or leaves torch, stays as it is,
    with a warning: the model is cut around it, and `pipe.traced.fallbacks` says why. For that a copy of the model runs
    on the example inputs, in a few sizes. `tracer="export"` makes it an error; `tracer="fx"` goes this way at once,
    without a warning.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> pipe = pipeline(model, (torch.ones(2, 8),), num_stages=2)
    >>> pipe.num_stages
    2
    >>> pipe = pipeline(model, (torch.ones(2, 5, 8),), num_stages=2, dynamic={"input": {1: "seq"}})
    >>> print(pipe.edges[0].spec)
    float32[batch, seq, 8] grad
    >>> pipe(torch.ones(3, 7, 8)).shape
    torch.Size([3, 7, 8])
    """
    _check_request(module, split_spec, split_policy, num_stages)
    balancing = Balancing(cost, speeds, memory_limit)
    balancing.check(num_stages)
    check_tracer_name(tracer)
    model_tracer = ModelTracer(tracer, module, mb_args, mb_kwargs, dynamic)
    automatic = AutomaticCuts(num_stages, balancing, mb_args, mb_kwargs) if num_stages is not None else None
    request = _Request(module, model_tracer, split_spec, split_policy, automatic)
    traced, plan = request.traced_with_its_hooks()
    warn_of_fixed_dims(traced)
    return Pipe.of(cut_model(traced, plan, modes=request.modes(traced, plan)))


def cut_where(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    find_cuts: Callable[[TracedModel], SplitPlan],
) -> Pipe:
    """Cut a model where a function of its trace says."""
    _check_request(module, None, None, None)
    request = _Request(module, ModelTracer("auto", module, args, kwargs), None, None, None)
    request.find_cuts = find_cuts
    traced, plan = request.traced_with_its_hooks()
    return Pipe.of(cut_model(traced, plan, modes=request.modes(traced, plan)))


def _check_request(module: object, split_spec: object, split_policy: object, num_stages: object) -> None:
    if isinstance(module, Pipe):
        raise PipeError("this model is cut already: it is a Pipe; call pipeline() with the model that it was made from")
    if not isinstance(module, nn.Module):
        raise InputError(f"pipeline() takes an nn.Module, got {type(module).__name__}")
    check_is_uncut(module)
    given = {"split_spec": split_spec, "split_policy": split_policy, "num_stages": num_stages}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise SplitError(f"{' and '.join(asked)} were both given, and each says where to cut; keep one of them")
    if split_spec is not None:
        check_split_spec(module, split_spec)
    if split_policy is not None and not callable(split_policy):
        raise SplitError(f"split_policy must be a function from GraphModule to GraphModule, got {split_policy!r}")
    if num_stages is not None and (not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1):
        raise SplitError(f"num_stages must be a whole number of at least 1, got {num_stages!r}")


class _Request:
    """One call of pipeline(): the model, the example and the way to find the cuts."""

    def __init__(
        self,
        module: nn.Module,
        tracer: ModelTracer,
        split_spec: Mapping[str, SplitPoint] | None,
        split_policy: SplitPolicy | None,
        automatic: AutomaticCuts | None,
    ) -> None:
        self.module, self.tracer = module, tracer
        self.split_spec, self.split_policy, self.automatic = split_spec, split_policy, automatic
        self.live_hooks: set[str] = set()
        self.find_cuts: Callable[[TracedModel], SplitPlan] | None = None

    def trace(self, training: bool | None = None) -> TracedModel:
        """The model traced as it is now known to be needed."""
        return self.tracer.trace(self.live_hooks, training)

    def traced_with_its_hooks(self) -> tuple[TracedModel, SplitPlan]:
        """Trace and plan; once more if modules turn out to be cut whose hooks have to be part of the trace."""
        traced = self.trace()
        plan = self.plan(traced, warn=True)
        programs = partition(traced, plan.ticks)
        refuse_backward_hooks(traced, programs)
        self.live_hooks = hooks_to_trace(traced, programs)
        if self.live_hooks:
            traced = self.trace()
            plan = self.plan(traced)
        programs = partition(traced, plan.ticks)
        refuse_forgotten(traced, programs)
        warn_of_assigned_attributes(traced, programs)
        return traced, plan

    def plan(self, traced: TracedModel, *, warn: bool = False) -> SplitPlan:
        """Where to cut."""
        if self.find_cuts is not None:
            return self.find_cuts(traced)
        has_marks = any(op.kind == "mark" for op in traced.operations)
        named = {"split_policy": self.split_policy, "num_stages": self.automatic}
        other = next((name for name, value in named.items() if value is not None), None)
        if has_marks and other is not None:
            raise SplitError(
                f"the model has pipe_split() marks in its forward, and {other} says where to cut too; remove the marks "
                f"or leave out {other}"
            )
        if self.split_spec is not None:
            return cuts_by_spec(traced, self.split_spec, warn=warn)
        if self.split_policy is not None:
            return cuts_by_policy(traced, self.split_policy)
        if self.automatic is not None:
            return self.automatic.plan(traced)
        return cuts_by_marks(traced, warn=warn)

    def modes(self, traced: TracedModel, plan: SplitPlan) -> Modes:
        """How the generated code follows train() and eval(); a second trace where the forward looks at the mode."""
        programs = partition(traced, plan.ticks)
        moody = generated_paths(programs) | owners_of_shared_buffers(traced, programs)
        if not moody & traced.mode_readers:
            return Modes()
        other = self.trace(training=not self.module.training)
        other_programs = partition(other, self.plan(other).ticks)
        assign_state(other, other_programs)  # a buffer may be updated in that mode only, and be in two stages
        return compare_modes(traced, programs, other, other_programs)
