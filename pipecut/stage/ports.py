"""What a stage takes and gives: which values, in which order, from and to which stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..pipe_ir.pipe import Edge, PipeInfo
from ..pipe_ir.spec import TensorSpec


@dataclass(frozen=True)
class Item:
    """One value of a parcel: its name, what is known of it, and where its sender has it."""

    name: str
    spec: TensorSpec
    output: int | None  # the place among the sending stage's outputs
    root: int | None  # or the model input that it is


@dataclass(frozen=True)
class Ports:
    """The parcels of a traced stage. A parcel is all that one stage sends to another for one microbatch.

    `arguments` says for each argument of the forward from which stage's parcel it comes, and its place there; an input
    of the model on the first stage has no parcel, and its number instead.
    """

    arguments: tuple[tuple[int | None, int], ...]
    incoming: Mapping[int, tuple[Item, ...]]
    outgoing: Mapping[int, tuple[Item, ...]]
    outputs: int


def ports_of(info: PipeInfo, stage: int) -> Ports:
    """The ports of one stage of a pipe."""
    incoming = {
        source: _items(info, source, stage) for source in sorted({e.source for e in info.edges if e.target == stage})
    }
    outgoing = {
        target: _items(info, stage, target) for target in sorted({e.target for e in info.edges if e.source == stage})
    }
    places = {
        edge.value: (source, place) for source in incoming for place, edge in enumerate(_edges(info, source, stage))
    }
    arguments = tuple(places.get(value, (None, value)) for value in info.stages[stage].inputs)
    return Ports(arguments, incoming, outgoing, len(info.stages[stage].outputs))


def _edges(info: PipeInfo, source: int, target: int) -> list[Edge]:
    return sorted(
        (edge for edge in info.edges if (edge.source, edge.target) == (source, target)), key=lambda edge: edge.value
    )


def _items(info: PipeInfo, source: int, target: int) -> tuple[Item, ...]:
    outputs = info.stages[source].outputs
    return tuple(
        Item(
            edge.name,
            edge.spec,
            None if edge.kind == "root input" else outputs.index(edge.value),
            edge.value if edge.kind == "root input" else None,
        )
        for edge in _edges(info, source, target)
    )
