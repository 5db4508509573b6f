"""A model cut for one rank: its stages and their schedule, and the ranks that run the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...api import pipeline
from ...errors import InputError
from ...planning import plan
from ...run import PipelineSchedule, get_schedule_class
from ...schedule import Placement
from ...stage import Generators, PipelineStage, RandomStream
from .arguments import PipelineArguments
from .loss import BatchChunks, count_items, precision_of

_Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job: pipelines one after the other, each with a rank for each place of the placement.

    >>> Ranks(5, 6, Placement.loop(3)).replica, Ranks(5, 6, Placement.loop(3)).place
    (1, 2)
    """

    rank: int
    world: int
    placement: Placement
    group: dist.ProcessGroup | None = None  # the ranks of this pipeline, None for all
    copies: dist.ProcessGroup | None = None  # the ranks with the same stages in every pipeline, None if there is one

    @classmethod
    def of(cls, placement: Placement) -> Ranks:
        """Return the ranks of this job; every rank calls it, as groups are made."""
        if not dist.is_initialized():
            return cls(0, 1, placement)
        ranks = cls(dist.get_rank(), dist.get_world_size(), placement)
        if ranks.replicas == 1:
            return ranks
        per = placement.ranks
        pipelines = [dist.new_group([*range(first, first + per)]) for first in range(0, ranks.world, per)]
        copies = [dist.new_group([*range(place, ranks.world, per)]) for place in range(per)]
        return replace(ranks, group=pipelines[ranks.replica], copies=copies[ranks.place])

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return self.world // self.placement.ranks

    @property
    def replica(self) -> int:
        """The number of this rank's pipeline."""
        return self.rank // self.placement.ranks

    @property
    def place(self) -> int:
        """The number of this rank in its pipeline."""
        return self.rank % self.placement.ranks

    @property
    def last(self) -> int:
        """The rank of this pipeline that has the last stage, by its number in the job."""
        return self.rank - self.place + self.placement.rank_of[-1]

    @property
    def peers(self) -> range:
        """The ranks of this pipeline, by their numbers in the job."""
        return range(self.rank - self.place, self.rank - self.place + self.placement.ranks)


class CutModel:
    """The stages of a model that are on this rank, and the schedule that runs them with those of other ranks.

    `example` are the arguments of one call with a batch, `batch` the inputs that this call was made of.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Mapping[str, Any],
        arguments: PipelineArguments,
        ranks: Ranks,
        device: torch.device,
        loss: Callable[..., Tensor],
        weight: Callable[[Mapping[str, Any]], Any],
        autocast: _Autocast,
    ) -> None:
        self.model, self.ranks, self.device, self._autocast = model, ranks, device, autocast
        self._chunks = BatchChunks(precision_of(model))
        self._generators = Generators(device)
        options: dict[str, Any] = {
            "loss_fn": loss,
            "loss_weight": weight,
            "timeout": arguments.timeout,
            "kwargs_chunk_spec": self._chunks,
            "target_chunk_spec": self._chunks,
        }
        with autocast():
            self.schedule = self._build(example, arguments, options)
        self.modules = [stage.submod for stage in self.schedule.stages]

    def _build(
        self, example: Mapping[str, Any], arguments: PipelineArguments, options: Mapping[str, Any]
    ) -> PipelineSchedule:
        ranks, microbatches = self.ranks, arguments.microbatches
        first = _first_microbatch(example, microbatches)
        if arguments.searches:
            together = dist.group.WORLD if ranks.group is None and dist.is_initialized() else ranks.group
            found = plan(
                self.model,
                (),
                first,
                ranks=ranks.placement.ranks,
                batch=_rows(example),
                microbatch=_rows(first),
                recompute=False,
                group=together,
            )
            return found.build(ranks.place, self.device, group=ranks.group, dynamic=arguments.dynamic, **options)
        stages, dynamic, outputs = ranks.placement.stages, arguments.dynamic, arguments.outputs
        self.pipe = pipeline(self.model, (), first, num_stages=stages, dynamic=dynamic, outputs=outputs)
        held = ranks.placement.stages_of[ranks.place]
        built = [self.pipe.build_stage(index, self.device, ranks.group) for index in held]
        for stage in built:
            self._copy(stage)
        family = get_schedule_class(arguments.schedule)
        given: Any = built[0] if len(built) == 1 and stages == ranks.placement.ranks else built
        return family(given, microbatches, **options)

    def _copy(self, stage: PipelineStage) -> None:
        """Let gradients of a stage be averaged over all pipelines."""
        trains = any(parameter.requires_grad for parameter in stage.submod.parameters())
        if self.ranks.copies is not None and trains:
            stage.submod = DistributedDataParallel(stage.submod, process_group=self.ranks.copies)

    @property
    def has_mode(self) -> bool:
        """True if the stages run in the mode only in which the model was cut: generated code checks that."""
        info = self.schedule.info
        return info is not None and any("require_mode" in code for each in info.stages for code in each.code.values())

    def train(self, mode: bool = True) -> None:
        """Switch the model and its stages to training or evaluation: a stage is a tree of modules of its own."""
        self.model.train(mode)
        for module in self.modules:
            module.train(mode)

    def step(
        self, arguments: Mapping[str, Any], batch: Mapping[str, Any], *, parts: int, shifts: bool, seed: int
    ) -> float:
        """Run a training step, which adds to gradients, and return the loss of the batch, divided by `parts`.

        Its random numbers follow from the seed, and leave torch's generators as they were: from these, samplers draw.
        """
        self._chunks.counts = count_items(batch, shifts=shifts)
        with RandomStream(self._generators, seed), self._autocast():
            self.schedule.step(**arguments, target=batch, return_outputs=False, loss_kwargs={"parts": parts})
        return self.schedule.mean_loss()

    def eval(
        self, arguments: Mapping[str, Any], batch: Mapping[str, Any] | None, *, shifts: bool, outputs: bool
    ) -> Any:
        """Run an evaluation; with a batch its loss is made too. Returns the output on the rank of the last stage."""
        self._chunks.counts = None if batch is None else count_items(batch, shifts=shifts)
        with self._autocast():
            return self.schedule.eval(**arguments, target=batch, return_outputs=outputs)


def _rows(arguments: Mapping[str, Any]) -> int:
    """Return the number of samples in a call: the rows of its tensors."""
    rows = {value.shape[0] for value in arguments.values() if isinstance(value, Tensor) and value.dim()}
    if len(rows) != 1:
        raise InputError(
            f"the inputs of the model do not have a row for each sample: {_shapes(arguments)}. Let the collator make "
            "tensors whose first dim is the batch"
        )
    return int(rows.pop())


def _first_microbatch(arguments: Mapping[str, Any], microbatches: int) -> dict[str, Any]:
    """Return the part of a call that the first microbatch gets, to trace the model with."""
    rows = -(-_rows(arguments) // microbatches)
    return {
        name: value[:rows].clone() if isinstance(value, Tensor) and value.dim() else value
        for name, value in arguments.items()
    }


def _shapes(arguments: Mapping[str, Any]) -> str:
    shapes = {name: tuple(value.shape) for name, value in arguments.items() if isinstance(value, Tensor)}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no tensors"
