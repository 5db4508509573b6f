"""From a model to a Pipe: trace it, find the cuts, trace it again where that is needed, and cut it.

`cut_model` decides how often a model is traced; `cut_trace` runs the passes over one trace, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import sympy

from ..errors import InputError
from ..pipe_ir import HERE, ModelTracer, RecomputedValue, StageInfo, TracedModel, bind_inputs
from ..text import structure_text
from .build import (
    build_stage_module,
    check_no_backward_hooks,
    generated_paths,
    hooks_to_trace,
    warn_of_assigned_attributes,
)
from .codegen import Emitter, Function, Naming, name_values
from .cost import flops_between
from .dataflow import NUMBER_DTYPES, Flow, StageFlow, flow, wire_order
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

_FindCuts: TypeAlias = Callable[[TracedModel], SplitPlan]
_PipeT = TypeVar("_PipeT")


def cut_model(tracer: ModelTracer, find_cuts: _FindCuts, into: Callable[..., _PipeT]) -> _PipeT:
    """Trace a model, find its cuts, and cut it there; `into` is the class that the cut model becomes.

    It gets a function that does all this again for a call of another form: see `_cut_again`.
    """
    return _trace_and_cut(tracer, find_cuts, partial(into, retrace=partial(_cut_again, tracer, find_cuts, into)))


def _cut_again(
    tracer: ModelTracer,
    find_cuts: _FindCuts,
    into: Callable[..., _PipeT],
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
    return _trace_and_cut(again, find_cuts, into, variant, apart)


def _trace_and_cut(
    tracer: ModelTracer,
    find_cuts: _FindCuts,
    into: Callable[..., _PipeT],
    variant: int = 0,
    apart: Collection[str] = (),
) -> _PipeT:
    """Trace a model as often as needed, and cut it.

    The first trace shows which modules are cut. If some of these have forward hooks, the hooks must be part of a second
    trace; if their forward looks at `training`, a trace in the other mode shows what differs there.
    """
    traced = tracer.trace()
    plan = find_cuts(traced)
    programs = partition(traced, plan.ticks, apart=apart)
    if tracer.enlarges and not _holds_for_example(tracer, traced, programs):
        tracer.enlarges = False
        return _trace_and_cut(tracer, find_cuts, into, variant, apart)
    check_no_backward_hooks(traced, programs)
    live_hooks = hooks_to_trace(traced, programs)
    if live_hooks:
        traced = tracer.trace(live_hooks)
        plan = find_cuts(traced)
        programs = partition(traced, plan.ticks, apart=apart)
    cut = partial(partition, apart=apart)
    cuts = Checks(tracer, traced, live_hooks).kept_whole(Cuts(traced, plan, programs), find_cuts, cut)
    traced, plan, programs = cuts.traced, cuts.plan, cuts.programs
    warn_of_assigned_attributes(traced, programs)
    modes = ModeDifferences()
    mode_dependent = generated_paths(programs) | owners_of_shared_buffers(traced, programs)
    if mode_dependent & traced.mode_readers:
        other = tracer.trace(live_hooks, training=not traced.training)
        known = {each.path: each for each in (*other.fallbacks, *traced.fallbacks)}
        other = replace(other, fallbacks=tuple(known.values()))
        other_plan = find_cuts(other)
        other_programs = partition(other, other_plan.ticks, apart=apart)
        assign_state(other, other_programs)  # a buffer may be updated in that mode only, and be in two stages
        modes = compare_modes(traced, programs, other, other_programs)
        checks = Checks(tracer, other, live_hooks, training=other.training)
        changing = checks.changing_paths(Cuts(other, other_plan, other_programs))
        modes = modes.bound_to(programs, changing, traced.training)
    modes = replace(modes, only_with_gradients=cuts.only_with_gradients)
    return _cut_programs(traced, plan, programs, modes, into, variant=variant)


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
    return _cut_programs(traced, plan, programs, ModeDifferences(), into, may_recompute)


def _cut_programs(
    traced: TracedModel,
    plan: SplitPlan,
    programs: tuple[Piece, ...],
    modes: ModeDifferences,
    into: Callable[..., _PipeT],
    may_recompute: bool = True,
    variant: int = 0,
) -> _PipeT:
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
            program, stage.inputs, _prologue(traced, program, stage, names), _returns(traced, flows, index)
        )
        for index, (program, stage) in enumerate(zip(programs, flows.stages, strict=True))
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
        balance=plan.balance,
    )


def _returns(traced: TracedModel, flows: Flow, index: int) -> Any:
    if index == len(flows.stages) - 1:
        return traced.output
    return {value: _as_sent(traced, value) for value in flows.stages[index].outputs}


def _as_sent(traced: TracedModel, value: int) -> str:
    """Return the way that generated code sends a value, as a format of its name."""
    op = traced.operations[value]
    if op.number is not None:
        return f"torch.full((), {{}}, dtype={NUMBER_DTYPES[op.number]}, device=device)"
    order = wire_order(op, traced)
    # What is sent must lie in memory in order, whatever the model made it from.
    return f"{{}}{f'.permute({list(order)})' if order else ''}.contiguous()"


def _prologue(traced: TracedModel, program: Piece, stage: StageFlow, names: Mapping[int, str]) -> list[str]:
    """Return the lines that a stage computes from its inputs before anything else."""
    lines = []
    for value in stage.inputs:
        order = wire_order(traced.operations[value], traced)
        if order:
            back = [order.index(dim) for dim in range(len(order))]
            lines.append(f"{names[value]} = {names[value]}.permute({back})")
    lines += [f"{symbol} = {names[value]}.shape[{dim}]" for symbol, (value, dim) in stage.sizes.items()]
    numbers = {value for value in (*stage.inputs, *stage.outputs) if traced.operations[value].number is not None}
    if HERE in used_by_items(program.items) or not numbers.isdisjoint(stage.outputs):
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
