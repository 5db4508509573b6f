"""From a model to a Pipe: trace it, find the cuts, trace it again where that is needed, and cut it.

`cut_model` decides how often a model is traced; `cut_trace` runs the passes over one trace, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import sympy

from ..errors import InputError, SplitError
from ..pipe_ir import (
    HERE,
    ModelTracer,
    RecomputedValue,
    Ref,
    StageInfo,
    Template,
    TracedModel,
    Unsent,
    bind_inputs,
    paused_collector,
)
from ..text import phase, structure_text
from .build import (
    build_stage_module,
    check_no_backward_hooks,
    generated_paths,
    hooks_to_trace,
    warn_of_assigned_attributes,
)
from .codegen import Emitter, Function, Naming, name_values
from .cost import flops_between
from .dataflow import ALL, NUMBER_DTYPES, Flow, Outputs, RequestedOutputs, StageFlow, flow, wire_order
from .modes import ModeDifferences, compare_modes
from .points import SplitPlan
from .program import Piece, WholeCall, conditions_of_generated_code, partition, used_by_items, walk
from .recompute import recompute
from .state import (
    assign_state,
    check_no_common_memory,
    find_ties,
    module_aliases,
    owners_of_shared_buffers,
    plain_references,
    unused_parameters,
)
from .stay_whole import Checks, Cuts

_LOG = logging.getLogger(__name__)

_FindCuts: TypeAlias = Callable[[TracedModel], SplitPlan]
_PipeT = TypeVar("_PipeT")


def cut_model(tracer: ModelTracer, find_cuts: _FindCuts, into: Callable[..., _PipeT], outputs: Outputs = ALL) -> _PipeT:
    """Trace a model, find its cuts, and cut it there; `into` is the class that the cut model becomes.

    It gets a function that does all this again for a call of another form: see `_cut_again`.
    """
    requested = RequestedOutputs.of(outputs)
    retrace = partial(_cut_again, tracer, find_cuts, into, requested)
    what = f"cutting {type(tracer.model).__name__}"
    with phase(_LOG, what), paused_collector():  # most of what is made meanwhile stays
        return _Cutter(tracer, find_cuts, requested).cut(partial(into, retrace=retrace))


def _cut_again(
    tracer: ModelTracer,
    find_cuts: _FindCuts,
    into: Callable[..., _PipeT],
    outputs: RequestedOutputs,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    first: TracedModel,
    variant: int,
    apart: Collection[str],
) -> _PipeT:
    """Cut a model for a call of another form than in its first trace, at the same places.

    Modules at the paths of `apart` have generated forwards already, and get another: their own code is gone.
    """
    again = tracer.for_call(args, kwargs, first.training, first.device)
    what = f"cutting {type(tracer.model).__name__} for calls of another form"
    with phase(_LOG, what), paused_collector():
        return _Cutter(again, find_cuts, outputs, variant, apart).cut(into)


class _Cutter:
    """Cuts a model for calls of one form, traced as often as needed."""

    def __init__(
        self,
        tracer: ModelTracer,
        find_cuts: _FindCuts,
        outputs: RequestedOutputs,
        variant: int = 0,
        apart: Collection[str] = (),
    ) -> None:
        self.tracer, self.find_cuts, self.outputs = tracer, find_cuts, outputs
        self.variant, self.apart = variant, apart
        self.live_hooks: set[str] = set()
        self._other: tuple[TracedModel, Checks] | None = None  # the trace in the other mode, while the model is cut

    def cut(self, into: Callable[..., _PipeT]) -> _PipeT:
        """Trace the model, and cut it.

        The first trace shows which modules are cut. If some of these have forward hooks, the hooks must be part of a
        second trace; if their forward looks at `training`, a trace in the other mode shows what differs there.
        """
        cuts = self._traced()
        if not self.variant:
            self.outputs.check(cuts.traced)
        if self.tracer.enlarges and not _holds_for_example(self.tracer, cuts.traced, cuts.programs):
            self.tracer.enlarges = False
            return self.cut(into)
        check_no_backward_hooks(cuts.traced, cuts.programs)
        self.live_hooks = hooks_to_trace(cuts.traced, cuts.programs)
        if self.live_hooks:
            cuts = self._traced()
        with phase(_LOG, "running the model again, to compare"):
            checks = Checks(self.tracer, cuts.traced, self.live_hooks)
        cuts = checks.kept_whole(cuts, self.find_cuts, partial(partition, apart=self.apart))
        warn_of_assigned_attributes(cuts.traced, cuts.programs)
        modes = self._modes(cuts, self.apart)
        whole = self._whole(cuts, checks, into) if _leaves_outputs(cuts) else None
        self._other = None
        with phase(_LOG, "writing the code of the stages"):
            return _cut_programs(cuts, modes, partial(into, whole=whole), variant=self.variant)

    def _traced(self, training: bool | None = None) -> Cuts:
        with phase(_LOG, "tracing the model"):
            traced = self.outputs.marked(self.tracer.trace(self.live_hooks, training=training))
        with phase(_LOG, "finding where to cut"):
            plan = self.find_cuts(traced)
        return Cuts(traced, plan, partition(traced, plan.ticks, apart=self.apart))

    def _modes(self, cuts: Cuts, apart: Collection[str]) -> ModeDifferences:
        """Compare with a trace in the other mode, if generated code depends on it."""
        modes, traced, programs = ModeDifferences(), cuts.traced, cuts.programs
        mode_dependent = generated_paths(programs) | owners_of_shared_buffers(traced, programs)
        if mode_dependent & traced.mode_readers:
            other, checks = self._other_mode(training=not traced.training)
            known = {each.path: each for each in (*other.fallbacks, *traced.fallbacks)}
            other = replace(other, fallbacks=tuple(known.values()))
            other = self.outputs.marked(other) if traced.optional_outputs else other
            other_plan = self.find_cuts(other)
            other_programs = partition(other, other_plan.ticks, apart=apart)
            assign_state(other, other_programs)  # a buffer may be updated in that mode only, and be in two stages
            modes = compare_modes(traced, programs, other, other_programs)
            changing = checks.changing_paths(Cuts(other, other_plan, other_programs))
            modes = modes.bound_to(programs, changing, traced.training)
        return replace(modes, only_with_gradients=cuts.only_with_gradients)

    def _other_mode(self, training: bool) -> tuple[TracedModel, Checks]:
        if self._other is None:
            with phase(_LOG, "tracing the model in the other mode, training or evaluation"):
                traced = self.tracer.trace(self.live_hooks, training=training)
            self._other = traced, Checks(self.tracer, traced, self.live_hooks, training=training)
        return self._other

    def _whole(self, cuts: Cuts, checks: Checks, into: Callable[..., _PipeT]) -> Callable[[int], _PipeT]:
        """Return a function that cuts the same trace for calls that return all of the output, as the variant `number`.

        What needs the history of the trace is done now; an error is kept until somebody makes such a call.
        """
        apart = self.apart or generated_paths(cuts.programs)
        traced = replace(cuts.traced, optional_outputs=frozenset())
        failure: SplitError | None = None
        try:
            programs = partition(traced, cuts.plan.ticks, apart=apart)
            check_no_backward_hooks(traced, programs)
            every = Cuts(traced, cuts.plan, programs, cuts.only_with_gradients)
            every = checks.kept_whole(every, self.find_cuts, partial(partition, apart=apart))
            every = replace(every, traced=replace(every.traced, history=None))
            # If there is a trace in the other mode, it is used now; if not, it can wait until it is needed.
            modes = None if self._other is None else self._modes(every, apart)
        except SplitError as error:
            failure = error.with_traceback(None)

        def cut(number: int) -> _PipeT:
            if failure is not None:
                raise failure
            differences = self._modes(every, apart) if modes is None else modes
            self._other = None
            return _cut_programs(every, differences, into, variant=number)

        return cut


def _leaves_outputs(cuts: Cuts) -> bool:
    """Return True if there are outputs that the last stage does not get, unless it makes them once more."""
    traced, ticks = cuts.traced, cuts.plan.ticks
    made_before = {index for index in traced.optional_outputs if ticks and traced.operations[index].tick < ticks[-1]}
    return bool(made_before - used_by_items(cuts.programs[-1].items))


def _holds_for_example(tracer: ModelTracer, traced: TracedModel, programs: Sequence[Piece]) -> bool:
    """Return True unless an example of one row was traced with several, and the code that is cut tells them apart."""
    if 1 not in traced.hints.values():
        return True
    call = replace(traced.call, conditions=conditions_of_generated_code(traced, programs))
    try:
        bind_inputs(call, tracer.args, tracer.kwargs or {})
    except InputError:
        return False
    return True


def cut_trace(
    traced: TracedModel,
    plan: SplitPlan,
    into: Callable[..., _PipeT],
    *,
    keep_modules: bool = True,
    may_recompute: bool = True,
) -> _PipeT:
    """Cut one trace as it is, for its own mode.

    With `keep_modules=False` all stages are generated code; with `may_recompute=False` every value is sent.
    """
    programs = partition(traced, plan.ticks, keep_modules=keep_modules)
    return _cut_programs(Cuts(traced, plan, programs), ModeDifferences(), into, may_recompute)


def _cut_programs(
    cuts: Cuts, modes: ModeDifferences, into: Callable[..., _PipeT], may_recompute: bool = True, variant: int = 0
) -> _PipeT:
    traced, plan, programs = cuts.traced, cuts.plan, cuts.programs
    names = name_values(traced)
    recomputed: tuple[RecomputedValue, ...] = ()
    if may_recompute:
        programs, recomputed = recompute(traced, plan.ticks, programs, names, modes)
    traced = replace(traced, conditions=conditions_of_generated_code(traced, programs), history=None)
    flows = flow(traced, plan.ticks, programs, names)
    holdings = assign_state(traced, programs)
    naming = Naming(traced, names, module_aliases(traced.model))
    functions = [
        Emitter(naming, modes, index, variant).stage(
            program, stage.inputs, _prologue(traced, program, stage, names, returns), returns
        )
        for index, (program, stage) in enumerate(zip(programs, flows.stages, strict=True))
        for returns in [_returns(traced, flows, index)]
    ]
    references = plain_references(traced.model)
    modules = tuple(
        build_stage_module(traced, index, holdings[index], functions[index], references, variant)
        for index in range(len(programs))
    )
    check_no_common_memory(modules)
    bounds = [traced.root.begin, *plan.ticks, traced.root.end + 1]
    return into(
        traced=traced,
        stages=modules,
        stage_infos=tuple(
            replace(
                _info(index, program, flows.stages[index], functions[index], names, flops_between(traced, begin, end)),
                structure=structure_text(modules[index]),
                changing=_changing(traced, program),
            )
            for index, (program, begin, end) in enumerate(zip(programs, bounds, bounds[1:], strict=False))
        ),
        edges=flows.edges,
        tied_parameters=find_ties(modules),
        unused_parameters=unused_parameters(traced),
        recomputed=recomputed,
        only_returned=flows.only_returned,
        unsent=flows.unsent,
        balance=plan.balance,
    )


def _returns(traced: TracedModel, flows: Flow, index: int) -> Any:
    if index == len(flows.stages) - 1:
        places = {each.value: Unsent(each.name, each.stage) for each in flows.unsent}
        return traced.output.converted(lambda leaf: places.get(leaf.index, leaf) if isinstance(leaf, Ref) else leaf)
    return {value: _as_sent(traced, value) for value in flows.stages[index].outputs}


def _as_sent(traced: TracedModel, value: int) -> str:
    """Return the way that generated code sends a value, as a format of its name."""
    op = traced.operations[value]
    if op.number is not None:
        return f"torch.full((), {{}}, dtype={NUMBER_DTYPES[op.number]}, device=device)"
    order = wire_order(op, traced)
    # What is sent must lie in memory in order, whatever the model made it from.
    return f"{{}}{f'.permute({list(order)})' if order else ''}.contiguous()"


def _prologue(
    traced: TracedModel, program: Piece, stage: StageFlow, names: Mapping[int, str], returns: Any
) -> list[str]:
    """Return the lines that a stage computes from its inputs before anything else."""
    lines = []
    for value in stage.inputs:
        order = wire_order(traced.operations[value], traced)
        if order:
            back = [order.index(dim) for dim in range(len(order))]
            lines.append(f"{names[value]} = {names[value]}.permute({back})")
    lines += [f"{symbol} = {names[value]}.shape[{dim}]" for symbol, (value, dim) in stage.sizes.items()]
    numbers = {value for value in (*stage.inputs, *stage.outputs) if traced.operations[value].number is not None}
    returns_device = isinstance(returns, Template) and any(leaf is HERE for leaf in returns.leaves)
    if HERE in used_by_items(program.items) or returns_device or not numbers.isdisjoint(stage.outputs):
        source = names[stage.inputs[0]] if stage.inputs else "next(self.parameters())"
        lines.append(f"device = {source}.device")
    lines += [f"{names[value]} = {names[value]}.item()" for value in stage.inputs if value in numbers]
    # An in-place operation may not write to what another stage sent: here it would be a leaf of autograd.
    lines += [f"{names[value]} = {names[value]}.clone()" for value in sorted(stage.rewritten)]
    return lines


def _changing(traced: TracedModel, program: Piece) -> tuple[str, ...]:
    """Return the whole modules of a stage in which something else happened when the model ran again."""
    paths = {item.span.path for item in walk(program.items) if isinstance(item, WholeCall)}
    return tuple(sorted(path for path in paths if any(f"{each}.".startswith(f"{path}.") for each in traced.changing)))


def _info(
    index: int,
    program: Piece,
    stage: StageFlow,
    functions: Sequence[Function],
    names: Mapping[int, str],
    flops: sympy.Expr,
) -> StageInfo:
    modules = [item.span.label for item in walk(program.items) if isinstance(item, WholeCall)]
    return StageInfo(
        index=index,
        inputs=tuple(stage.inputs),
        input_names=tuple(names[value] for value in stage.inputs),
        outputs=tuple(stage.outputs),
        output_names=tuple(names[value] for value in stage.outputs),
        modules=tuple(modules),
        flops=flops,
        code={function.label: function.source for function in reversed(functions)},
    )
