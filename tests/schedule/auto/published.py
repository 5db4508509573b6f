"""The published settings, as costs and limits."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from pipecut.schedule import Costs

FILES = Path(__file__).resolve().parent.parent / "published"
SIZES = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}  # hidden size, heads
TOKENS = 1024


@dataclass(frozen=True)
class Setting:
    """One row of a table."""

    model: str
    ranks: int
    microbatches: int
    costs: Costs
    unit: float  # what the forward of one microbatch holds on a rank
    rates: dict[str, float]

    def __str__(self) -> str:
        return f"{self.model}-p{self.ranks}-m{self.microbatches}"


def settings() -> list[Setting]:
    """Every row of both tables; those of table 8 have the times of one of two chunks."""
    return [
        setting
        for name, columns, chunks in (
            ("zero_bubble_table5_9.csv", ("TF", "TB", "TW", "Tc"), 1),
            ("zero_bubble_table8.csv", ("f", "b", "w", "c"), 2),
        )
        for setting in _read(FILES / name, columns, chunks)
    ]


def _read(path: Path, columns: tuple[str, ...], chunks: int) -> list[Setting]:
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            hidden, heads = SIZES[row["model"]]
            forward, backward_input, backward_weight, transfer = (float(row[column]) for column in columns)
            held, for_weights = 34.0 * hidden + 5 * heads * TOKENS, 32.0 * hidden
            costs = Costs(
                forward=chunks * forward,
                backward_input=chunks * backward_input,
                backward_weight=chunks * backward_weight,
                transfer=transfer,
                memory_forward=held,
                memory_backward_input=for_weights - held,
                memory_backward_weight=-for_weights,
            )
            rates = {name: float(rate) for name, rate in row.items() if name.startswith(("ZB", "1F1B"))}
            found.append(Setting(row["model"], int(row["p"]), int(row["m"]), costs, held, rates))
    return found
