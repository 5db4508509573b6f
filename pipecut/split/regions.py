"""The parts of a trace that must stay whole: checkpoints, autograd functions, no_grad, autocast, vmap, fallbacks."""

from __future__ import annotations

import bisect

from ..pipe_ir.traced import Context, Span, TracedModel


class Regions:
    """Says of any tick whether a cut there would tear something apart."""

    def __init__(self, traced: TracedModel) -> None:
        self._spans = [span for span in traced.spans() if span.kind != "call" or traced.fallback(span.path)]
        self._operations = [step for step in traced.steps if step.kind == "op"]
        self._ticks = [step.tick for step in self._operations]

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
        """The block that goes on from the operation before a tick to the one after it."""
        after = bisect.bisect_left(self._ticks, tick)
        if not 0 < after < len(self._operations):
            return None
        return _common_block(self._operations[after - 1].context, self._operations[after].context)


def _describe_span(span: Span) -> str:
    if span.kind == "call":
        return f"{span.label!r}, which could not be traced"
    if span.kind == "checkpoint":
        return "a part under torch.utils.checkpoint"
    return f"the autograd function {span.options['function'].__name__}"


def _common_block(before: Context, after: Context) -> str | None:
    if before.vmap and after.vmap:
        return "a torch.vmap call"
    if set(before.autocast) & set(after.autocast):
        return "a torch.autocast block"
    return "a torch.no_grad() block" if before.no_grad_block and before.no_grad_block == after.no_grad_block else None
