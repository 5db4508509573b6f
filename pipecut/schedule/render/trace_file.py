"""A timeline as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ..action import TRANSFERS, Action, Op
from ..plan_text import FilePath, save_text
from ..report import Span
from .palette import NAMES
from .rows import Chart, Sources, charts, microseconds

_Event = dict[str, object]


def chrome_trace(source: Sources, path: FilePath | None = None) -> str:
    """Return the JSON trace of a plan, a timeline or a simulation's report: a process for each, a thread per rank.

    Every span is in it, also one that takes no time. Times are in microseconds from the first start; a time without a
    unit, and a slot of a plan, counts as a millisecond. Where a rank's spans overlap in time, its transfers have a
    thread of their own, for a viewer shows only what is nested in one.

    >>> from pipecut.schedule.plan import Plan
    >>> trace = json.loads(chrome_trace(Plan.from_actions({0: ["0F0", "0B0"]})))
    >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    [('0F0', 0.0, 1000.0), ('0B0', 1000.0, 1000.0)]
    """
    events = [event for process, chart in enumerate(charts(source)) for event in _events(chart, process)]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return save_text(json.dumps(trace, separators=(",", ":")), path)


def _events(chart: Chart, process: int) -> Iterator[_Event]:
    factor = microseconds(chart.unit)
    yield _naming("process_name", process, 0, name=f"{chart.name} ({chart.facts})")
    yield _naming("process_sort_index", process, 0, sort_index=process)
    for rank, row in enumerate(chart.rows):
        aside = len(chart.rows) + rank if _overlapping(row) else rank
        yield _naming("thread_name", process, rank, name=f"rank {rank}")
        yield _naming("thread_sort_index", process, rank, sort_index=2 * rank)
        if aside != rank:
            yield _naming("thread_name", process, aside, name=f"rank {rank} transfers")
            yield _naming("thread_sort_index", process, aside, sort_index=2 * rank + 1)
        for span in row:
            start, end = round(span.start * factor, 3), round(span.end * factor, 3)
            yield {
                "name": repr(span.action),
                "cat": NAMES[span.action.op],
                "ph": "X",
                "pid": process,
                "tid": aside if span.action.op in TRANSFERS else rank,
                "ts": start,
                "dur": round(end - start, 3),
                "args": _facts(span.action),
            }


def _naming(what: str, process: int, thread: int, **args: object) -> _Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}


def _facts(action: Action) -> _Event:
    if action.parts:
        return {"parts": [{"action": repr(part), **_facts(part)} for part in action.parts]}
    facts: _Event = {"op": str(action.op), "stage": action.stage}
    if action.microbatch is not None:
        facts["tie" if action.op is Op.REDUCE_TIES else "microbatch"] = action.microbatch
    if action.op in TRANSFERS:
        facts["peer"] = action.other_stage
    return facts


def _overlapping(row: Sequence[Span]) -> bool:
    """Return True if a span starts before another one ends."""
    until = 0.0
    for span in row:
        if span.start < until:
            return True
        until = max(until, span.end)
    return False
