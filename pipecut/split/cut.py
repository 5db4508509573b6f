"""From a model to a Pipe: trace it, find the cuts, trace it again where that is needed, and cut it.

`cut_model` decides how often a model is traced; `cut_trace` runs the passes over one trace, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import sympy

from ..pipe_ir import HERE, ModelTracer, RecomputedValue, StageInfo, TracedModel
from .build import (
    build_stage_module,
    check_no_backward_hooks,
    check_no_untraced_effects,
    generated_paths,
    hooks_to_trace,
    warn_of_assigned_attributes,
)
from .codegen import Emitter, Function, Naming, name_values
from .cost import flops_between
from .dataflow import Flow, StageFlow, flow, wire_order
from .modes import ModeDifferences, compare_modes
from .points import SplitPlan
from .program import Piece, WholeCall, conditions_of_generated_code, partition, used_by_items, walk
from .recompute import recompute
from .state import (
    assign_state,
    find_ties,
    module_aliases,
    owners_of_shared_buffers,
    plain_references,
    unused_parameters,
)

_FindCuts: TypeAlias = Callable[[TracedModel], SplitPlan]
_PipeT = TypeVar("_PipeT")


def cut_model(tracer: ModelTracer, find_cuts: _FindCuts, into: Callable[..., _PipeT]) -> _PipeT:
    """Trace a model, find its cuts, and cut it there; `into` is the class that the cut model becomes.

    The first trace shows which modules are cut. If some of these have forward hooks, the hooks must be part of a second
    trace; if their forward looks at `training`, a trace in the other mode shows what differs there.
    """
    traced = tracer.trace()
    plan = find_cuts(traced)
    programs = partition(traced, plan.ticks)
    check_no_backward_hooks(traced, programs)
    live_hooks = hooks_to_trace(traced, programs)
    if live_hooks:
        traced = tracer.trace(live_hooks)
        plan = find_cuts(traced)
        programs = partition(traced, plan.ticks)
    check_no_untraced_effects(traced, programs)
    warn_of_assigned_attributes(traced, programs)
    modes = ModeDifferences()
    mode_dependent = generated_paths(programs) | owners_of_shared_buffers(traced, programs)
    if mode_dependent & traced.mode_readers:
        other = tracer.trace(live_hooks, training=not traced.training)
        other_programs = partition(other, find_cuts(other).ticks)
        assign_state(other, other_programs)  # a buffer may be updated in that mode only, and be in two stages
        modes = compare_modes(traced, programs, other, other_programs)
    return _cut_programs(traced, plan, programs, modes, into)


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
) -> _PipeT:
    names = name_values(traced)
    recomputed: tuple[RecomputedValue, ...] = ()
    if may_recompute:
        programs, recomputed = recompute(traced, plan.ticks, programs, names, modes)
    traced = replace(traced, conditions=conditions_of_generated_code(traced, programs))
    flows = flow(traced, plan.ticks, programs, names)
    holdings = assign_state(traced, programs)
    naming = Naming(traced, names, module_aliases(traced.model))
    functions = [
        Emitter(naming, modes, index).stage(
            program, stage.inputs, _prologue(traced, program, stage, names), _returns(traced, flows, index)
        )
        for index, (program, stage) in enumerate(zip(programs, flows.stages, strict=True))
    ]
    references = plain_references(traced.model)
    modules = tuple(
        build_stage_module(traced, index, holdings[index], functions[index], references)
        for index in range(len(programs))
    )
    bounds = [traced.root.begin, *plan.ticks, traced.root.end + 1]
    return into(
        traced=traced,
        stages=modules,
        stage_infos=tuple(
            _info(index, program, flows.stages[index], functions[index], names, flops_between(traced, begin, end))
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
    return {value: wire_order(traced.operations[value], traced) for value in flows.stages[index].outputs}


def _prologue(traced: TracedModel, program: Piece, stage: StageFlow, names: Mapping[int, str]) -> list[str]:
    """Return the lines that a stage computes from its inputs before anything else."""
    lines = []
    for value in stage.inputs:
        order = wire_order(traced.operations[value], traced)
        if order:
            back = [order.index(dim) for dim in range(len(order))]
            lines.append(f"{names[value]} = {names[value]}.permute({back})")
    lines += [f"{symbol} = {names[value]}.shape[{dim}]" for symbol, (value, dim) in stage.sizes.items()]
    if HERE in used_by_items(program.items):
        source = names[stage.inputs[0]] if stage.inputs else "next(self.parameters())"
        lines.append(f"device = {source}.device")
    # An in-place operation may not write to what another stage sent: here it would be a leaf of autograd.
    lines += [f"{names[value]} = {names[value]}.clone()" for value in sorted(stage.rewritten)]
    return lines


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
