"""Whether a call can be made as it is in the model: all comes in and goes out by its arguments, results and state."""

from __future__ import annotations

import bisect
import re

import torch
from torch.fx import GraphModule

from ..errors import SplitError
from ..pipe_ir.effects import operator_name
from ..pipe_ir.traced import Fallback, Ref, Span, Step, TracedModel

# Paths into a result that can be written down: result[0], result['mask'], result.logits.
_ACCESS = re.compile(r"^(\[('[^']*'|\d+)\]|\.\w+)$")


class Wholeness:
    """Looks through a trace for what ties a call to the code around it."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.last_use = _last_uses(traced)
        self._timed = [step for step in traced.steps if step.tick >= 0]
        self._ticks = [step.tick for step in self._timed]
        self._buffer_values = {
            index: f"{span.path}.{name}".lstrip(".")
            for span in traced.spans()
            for name, index in span.assigned_buffers.items()
        }

    def steps(self, begin: int, end: int) -> list[Step]:
        """The steps with begin <= tick < end."""
        return self._timed[bisect.bisect_left(self._ticks, begin) : bisect.bisect_left(self._ticks, end)]

    def runs_alone(self, span: Span) -> bool:
        """Whether calling the module's own code gives what was traced."""
        if not span.args.is_plain:
            return False
        if any(step.kind == "mark" for step in self.steps(span.begin, span.end)):
            return False
        return not self._hidden_inputs(span) and not self._hidden_outputs(span)

    def why_not_whole(self, span: Span, fallback: Fallback) -> str:
        """Why a module that has to stay as it is cannot be called by generated code."""
        hidden = [] if span.args.is_plain else ["an argument that is neither a tensor nor a plain value"]
        hidden += [f"{name!r} outside its arguments and results" for name in self._hidden_inputs(span)]
        hidden += [f"{name!r} outside its arguments and results" for name in self._hidden_outputs(span)]
        hidden += ["a part of it that another call in the same stage has in pieces"]
        return (
            f"{span.label!r} could not be traced ({fallback.reason}), so that it can only be called as a whole; the "
            f"module that calls it is cut, and it depends on {hidden[0]}, which generated code cannot pass on. Pass it "
            "tensors and plain values, or cut so that the module around it stays whole"
        )

    def check_function(self, span: Span) -> None:
        """Refuse an autograd function whose backward cannot be kept."""
        hidden = [] if span.args.is_plain else ["an argument that is neither a tensor nor a plain value"]
        hidden += self._hidden_inputs(span) + self._hidden_outputs(span)
        if hidden:
            raise SplitError(
                f"{span.options['function'].__name__}.apply() runs in the forward of "
                f"'{span.path or type(self.traced.model).__name__}', which is cut, and depends on {hidden[0]} outside "
                "its arguments and results, so that its backward cannot be kept; call it in a module of its own that "
                "is not cut, or pass all it needs as tensors"
            )

    def check_branches(self, step: Step) -> None:
        """Refuse torch.cond and the like in generated code if their functions have parameters inside."""
        for branch in (self.traced.steps[index].constant for index in step.refs):
            if isinstance(branch, GraphModule) and any(node.op == "get_attr" for node in branch.graph.nodes):
                raise SplitError(
                    f"torch.{operator_name(step.target)} uses parameters or tensors of the model inside its functions, "
                    f"in a forward that is cut ({step.source}); pass them as operands, or move the call into a "
                    "module of its own that is not cut"
                )

    def is_dead(self, step: Step) -> bool:
        """Whether nobody uses the result of an operation, and it does nothing else."""
        if step.index in self.last_use or step.writes:
            return False
        if not isinstance(step.target, torch._ops.OpOverload) or not step.target._schema.returns:
            return False
        # An unused random number still moves the generator on.
        return torch.Tag.nondeterministic_seeded not in step.target.tags

    def _hidden_inputs(self, span: Span) -> list[str]:
        arguments = set(span.args.refs)
        hidden = []
        for step in self.steps(span.begin, span.end):
            for index in step.refs:
                source = self.traced.steps[index]
                inside = source.tick >= span.begin or source.kind == "constant"
                own = inside or index in arguments or self._is_own_state(index, span.path)
                if not own or index in self.traced.reached_state:
                    hidden.append(source.name)
        return hidden

    def _hidden_outputs(self, span: Span) -> list[str]:
        leaves = zip(span.result.leaves, span.result.structure.paths(), strict=True)
        visible = {leaf.index for leaf, path in leaves if isinstance(leaf, Ref) and all(map(_ACCESS.match, path))}
        return [
            step.name
            for step in self.steps(span.begin, span.end)
            if self.last_use.get(step.index, -1) > span.end
            and step.index not in visible
            and not self._is_own_state(step.index, span.path)
        ]

    def _is_own_state(self, index: int, path: str) -> bool:
        names = (*self.traced.state_names.get(index, ()), self._buffer_values.get(index, ""))
        return any(name.startswith(f"{path}.") for name in names)


def _last_uses(traced: TracedModel) -> dict[int, int]:
    """The last tick at which each value is used, by an operation or as an argument of a call."""
    last: dict[int, int] = {}
    for step in traced.steps:
        for index in step.refs:
            last[index] = max(last.get(index, -1), step.tick)
    for span in traced.spans():
        for index in span.args.refs:
            last[index] = max(last.get(index, -1), span.begin)
        for index in span.assigned_buffers.values():
            last[index] = max(last.get(index, -1), span.end)
    for index in traced.output.refs:
        last[index] = traced.root.end + 1
    return last
