"""Which placements and numbers of microbatches are searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import PlanError
from ..costs import MEMORY, TIMES, Costs
from ..link import Link
from ..placement import Placement, positive

PLACEMENTS = ("loop", "v", "any")
CHUNKS = {"loop": (1, 2), "v": (2,)}  # that are tried if nothing is said


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A placement, a number of microbatches, and what one of them costs."""

    shape: str  # "loop" or "v"
    chunks: int
    placement: Placement
    microbatches: int
    costs: Costs

    def __str__(self) -> str:
        return f"{self.shape} x {self.chunks}"


def arrangements(
    ranks: int, microbatches: int | Sequence[int], costs: Costs, placement: str, chunks: int | None
) -> list[Arrangement]:
    """All that are allowed, in the order in which they are tried."""
    positive(ranks=ranks)
    if placement not in PLACEMENTS:
        raise PlanError(f"placement={placement!r}: give one of {', '.join(map(repr, PLACEMENTS))}.")
    if not isinstance(costs, Costs):
        raise PlanError(f"costs={costs!r}: give Costs, as in Costs(forward=18.5, transfer=0.6).")
    counts = list(microbatches) if isinstance(microbatches, Sequence) else [microbatches]
    if not counts:
        raise PlanError("microbatches is an empty list: give a number, or the numbers that are allowed.")
    for count in counts:
        positive(microbatches=count)
    chunks = _chunks(ranks, costs, chunks)
    shapes = ("loop", "v") if placement == "any" else (placement,)
    return [
        Arrangement(shape, number, getattr(Placement, shape)(ranks, number), count, _scaled(costs, counts[0] / count))
        for count in dict.fromkeys(counts)
        for shape in shapes
        for number in (CHUNKS[shape] if chunks is None else (chunks,))
        if shape == "loop" or number > 1 or placement == "v"
    ]


def _chunks(ranks: int, costs: Costs, chunks: int | None) -> int | None:
    """The number of chunks, if it is given, by itself or by costs that are given for each stage."""
    if chunks is not None:
        positive(chunks=chunks)
        return chunks
    for name in TIMES + MEMORY:
        value = getattr(costs, name)
        if isinstance(value, Sequence | Mapping):
            if len(value) == 0 or len(value) % ranks:
                raise PlanError(
                    f"{name} has {len(value)} values, for as many stages, which {ranks} ranks cannot share evenly: "
                    f"give one value for each stage, and {ranks}, {2 * ranks}, {3 * ranks}... stages."
                )
            return len(value) // ranks
    return None


def _scaled(costs: Costs, factor: float) -> Costs:
    """The costs of a microbatch that is `factor` times as large; the latency of a Link stays."""
    if factor == 1:
        return costs
    changes: dict[str, object] = {}
    for name in (*TIMES, *MEMORY, "transfer", "message_bytes"):
        value = getattr(costs, name)
        if isinstance(value, Mapping):
            changes[name] = {key: _times(each, factor) for key, each in value.items()}
        elif isinstance(value, Sequence):
            changes[name] = [each * factor for each in value]
        elif value is not None:
            changes[name] = _times(value, factor)
    return replace(costs, **changes)  # type: ignore[arg-type]


def _times(value: float | Link, factor: float) -> float | Link:
    return value if isinstance(value, Link) else value * factor
