"""Plans as text: the grid with a row per rank and a column per slot, and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from os import PathLike
from os.path import isdir
from pathlib import Path

from ..errors import PlanError
from ..files import read_bytes
from .action import Action, Rows, parse_action

FilePath = str | PathLike[str]
BUBBLE = "·"
_LARGEST = 1 << 30  # bytes of a CSV file


def grid(rows: Rows, *, width: int | None = None) -> str:
    """Return the rows with their slots under each other, wrapped at `width` characters."""
    return table([[_cell(action) for action in row] for row in rows], width=width)


def marked_grid(rows: Rows, rank: int, slot: int, missing: Action | None = None, *, around: int = 6) -> str:
    """Return the grid near one slot, which stands in square brackets; at the end of a row, with `missing` in it."""
    longest = max(slot + 1, *map(len, rows))
    first, last = max(0, slot - around), min(slot + around + 1, longest)
    top = max(0, rank - around)
    near = []
    for row_rank, row in enumerate(rows[top : rank + around + 1], start=top):
        cells = [_cell(action) for action in row[first:last]]
        if row_rank == rank:
            cells += [f"{_cell(missing)}?"] if slot == len(row) else []
            cells[slot - first] = f"[{cells[slot - first]}]"
        near.append(cells)
    return f"slots {first} to {last - 1}:\n{table(near, first_rank=top)}"


def table(rows: Sequence[Sequence[str]], *, width: int | None = None, first_rank: int = 0) -> str:
    slots = max((len(row) for row in rows), default=0)
    sizes = [max((len(row[slot]) for row in rows if slot < len(row)), default=1) for slot in range(slots)]
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
    """Divide the columns into runs that fit in the width, at least one column each."""
    if width is None:
        return [(0, len(sizes))]
    blocks, start, used = [], 0, margin
    for slot, size in enumerate(sizes):
        if used + size > width and slot > start:
            blocks.append((start, slot))
            start, used = slot, margin
        used += size + 1
    return [*blocks, (start, len(sizes))]


def _cell(action: Action | None) -> str:
    return BUBBLE if action is None else repr(action)


def save_text(text: str, path: FilePath | None) -> str:
    """Return the text, and write it to a file if a path is given."""
    if path is None:
        return text
    file = Path(path)
    try:
        file.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"Cannot write '{path}' ({reason}): {_remedy(file)}") from error
    return text


def _remedy(file: Path) -> str:
    if "\0" in str(file):
        return "a path has no null character; give another one."
    if isdir(file):  # unlike the method of Path, it takes a name that is too long
        return f"that is a directory; give a file in it, such as '{file / 'plan'}'."
    if not isdir(file.parent):
        return f"there is no directory '{file.parent}'; create it first, or give another path."
    return "give a path that you may write to."


def save_csv(rows: Rows, path: FilePath) -> None:
    """Write one line per rank, one cell per slot, empty for a bubble.

    All lines are filled up to one length, so that a torn file is noticed when it is read.
    """
    slots = max(map(len, rows))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if action is None else repr(action) for action in row] + [""] * (slots - len(row)))
    save_text(text.getvalue(), path)


def load_csv(path: FilePath, *, ragged: bool = False) -> Rows:
    """Read the actions of every rank, without the empty cells at the end of a line."""
    lines = _read_cells(path, _read_text(Path(path)))
    longest = max(len(cells) for _, cells in lines)
    rows = []
    for rank, (number, cells) in enumerate(lines):
        if len(cells) != longest and not ragged:
            raise PlanError(
                f"{path}, line {number}: ends after column {len(cells)}, while the longest line has {longest} cells. "
                "Fill it up with empty cells, or load the file with ragged=True if the rest is meant to be idle."
            )
        rows.append(_parse_line(path, rank, number, cells))
    return tuple(rows)


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, PlanError, _LARGEST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise PlanError(
            f"{path}, line {line}, character {column}: byte 0x{error.object[error.start]:02x} is not UTF-8. "
            "Save the file as UTF-8."
        ) from None


def _read_cells(path: FilePath, text: str) -> list[tuple[int, list[str]]]:
    """Return (line number, cells), without the blank lines at the end."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise PlanError(f"{path}, line {reader.line_num}: this is not CSV: {error}.") from None
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        lines.pop()
    if not lines:
        raise PlanError(f"{path}, line 1, column 1: the file has no action. Write one line per rank, such as 0F0,0B0.")
    return lines


def _parse_line(path: FilePath, rank: int, number: int, cells: list[str]) -> tuple[Action | None, ...]:
    row: list[Action | None] = []
    for column, cell in enumerate(cells, start=1):
        try:
            row.append(parse_action(cell))
        except PlanError as error:
            raise PlanError(f"{path}, line {number}, column {column} (rank {rank}): {error}") from None
    while row and row[-1] is None:
        row.pop()
    return tuple(row)
