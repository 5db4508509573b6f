"""pipeline(): trace a model, find the cuts, cut it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from .errors import SplitError, warn
from .pipe import Pipe, check_is_uncut_model, unsent_text
from .pipe_ir import Dynamic, ModelTracer, TracedModel, TracerName, check_tracer_name, warn_of_fixed_dims
from .planning import measured_cut
from .split import (
    USED,
    AutomaticCuts,
    Balancing,
    CostName,
    MachineLike,
    Outputs,
    SplitPlan,
    SplitPoint,
    SplitPolicy,
    check_split_spec,
    cut_model,
    cuts_by_marks,
    cuts_by_policy,
    cuts_by_spec,
)
from .text import Memory

_logger = logging.getLogger(__name__)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
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
    machine: MachineLike | None = None,
    cut_inside_layers: bool | None = None,
    outputs: Outputs = USED,
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
    `dynamic="auto"` finds all sizes that the code leaves free, such as those of sequences and images.

    With `num_stages` the slowest stage is as fast as the places between modules allow, its transfers included. `cost`
    is "analytic", from the operations and bytes of the trace, the same on every rank; or "measured", from runs of its
    parts on this machine: then cut on one rank, and give its cuts to the others. `speeds` are those of the ranks, if
    they differ, `memory_limit` the memory of each rank or of all, such as "24GB" or a number of bytes, for parameters,
    gradients, Adam's state and the activations that 1F1B has in flight. Analytic times are those of `machine`: a name
    such as "h100", a `Machine`, or a file of machines; by default the device that the model is on, and for the meta
    device an H100. Layers that the model repeats stay whole unless a cut inside of one is better by more than 5 per
    cent: then few are cut, and `pipe.balance` says why. `cut_inside_layers=False` keeps them whole in any case, True
    allows every cut.

    A module that torch.export cannot trace, as it decides by the values of tensors or leaves torch, stays as it is,
    with a warning: the model is cut around it, and `pipe.traced.fallbacks` says why. For that a copy of the model runs
    on the example inputs, in a few sizes. `tracer="export"` makes it an error; `tracer="fx"` goes this way at once,
    without a warning.

    In a training step stages send what later stages use. An output that an earlier stage makes and nothing but the
    caller would read, such as the keys and values that a language model returns by default, stays there; in the result
    its place raises an error when it is read, by loss_fn too. `outputs` names those that are sent in any case, as in
    `["hidden_states"]` (numbers, for a tuple), or is "all". `pipe(...)` and evaluations return every output.

    Without any cut the model is one stage, with a warning, unless `num_stages=1` asks for that.

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
    >>> print(pipeline(model, (torch.ones(2, 5, 8),), num_stages=2, dynamic="auto").edges[0].spec)
    float32[batch, input_dim1, 8] grad
    """
    balancing = Balancing(cost, speeds, memory_limit, machine, cut_inside_layers)
    cuts = RequestedCuts(module, mb_args, mb_kwargs, split_spec, split_policy, num_stages, balancing)
    check_tracer_name(tracer)
    pipe = cut_model(ModelTracer(tracer, module, mb_args, mb_kwargs, dynamic), cuts, Pipe, outputs)
    if pipe.unsent:
        _logger.info(unsent_text(pipe))
    warn_of_fixed_dims(pipe.traced)
    if pipe.num_stages == 1 and num_stages is None:
        warn(
            f"pipeline() found no place to cut {type(module).__name__} at, and made one stage of it: say where with "
            "num_stages=2, split_spec={'module.path': SplitPoint.BEGINNING}, a split_policy, or pipe_split() marks in "
            "its forward. If one stage is meant, pass num_stages=1"
        )
    return pipe


class RequestedCuts:
    """Finds the cuts that a call of pipeline() asks for, in each trace of its model."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        split_spec: Mapping[str, SplitPoint] | None,
        split_policy: SplitPolicy | None,
        num_stages: int | None = None,
        balancing: Balancing | None = None,
    ) -> None:
        _check_request(module, split_spec, split_policy, num_stages)
        balancing = balancing or Balancing()
        balancing.check(num_stages)
        self.split_spec, self.split_policy = split_spec, split_policy
        self.automatic: AutomaticCuts | None = None
        if num_stages is not None:
            measured = partial(measured_cut, args=args, kwargs=kwargs, stages=num_stages, speeds=balancing.speeds)
            self.automatic = AutomaticCuts(num_stages, balancing, measured)
        self._warns = True

    def __call__(self, traced: TracedModel) -> SplitPlan:
        """Return the cuts of one trace; warn only for the first one."""
        warns, self._warns = self._warns, False
        self._check_marks(traced)
        if self.split_spec is not None:
            return cuts_by_spec(traced, self.split_spec, warns=warns)
        if self.split_policy is not None:
            return cuts_by_policy(traced, self.split_policy)
        if self.automatic is not None:
            return self.automatic.plan(traced)
        return cuts_by_marks(traced, warns=warns)

    def _check_marks(self, traced: TracedModel) -> None:
        named = {"split_policy": self.split_policy, "num_stages": self.automatic}
        other = next((name for name, value in named.items() if value is not None), None)
        if other is not None and any(op.kind == "mark" for op in traced.operations):
            raise SplitError(
                f"the model has pipe_split() marks in its forward, and {other} says where to cut too; remove the marks "
                f"or leave out {other}"
            )


def _check_request(module: nn.Module, split_spec: object, split_policy: object, num_stages: object) -> None:
    check_is_uncut_model(module)
    given = {"split_spec": split_spec, "split_policy": split_policy, "num_stages": num_stages}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise SplitError(f"{' and '.join(asked)} were both given, and each says where to cut; keep one of them")
    if split_spec is not None:
        check_split_spec(module, split_spec)
    if split_policy is not None and not callable(split_policy):
        raise SplitError(f"split_policy must be a function from GraphModule to GraphModule, got {split_policy!r}")
    if num_stages is not None and (not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1):
        raise SplitError(f"num_stages must be an integer of at least 1, got {num_stages!r}")
