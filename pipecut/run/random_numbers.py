"""What the forwards of a step draw their random numbers from, as the option `random_numbers` of a schedule says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..errors import InputError
from ..schedule import Dataflow
from ..stage import Generators, PipelineStage, RandomStream, derive_seed
from ..text import did_you_mean
from .transport.base import Meta


class RandomNumbers(Protocol):
    """The random numbers of the stages of one rank.

    Some go on where the stage before has left off, and need its state: it goes along with the parcel to the next stage.
    """

    def begin(self, seed: int) -> None:
        """Start a step, with the seed that all ranks have."""

    def forward(self, stage: PipelineStage, microbatch: int) -> AbstractContextManager[object]:
        """A context for the forward of a stage, and for the loss at its end."""

    def expected(self, source: int, target: int) -> tuple[Meta, ...]:
        """What comes along with a parcel."""

    def outgoing(self, source: int, target: int, microbatch: int) -> list[Tensor]:
        """What goes along with a parcel to another rank."""

    def arrived(self, target: int, microbatch: int, states: list[Tensor]) -> None:
        """Take what came along with a parcel."""


class _PerProcess:
    """All draw from the default generators of their process, in the order in which they run."""

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None: ...

    def begin(self, seed: int) -> None: ...

    def forward(self, stage: PipelineStage, microbatch: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def expected(self, source: int, target: int) -> tuple[Meta, ...]:
        return ()

    def outgoing(self, source: int, target: int, microbatch: int) -> list[Tensor]:
        return []

    def arrived(self, target: int, microbatch: int, states: list[Tensor]) -> None: ...


class _PerStage(_PerProcess):
    """Each stage has a stream of its own for each microbatch."""

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        self.generators = {index: Generators(stage.device) for index, stage in stages.items()}
        self.seed = 0

    def begin(self, seed: int) -> None:
        self.seed = seed

    def forward(self, stage: PipelineStage, microbatch: int) -> AbstractContextManager[object]:
        index = stage.stage_index
        return RandomStream(self.generators[index], derive_seed(self.seed, index, microbatch))


class _AsUncut(_PerStage):
    """Each microbatch has one stream for its way through all stages, as it has for its way through the model."""

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        super().__init__(stages)
        self.devices = {index: stage.device for index, stage in stages.items()}
        self.bytes = {index: generators.state().numel() for index, generators in self.generators.items()}
        self.states: dict[tuple[int, int], Tensor] = {}  # by the stage that goes on from there, and the microbatch

    def begin(self, seed: int) -> None:
        super().begin(seed)
        self.states.clear()

    @contextlib.contextmanager
    def forward(self, stage: PipelineStage, microbatch: int) -> Iterator[None]:
        index = stage.stage_index
        begin = derive_seed(self.seed, microbatch) if stage.is_first else self.states.pop((index, microbatch))
        with RandomStream(self.generators[index], begin, keep_end=not stage.is_last) as stream:
            yield
        if not stage.is_last:
            self.states[index + 1, microbatch] = stream.end

    def expected(self, source: int, target: int) -> tuple[Meta, ...]:
        return (Meta((self.bytes[target],), torch.uint8, False),) if target == source + 1 else ()

    def outgoing(self, source: int, target: int, microbatch: int) -> list[Tensor]:
        return [self.states.pop((target, microbatch)).to(self.devices[source])] if target == source + 1 else []

    def arrived(self, target: int, microbatch: int, states: list[Tensor]) -> None:
        for state in states:
            self.states[target, microbatch] = state.cpu()


KINDS: Mapping[str, Callable[[Mapping[int, PipelineStage]], RandomNumbers]] = {
    "per_stage": _PerStage,
    "as_uncut": _AsUncut,
    "per_process": _PerProcess,
}


def checked_kind(kind: str) -> str:
    """A kind that there is."""
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise InputError(f"random_numbers={kind!r} is not known: it is one of {known}.{did_you_mean(str(kind), KINDS)}")
    return kind


def with_states(dataflow: Dataflow, kind: str) -> Dataflow:
    """What goes from stage to stage, and the states of random streams: they go to the next one in any case."""
    if kind != "as_uncut":
        return dataflow
    steps = {(stage, stage + 1) for stage in range(dataflow.stages - 1)}
    return replace(dataflow, activations=dataflow.activations | steps)
