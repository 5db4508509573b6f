"""A plan as a text grid: a row for each rank, a column for each step."""

from __future__ import annotations

from collections.abc import Sequence

from .action import Action
from .plan import Plan

BUBBLE = "·"


def grid_text(plan: Plan, *, width: int | None = None) -> str:
    """The grid of a plan as it is written."""
    return table([[_cell(action) for action in row] for row in plan.actions], width=width)


def marked_grid(plan: Plan, rank: int, step: int, missing: Action | None = None, *, around: int = 6) -> str:
    """The rows of a plan as written, near one place, which stands in square brackets, or what is missing there."""
    longest = max(step + 1, *map(len, plan.actions))
    first, last = max(0, step - around), min(step + around + 1, longest)
    top = max(0, rank - around)
    rows = []
    for row_rank, row in enumerate(plan.actions[top : rank + around + 1], start=top):
        cells = [_cell(action) for action in row[first:last]]
        if row_rank == rank:
            cells += [f"{_cell(missing)}?"] if step == len(row) else []
            cells[step - first] = f"[{cells[step - first]}]"
        rows.append(cells)
    return f"steps {first} to {last - 1}:\n{table(rows, first_rank=top)}"


def table(rows: Sequence[Sequence[str]], *, width: int | None = None, first_rank: int = 0) -> str:
    """Cells as lines of text, the columns under each other."""
    steps = max((len(row) for row in rows), default=0)
    sizes = [max((len(row[step]) for row in rows if step < len(row)), default=1) for step in range(steps)]
    names = [f"rank {rank}" for rank in range(first_rank, first_rank + len(rows))]
    margin = max(map(len, names), default=0)
    blocks = []
    for start, stop in _blocks(sizes, margin + 3, width):
        lines = []
        for name, row in zip(names, rows, strict=True):
            cells = (cell.ljust(size) for cell, size in zip(row[start:stop], sizes[start:stop], strict=False))
            lines.append(f"{name:<{margin}} │ {' '.join(cells)}".rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _blocks(sizes: Sequence[int], margin: int, width: int | None) -> list[tuple[int, int]]:
    """Runs of columns that fit in the width, at least one column each."""
    if width is None:
        return [(0, len(sizes))]
    blocks, start, used = [], 0, margin
    for step, size in enumerate(sizes):
        if used + size > width and step > start:
            blocks.append((start, step))
            start, used = step, margin
        used += size + 1
    return [*blocks, (start, len(sizes))]


def _cell(action: Action | None) -> str:
    return BUBBLE if action is None else repr(action)
