"""Plans as CSV files: one line a rank, one cell a step, an empty cell for a bubble."""

from __future__ import annotations

import csv
import io
from os import PathLike
from pathlib import Path

from ..errors import PlanError
from .action import Action, parse_action
from .output import saved
from .plan import Plan, Rows


class MissingFileError(PlanError, FileNotFoundError):
    """There is no such plan. It is a FileNotFoundError too, as of any file that is opened."""


def save_csv(plan: Plan, path: str | PathLike[str]) -> None:
    """Write a plan; lines are filled up with empty cells to one length, so that a torn file is seen when it is read."""
    steps = max(map(len, plan.actions))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in plan.actions:
        writer.writerow(["" if action is None else repr(action) for action in row] + [""] * (steps - len(row)))
    saved(text.getvalue(), path)


def load_csv(path: str | PathLike[str], *, ragged: bool = False) -> Rows:
    """The actions of every rank, without the empty cells at the end of a line."""
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
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise PlanError(
            f"{path}, line {line}, character {column}: byte 0x{error.object[error.start]:02x} is not UTF-8. "
            "Save the file as UTF-8."
        ) from None
    except FileNotFoundError as error:
        raise MissingFileError(f"Cannot read the plan {path}: {error.strerror}.") from error
    except OSError as error:
        raise PlanError(f"Cannot read the plan {path}: {error.strerror}.") from error


def _read_cells(path: str | PathLike[str], text: str) -> list[tuple[int, list[str]]]:
    """(line number, cells), without the blank lines at the end."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise PlanError(f"{path}, line {reader.line_num}: this is not CSV: {error}.") from None
    while lines and not any(cell.strip() for cell in lines[-1][1]):
        lines.pop()
    if not lines:
        raise PlanError(f"{path}, line 1, column 1: the file has no action. Write one line a rank, such as 0F0,0B0.")
    return lines


def _parse_line(path: str | PathLike[str], rank: int, number: int, cells: list[str]) -> tuple[Action | None, ...]:
    row: list[Action | None] = []
    for column, cell in enumerate(cells, start=1):
        try:
            row.append(parse_action(cell))
        except PlanError as error:
            raise PlanError(f"{path}, line {number}, column {column} (rank {rank}): {error}") from None
    while row and row[-1] is None:
        row.pop()
    return tuple(row)
