"""Sources of the random numbers that the forwards of a step draw, one for each value of the option `random_numbers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from ..pipe_ir import PipeInfo
from ..schedule import Dataflow
from ..stage import Generators, PipelineStage, RandomStream, derive_seed
from ..text import did_you_mean
from .state import StepState
from .transport import Meta


class RandomNumbers:
    """The random numbers of the stages of one rank: here, from the default generators of each process.

    Those that `travel` go on where the stage before has left off: the state of their generators goes along with the
    parcel to the next stage.
    """

    travel = False

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None: ...

    def forward(self, stage: PipelineStage, microbatch: int, state: StepState) -> AbstractContextManager[object]:
        """Return a context for the forward of a stage, and for the loss at its end."""
        return contextlib.nullcontext()

    def expected(self, source: int, target: int) -> tuple[Meta, ...]:
        """Return the description of what comes along with a parcel."""
        return ()

    def outgoing(self, source: int, target: int, microbatch: int, state: StepState) -> list[Tensor]:
        """Return what goes along with a parcel to another rank."""
        return []

    def arrived(self, target: int, microbatch: int, states: list[Tensor], state: StepState) -> None:
        """Take what came along with a parcel."""


class _PerStage(RandomNumbers):
    """A stream of its own for each stage and microbatch."""

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        self.generators = {index: Generators(stage.device) for index, stage in stages.items()}

    def forward(self, stage: PipelineStage, microbatch: int, state: StepState) -> AbstractContextManager[object]:
        index = stage.stage_index
        stream = RandomStream(self.generators[index], derive_seed(state.seed, index, microbatch))
        return self._noting(stream, index, state) if stage.groups.tensors else stream

    @contextlib.contextmanager
    def _noting(self, stream: RandomStream, index: int, state: StepState) -> Iterator[None]:
        """Note draws from a stream: tensor-parallel partners must then have the same one."""
        with stream:
            before = self.generators[index].state()
            yield
            state.draws = state.draws or not torch.equal(before, self.generators[index].state())


class _AsUncut(_PerStage):
    """One stream for each microbatch on its way through all stages, as it has on its way through the uncut model."""

    travel = True

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        super().__init__(stages)
        self.devices = {index: stage.device for index, stage in stages.items()}
        self.bytes = {index: generators.state().numel() for index, generators in self.generators.items()}

    @contextlib.contextmanager
    def forward(self, stage: PipelineStage, microbatch: int, state: StepState) -> Iterator[None]:
        index, states = stage.stage_index, state.random_states
        begin = derive_seed(state.seed, microbatch) if stage.is_first else states.pop((index, microbatch))
        stream = RandomStream(self.generators[index], begin, keep_end=not stage.is_last)
        with self._noting(stream, index, state) if stage.groups.tensors else stream:
            yield
        if not stage.is_last:
            states[index + 1, microbatch] = stream.end

    def expected(self, source: int, target: int) -> tuple[Meta, ...]:
        return (Meta((self.bytes[target],), torch.uint8, False),) if target == source + 1 else ()

    def outgoing(self, source: int, target: int, microbatch: int, state: StepState) -> list[Tensor]:
        if target != source + 1:
            return []
        return [state.random_states.pop((target, microbatch)).to(self.devices[source])]

    def arrived(self, target: int, microbatch: int, states: list[Tensor], state: StepState) -> None:
        for each in states:
            state.random_states[target, microbatch] = each.cpu()


KINDS: Mapping[str, type[RandomNumbers]] = {
    "per_stage": _PerStage,
    "as_uncut": _AsUncut,
    "per_process": RandomNumbers,
}


def checked_kind(kind: str | None, info: PipeInfo | None) -> str:
    """Validate the option `random_numbers` of a schedule; by default, the cut makes no difference to a traced model."""
    if kind is None:
        return "as_uncut" if info is not None and info.is_random else "per_stage"
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise InputError(f"random_numbers={kind!r} is not known: it is one of {known}.{did_you_mean(str(kind), KINDS)}")
    return kind


def with_states(dataflow: Dataflow, kind: str) -> Dataflow:
    """Add the edges along which the states of random streams travel: from each stage to the next, in any case."""
    if kind != "as_uncut":
        return dataflow
    edges = {(stage, stage + 1) for stage in range(dataflow.stages - 1)}
    return replace(dataflow, activations=dataflow.activations | edges)
