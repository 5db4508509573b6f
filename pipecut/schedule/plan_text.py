"""Plans as text: the grid with a row per rank and a column per slot, and CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from os import PathLike
from os.path import isdir
from pathlib import Path

from ..errors import PlanError
from ..files import open_regular
from ..text import format_bytes
from .action import Action, Rows, parse_action

FilePath = str | PathLike[str]
BUBBLE = "·"
_LARGEST = 1 << 30  # bytes of a CSV file
_LONGEST_LINE = 16 << 20  # bytes of the line of a rank, which are more than a million actions


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
    """Read the actions of every rank, without the empty cells at the end of a line.

    Lines are read one after the other, and equal cells are one action: the file itself is never in memory.
    """
    rows: list[tuple[Action | None, ...]] = []
    numbers: list[int] = []
    lengths: list[int] = []
    parse = cache(parse_action)
    reader = csv.reader(_lines(Path(path)), strict=True)
    try:
        for cells in reader:
            numbers.append(reader.line_num)
            lengths.append(len(cells))
            if not ragged and lengths[-1] < lengths[0] and any(cells):
                break  # a torn line: what its last cell says does not matter
            rows.append(_parse_line(path, len(rows), numbers[-1], cells, parse))
    except csv.Error as error:
        raise PlanError(f"{path}, line {reader.line_num}: this is not CSV: {error}.") from None
    while rows and not rows[-1] and len(rows) == len(lengths):
        rows.pop(), lengths.pop()
    if not lengths:
        raise PlanError(f"{path}, line 1, column 1: the file has no action. Write one line per rank, such as 0F0,0B0.")
    longest = max(lengths)
    short = next((place for place, length in enumerate(lengths) if length != longest and not ragged), None)
    if short is not None:
        raise PlanError(
            f"{path}, line {numbers[short]}: ends after column {lengths[short]}, while the longest line has {longest} "
            "cells. Fill it up with empty cells, or load the file with ragged=True if the rest is meant to be idle."
        )
    return tuple(rows)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text, each with its end, of whatever kind."""
    with open_regular(path, PlanError, _LARGEST) as file:
        for number in count(1):
            line = file.readline(_LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > _LONGEST_LINE:
                raise PlanError(
                    f"{path}, line {number}: is longer than {format_bytes(_LONGEST_LINE)}, and a plan has one line per "
                    "rank: it is probably another file than was meant"
                )
            try:
                yield from io.StringIO(line.decode("utf-8-sig" if number == 1 else "utf-8"), newline="")
            except UnicodeDecodeError as error:
                raise PlanError(
                    f"{path}, line {number}, character {error.start + 1}: byte 0x{line[error.start]:02x} is not UTF-8. "
                    "Save the file as UTF-8."
                ) from None


def _parse_line(
    path: FilePath, rank: int, number: int, cells: list[str], parse: Callable[[str], Action | None]
) -> tuple[Action | None, ...]:
    row: list[Action | None] = []
    for column, cell in enumerate(cells, start=1):
        try:
            row.append(parse(cell))
        except PlanError as error:
            raise PlanError(f"{path}, line {number}, column {column} (rank {rank}): {error}") from None
    while row and row[-1] is None:
        row.pop()
    return tuple(row)
