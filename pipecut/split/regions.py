"""The parts of a trace that must stay whole: checkpoints, autograd functions, no_grad, autocast, vmap."""

from __future__ import annotations

import bisect

from ..pipe_ir.traced import Context, Span, TracedModel


class Regions:
    """Says of any tick whether a cut there would tear something apart."""

    def __init__(self, traced: TracedModel) -> None:
        self._spans = [span for span in traced.spans() if span.kind != "call"]
        self._operations = [step for step in traced.steps if step.kind == "op"]
        self._ticks = [step.tick for step in self._operations]
        self._outside = traced.root.context

    def settle(self, tick: int) -> tuple[int, str | None]:
        """A tick moved to the edge of the regions that begin or end there, and what it is inside of, if anything."""
        for span in self._spans:
            if not span.begin < tick <= span.end:
                continue
            if not self._works_between(span.begin, tick):
                tick = span.begin
            elif not self._works_between(tick, span.end):
                tick = span.end + 1
            else:
                return tick, _describe_span(span)
        return tick, self._modes_at(tick)

    def _works_between(self, begin: int, end: int) -> bool:
        return bisect.bisect_left(self._ticks, begin) < bisect.bisect_left(self._ticks, end)

    def _modes_at(self, tick: int) -> str | None:
        """The modes that go on from the operation before a tick to the one after it."""
        after = bisect.bisect_left(self._ticks, tick)
        around = self._operations[max(after - 1, 0) : after + 1]
        if len(around) < 2 or any(step.context == self._outside for step in around):
            return None
        return _describe_modes(around[0].context)


def _describe_span(span: Span) -> str:
    if span.kind == "checkpoint":
        return "a part under torch.utils.checkpoint"
    return f"the autograd function {span.options['function'].__name__}"


def _describe_modes(context: Context) -> str:
    if context.vmap:
        return "a torch.vmap call"
    return "a torch.autocast block" if context.autocast else "a torch.no_grad() block"
