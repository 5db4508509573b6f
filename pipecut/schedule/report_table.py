"""A report as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .idle import Idle

if TYPE_CHECKING:
    from .report import Report

HEAD = ("rank", "busy", *Idle._fields, "peak memory")
NOISE = 1e-9  # of the makespan: less than that is the rounding of sums


def report_table(report: Report) -> str:
    """Totals, then for each rank its busy time, its idle time by cause, and its peak memory."""
    rows = [(str(rank), *_cells(report, rank)) for rank in range(len(report.busy))]
    return "\n".join([*_totals(report), *_aligned([HEAD, *rows, ("mean", *_means(report))])])


def _totals(report: Report) -> list[str]:
    plan, path = report.plan, report.critical_path
    sizes = f"{len(plan.actions)} ranks, {plan.stages} stages, {plan.microbatches} microbatches"
    rates = f"{report.bubble_rate:.2%} by each rank's own span, {report.bubble_rate_makespan:.2%} by the makespan"
    lines = [f"{plan.name}: {sizes}", f"makespan {report.makespan:.6g}", f"bubble rate {rates}"]
    if path:
        ends = f"from {path[0].action} on rank {path[0].rank} to {path[-1].action} on rank {path[-1].rank}"
        lines.append(f"critical path of {len(path)} computations, {ends}")
    return lines


def _cells(report: Report, rank: int) -> list[str]:
    times = [_text(time, report.makespan) for time in (report.busy[rank], *report.idle[rank])]
    return [*times, f"{report.peak_memory[rank]:.6g}"]


def _means(report: Report) -> list[str]:
    columns = [report.busy, *zip(*report.idle, strict=True)]
    means = [_text(sum(column) / len(column), report.makespan) for column in columns]
    return [*means, f"{sum(report.peak_memory) / len(report.peak_memory):.6g}"]


def _text(time: float, makespan: float) -> str:
    return f"{time:.6g}" if abs(time) > NOISE * makespan else "0"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other, the numbers to the right; idle time stands between two bars."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"{cells[0]} │ {cells[1]} │ {'  '.join(cells[2:-1])} │ {cells[-1]}")
    idle = len("  ".join("-" * width for width in widths[2:-1]))
    title = "idle by cause".center(idle)
    lines.insert(0, f"{' ' * widths[0]} │ {' ' * widths[1]} │ {title} │".rstrip())
    return lines
