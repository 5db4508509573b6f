"""A plan: what every rank does, in order, in one training step."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from os.path import isdir
from pathlib import Path

from ..errors import MissingFileError, PlanError
from ..text import plural
from .action import BACKWARD, COMPUTE, TRANSFERS, Action, Op, parse_action, transfer
from .placement import Placement, first_missing, positive
from .rules import Dataflow

Rows = tuple[tuple[Action | None, ...], ...]
Given = Action | str | None  # how a user may write one step


@dataclass(frozen=True)
class Plan:
    """The actions of every rank, in order; None is a bubble.

    >>> plan = Plan.from_actions({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> print(plan.grid())
    rank 0 │ 0F0 ·   ·   0B0
    rank 1 │ ·   1F0 1B0 ·
    """

    name: str
    placement: Placement
    microbatches: int
    actions: Rows = field(repr=False)
    dataflow: Dataflow = field(repr=False)
    training: bool = True  # False: forward only

    def __post_init__(self) -> None:
        for what, value, kind in (("placement", self.placement, Placement), ("dataflow", self.dataflow, Dataflow)):
            if not isinstance(value, kind):
                raise PlanError(f"The {what} of a plan is a {kind.__name__}, got {value!r}.")
        positive(microbatches=self.microbatches)
        if self.dataflow.stages != self.stages:
            raise PlanError(
                f"The dataflow has {self.dataflow.stages} stages, the plan '{self.name}' has {self.stages}."
            )
        if len(self.actions) != self.ranks:
            raise PlanError(
                f"The plan '{self.name}' has actions for {len(self.actions)} ranks, and its placement puts stages on "
                f"{self.ranks}: give every rank a stage and a list of actions."
            )

    @classmethod
    def from_actions(
        cls,
        actions: Mapping[int, Iterable[Given]] | Sequence[Iterable[Given]],
        *,
        name: str = "custom",
        placement: Placement | Mapping[int, int] | Sequence[int] | None = None,
        microbatches: int | None = None,
        dataflow: Dataflow | None = None,
        training: bool | None = None,
    ) -> Plan:
        """A plan of your own: actions, or their text, for each rank. What is not given is read from the actions.

        Without `placement` a stage belongs to the rank that runs its forwards; without `dataflow` every stage feeds the
        next, and the skips are those that the plan's transfers name; without `training` a plan without any backward is
        forward only.
        """
        rows = _rows(actions)
        leaves = [leaf for row in rows for action in row if action is not None for leaf in action.leaves]
        if not leaves:
            raise PlanError("The plan has no action: give each rank a list such as ['0F0', '0B0'].")
        if placement is None:
            placement = _placement_of(rows)
        elif not isinstance(placement, Placement):
            placement = Placement.explicit(placement)
        if len(rows) < placement.ranks:
            rows += ((),) * (placement.ranks - len(rows))
        return cls(
            name=name,
            placement=placement,
            microbatches=_count_microbatches(leaves) if microbatches is None else microbatches,
            actions=rows,
            dataflow=_dataflow_of(leaves, placement.stages) if dataflow is None else dataflow,
            training=any(leaf.op in BACKWARD for leaf in leaves) if training is None else training,
        )

    @cached_property
    def has_transfers(self) -> bool:
        """Whether the plan names its messages. A plan that does not gets them from `lower`."""
        return not self.ops.isdisjoint(TRANSFERS)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of action in the plan."""
        return frozenset({action.op for row in self.actions for action in row if action is not None})

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.placement.stages

    def ranks_of_tie(self, number: int) -> list[int]:
        """The ranks that hold a tied parameter."""
        return sorted({self.placement.rank_of[stage] for stage in self.dataflow.ties[number]})

    def with_actions(self, rows: Iterable[Iterable[Action | None]]) -> Plan:
        """The same plan with other actions."""
        return replace(self, actions=tuple(map(tuple, rows)))

    def with_dataflow(self, dataflow: Dataflow) -> Plan:
        """The same actions for a model whose stages use each other's values in another way."""
        return replace(self, dataflow=dataflow)

    def grid(self, *, width: int | None = None) -> str:
        """The plan as text: a row for each rank, a column for each step. `width` wraps it at that many characters.

        Every action stands in the first step in which it can run if each takes one; a plan that cannot run to its end
        is shown as it is written.
        """
        from .lower import add_bubbles

        return _grid_text(add_bubbles(self, allow_stuck=True), width=width)

    def validate(self) -> Plan:
        """The plan itself, proven complete, in order and free of deadlock; otherwise a PlanError with every fault."""
        from .validate import validate

        validate(self)
        return self

    def lower(self, *, max_held: int | None = None, receives: str = "as_sent") -> Plan:
        """The plan with all that running it takes: transfers, sums of tied gradients, and sharding if asked for."""
        from .lower import lower

        return lower(self, max_held=max_held, receives=receives)

    def save_csv(self, path: str | PathLike[str]) -> None:
        """Write one line a rank, one cell a step; a bubble is an empty cell.

        A file has the actions only: give a placement and a dataflow that cannot be read from them to `load_csv` again.
        """

        save_csv(self, path)

    @classmethod
    def load_csv(
        cls,
        path: str | PathLike[str],
        *,
        name: str | None = None,
        placement: Placement | Mapping[int, int] | Sequence[int] | None = None,
        microbatches: int | None = None,
        dataflow: Dataflow | None = None,
        training: bool | None = None,
        ragged: bool = False,
    ) -> Plan:
        """Read what `save_csv` wrote, like `from_actions`; skips, ties and model inputs are not in the file.

        `ragged=True` takes lines of different lengths: the short ones end in bubbles.
        """

        rows = load_csv(path, ragged=ragged)
        name = name if name is not None else str(path)
        return cls.from_actions(
            rows, name=name, placement=placement, microbatches=microbatches, dataflow=dataflow, training=training
        )


def _rows(actions: Mapping[int, Iterable[Given]] | Sequence[Iterable[Given]]) -> Rows:
    by_rank = dict(actions) if isinstance(actions, Mapping) else dict(enumerate(actions))
    wrong = [rank for rank in by_rank if not isinstance(rank, int) or rank < 0]
    if wrong:
        raise PlanError(f"The plan has a rank {wrong[0]!r}: ranks are numbered 0, 1, 2...")
    rows = []
    for rank in range(max(by_rank, default=-1) + 1):
        row = []
        for step, given in enumerate(by_rank.get(rank, ())):
            if given is not None and not isinstance(given, Action | str):
                raise PlanError(f"Rank {rank}, step {step}: {given!r} is no action; give an Action, its text, or None.")
            try:
                row.append(parse_action(given) if isinstance(given, str) else _normal(given))
            except PlanError as error:
                raise PlanError(f"Rank {rank}, step {step}: {error}") from None
        rows.append(tuple(row))
    return tuple(rows)


def _normal(action: Action | None) -> Action | None:
    """A transfer whose peer is the neighbour does not name it, so that equal actions compare equal."""
    if action is None or action.op not in TRANSFERS or action.peer is None:
        return action
    return transfer(action.op, action.stage, action.microbatch, action.peer)


def _placement_of(rows: Rows) -> Placement:
    """A stage is where its forwards are, or else where anything of it is computed."""
    rank_of: dict[int, int] = {}
    for ops in ({Op.FORWARD}, COMPUTE):
        for rank, row in enumerate(rows):
            for leaf in (leaf for action in row if action is not None for leaf in action.leaves):
                if leaf.op in ops:
                    rank_of.setdefault(leaf.stage, rank)
    _refuse_left_out("stage", rank_of)
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def _count_microbatches(leaves: Sequence[Action]) -> int:
    numbers = {leaf.microbatch for leaf in leaves if leaf.op in COMPUTE and leaf.microbatch is not None}
    _refuse_left_out("microbatch", numbers)
    return len(numbers)


def _refuse_left_out(what: str, numbers: Collection[int]) -> None:
    """Numbers are counted from what a plan does, so that one that is left out would be a smaller or a wrong plan."""
    missing = first_missing(numbers)
    if not numbers or missing < len(numbers):
        there = f"has {what} {max(numbers)}, but nothing of" if numbers else "computes nothing of"
        raise PlanError(
            f"The plan {there} {what} {missing}: add its actions, or number the {plural(what, 2)} 0, 1, 2... without "
            "gaps."
        )


def _dataflow_of(leaves: Sequence[Action], stages: int) -> Dataflow:
    """The chain, and the skips that the transfers name."""
    sent = {(leaf.stage, leaf.other_stage) for leaf in leaves if leaf.op is Op.SEND_F and leaf.peer is not None}
    back = {(leaf.other_stage, leaf.stage) for leaf in leaves if leaf.op is Op.SEND_B and leaf.peer is not None}
    inside = {(maker, user) for maker, user in sent | back if 0 <= maker < user < stages}
    chain = Dataflow.chain(stages)
    return replace(chain, activations=chain.activations | inside, gradients=chain.gradients | (back & inside))


# MERGED: A plan as a text grid: a row for each rank, a column for each step.


BUBBLE = "·"


def _grid_text(plan: Plan, *, width: int | None = None) -> str:
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


# MERGED: Writes what was drawn or planned to a file.


FilePath = str | PathLike[str]


def saved(text: str, path: FilePath | None) -> str:
    """The text itself, also written to a file if a path is given."""
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


# MERGED: Plans as CSV files: one line a rank, one cell a step, an empty cell for a bubble.


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
