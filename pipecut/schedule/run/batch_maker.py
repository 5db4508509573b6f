"""What the user passed to a step, as the data of each rank that is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...pipe_ir.pipe import PipeInfo
from ...stage.randomness import StepSeeds
from ...stage.stage import PipelineStage
from ..plan import Plan
from .batch import Batch
from .calls import Calls, cut_by_hand, cut_traced
from .connection import Connection
from .examples import check_given
from .header import EVAL, STEP
from .keywords import refuse_unknown
from .objective import Objective
from .targets import cut_target
from .weighing import Weighing, as_integer, by_name, from_integer, warned_of_uneven_labels

Specs = tuple[Any, Any, Any]  # how positional arguments, keyword arguments and the target are cut


LOOKS = 8  # steps in which labels are looked at: after that nothing has to wait for it


@dataclass(frozen=True)
class Given:
    """What a step was called with in this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any] | None
    return_outputs: bool
    merge_spec: Any = None
    losses: list[Tensor] | None = None  # to be filled


class BatchMaker:
    """Cuts what was given, and tells all ranks the sizes of the microbatches."""

    def __init__(
        self,
        plan: Plan,
        info: PipeInfo | None,
        stages: Sequence[PipelineStage],
        specs: Specs,
        connection: Connection,
        objective: Objective,
        weighing: Weighing | None,
        seeds: StepSeeds | None,
    ) -> None:
        self.info = info
        self.stages = stages
        self.seeds = seeds
        self.specs = specs[:2]
        self.target_spec = specs[2]
        self.connection = connection
        self.objective = objective
        self.weighing = weighing
        self.steps_to_look_at = LOOKS
        self.microbatches = plan.microbatches
        self.first = plan.placement.rank_of[0]
        self.last = plan.placement.rank_of[plan.stages - 1]

    def make(self, given: Given) -> dict[int, Batch]:
        """The data of each rank that is here."""
        if self.info is None:
            refuse_unknown(self.stages, given.kwargs)
        calls = self._calls(given) if self.first in self.connection.ranks else None
        shared = self._share(given.training, calls)
        batches = {}
        for rank in self.connection.ranks:
            loss_kwargs = given.loss_kwargs or {}
            batch = Batch(given.training, shared.samples, shared.sizes, loss_kwargs=loss_kwargs)
            batch.merge_spec, batch.losses_to_fill = given.merge_spec, given.losses
            batch.keep_results, batch.weights, batch.seed = given.return_outputs, shared.weights, shared.seed
            if calls is not None and rank == self.first:
                batch.args, batch.kwargs, batch.roots = calls.args, calls.kwargs, calls.roots
            elif self.info is None and given.kwargs:
                batch.kwargs = self._own_kwargs(rank, given.kwargs, shared.samples)
            if rank == self.last:
                self._give_target(batch, given.target, shared.samples_first)
            batches[rank] = batch
        return batches

    def _calls(self, given: Given) -> Calls:
        """The microbatches, on the rank of the first stage."""
        if not given.args and not given.kwargs:
            raise InputError(
                "step() got no input on the rank of the first stage: pass the arguments of the whole batch"
            )
        if self.info is not None:
            return cut_traced(self.info.call, given.args, given.kwargs, self.microbatches, self.specs)
        calls = cut_by_hand(given.args, given.kwargs, self.microbatches, self.specs)
        first = next(stage for stage in self.stages if stage.is_first)
        first.validate_tensors("input_args", first.input_args, calls.args[0], in_part=bool(calls.kwargs[0]))
        check_given(first, calls.args[0], calls.kwargs[0], calls.dims)
        return calls

    def _share(self, training: bool, calls: Calls | None) -> _Shared:
        """Tell all ranks what kind of step it is, and of its microbatches a row of numbers each."""
        width = 2 + (1 if self.info is None else len(self.info.call.dims))
        # Every rank draws a seed, and that of the first stage is used: so their generators stay in step.
        seed = 0 if self.seeds is None else self.seeds.next(training=training)
        numbers = None
        if calls is not None:
            numbers = [seed, int(calls.samples_first)]
            weights = self._weights_of(calls, training)
            for nth, (samples, sizes) in enumerate(zip(calls.samples, calls.sizes, strict=True)):
                numbers += [samples, as_integer(-1.0 if weights is None else weights[nth]), *sizes]
        kind = STEP if training else EVAL
        seed, first, *rest = self.connection.share(kind, self.first, numbers, 2 + self.microbatches * width)
        rows = [rest[nth * width :][:width] for nth in range(self.microbatches)]
        told = [from_integer(row[1]) for row in rows]
        return _Shared(
            [row[0] for row in rows],
            [tuple(row[2:]) for row in rows],
            None if -1.0 in told else told,
            bool(first),
            seed,
        )

    def _weights_of(self, calls: Calls, training: bool) -> list[float] | None:
        """Those that only the rank of the first stage can know, by the arguments of the model."""
        if self.info is None or (self.weighing is not None and self.weighing.source != "arguments"):
            return None
        looks = training and self.steps_to_look_at > 0 and self.objective.is_own
        if self.weighing is None and not looks:
            return None
        signature = self.info.call.signature
        named = [by_name(signature, *call) for call in zip(calls.args, calls.kwargs, strict=True)]
        if self.weighing is None:
            self.steps_to_look_at = 0 if warned_of_uneven_labels(named) else self.steps_to_look_at - 1
            return None
        return self.weighing.of(named, training=training)

    def _own_kwargs(self, rank: int, kwargs: Mapping[str, Any], samples: list[int]) -> list[dict[str, Any]]:
        """The keyword arguments that a module cut by hand gets on its own rank."""
        own = cut_by_hand((), kwargs, self.microbatches, (None, self.specs[1]))
        if own.cut and own.samples != samples:
            raise InputError(
                f"the keyword arguments of rank {rank} have {sum(own.samples)} samples, and the batch has "
                f"{sum(samples)}: pass those of the whole batch"
            )
        return own.kwargs

    def _give_target(self, batch: Batch, target: Any, samples_first: bool) -> None:
        """What the loss needs, on the rank of the last stage."""
        self.objective.check(target, batch.loss_kwargs, training=batch.training)
        if target is not None:
            batch.targets = cut_target(target, batch.samples, self.target_spec, samples_first=samples_first)
        if self.weighing is not None and self.weighing.source != "arguments":
            keywords = batch.kwargs or [{}] * self.microbatches
            parts = batch.targets if self.weighing.source == "target" else keywords
            batch.weights = self.weighing.of(parts, training=batch.training)


@dataclass(frozen=True)
class _Shared:
    """What all ranks know of a step."""

    samples: list[int]
    sizes: list[tuple[int, ...]]
    weights: list[float] | None
    samples_first: bool  # whether all inputs that are cut have their samples in dim 0
    seed: int  # of the random numbers
