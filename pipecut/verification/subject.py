"""What is verified: the stages of this process, and the plan by which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe_ir.pipe import Pipe
from ..pipe_ir.structure import flatten
from ..schedule.plan import Plan
from ..schedule.registry import FAMILIES, known_name, plan_for
from ..schedule.run.calls import cut_by_hand, cut_traced
from ..stage.stage import PipelineStage, build_stage

Stages = Pipe | PipelineStage | Sequence[PipelineStage]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Subject:
    """Stages and a plan. Without torch.distributed these are all stages; with it those of this rank."""

    stages: list[PipelineStage]
    plan: Plan
    is_distributed: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.stages[0].group

    @property
    def has_output(self) -> bool:
        """Whether the output of the model comes out in this process."""
        return not self.is_distributed or self._holds(self.plan.stages - 1)

    @property
    def has_input(self) -> bool:
        """Whether the arguments of the model go in in this process."""
        return not self.is_distributed or self._holds(0)

    def _holds(self, stage: int) -> bool:
        return self.plan.placement.rank_of[stage] == dist.get_rank(self.group)


@dataclass(frozen=True)
class Request:
    """The schedule that was asked for."""

    schedule: str | type | Plan
    microbatches: int | None
    ranks: int | None
    specs: tuple[Any, Any]


def subject_of(given: Stages, call: Call, request: Request) -> Subject:
    """The stages that this process runs, built if a Pipe is given."""
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    stages = _listed(given)
    group = stages[0].group if stages else None
    total = given.num_stages if isinstance(given, Pipe) else stages[0].num_stages
    plan = _plan(given, stages, total, call, request, dist.get_world_size(group) if is_distributed else None)
    here = plan.placement.stages_of[dist.get_rank(group)] if is_distributed else range(total)
    built = [_built(given, index, call) for index in here] if isinstance(given, Pipe) else _chosen(stages, here, total)
    return Subject(built, plan, is_distributed)


def _listed(given: Stages) -> list[PipelineStage]:
    if isinstance(given, Pipe):
        return []
    stages = [given] if isinstance(given, PipelineStage) else list(given) if isinstance(given, Sequence) else []
    if not stages or not all(isinstance(stage, PipelineStage) for stage in stages):
        kind = type(next((stage for stage in stages if not isinstance(stage, PipelineStage)), given)).__name__
        raise InputError(
            f"verify() takes a Pipe or a list of PipelineStages, got {kind}: see pipeline() and PipelineStage"
        )
    return sorted(stages, key=lambda stage: stage.stage_index)


def _chosen(stages: Sequence[PipelineStage], here: Sequence[int], total: int) -> list[PipelineStage]:
    """Those that run in this process."""
    missing = sorted(set(here) - {stage.stage_index for stage in stages})
    if not missing:
        return [stage for stage in stages if stage.stage_index in here]
    if len(here) < total:
        raise InputError(f"this rank holds stages {list(here)} in the plan, and verify() did not get {missing}")
    raise InputError(
        f"in one process verify() needs all {total} stages, and did not get {missing}: pass them all, or call it "
        "on every rank (under torchrun, or in a function that launch() runs) with the stages of that rank"
    )


def _plan(
    given: Stages, stages: Sequence[PipelineStage], total: int, call: Call, request: Request, world: int | None
) -> Plan:
    if isinstance(request.schedule, Plan):
        if request.microbatches not in (None, request.schedule.microbatches):
            raise InputError(
                f"n_microbatches={request.microbatches}, and the plan has {request.schedule.microbatches}: leave it out"
            )
        return request.schedule
    name = known_name(request.schedule.__name__ if isinstance(request.schedule, type) else request.schedule)
    ranks = request.ranks or world or max(1, total // FAMILIES[name].chunks)
    if total % ranks:
        raise InputError(
            f"{total} stages cannot be put evenly on {ranks} ranks: cut the model into a multiple of {ranks}"
        )
    microbatches = request.microbatches
    if microbatches is None:
        info = given.info() if isinstance(given, Pipe) else stages[0].pipe_info
        whole = cut_by_hand(*call, 1, request.specs) if info is None else cut_traced(info.call, *call, 1, request.specs)
        microbatches = min(whole.samples[0], 2 * ranks)
    return plan_for(name, ranks=ranks, chunks=total // ranks, microbatches=microbatches)


def _built(pipe: Pipe, index: int, call: Call) -> PipelineStage:
    module = pipe.get_stage_module(index)
    return build_stage(module, index, pipe.info(), _device_of(module, call))


def _device_of(module: nn.Module, call: Call) -> torch.device:
    """Where a module is, so that it stays there; one without tensors is where the data is."""
    leaves, _ = flatten(call)
    here = (tensor for tensor in (*module.parameters(), *module.buffers(), *leaves) if isinstance(tensor, Tensor))
    return next((tensor.device for tensor in here), torch.device("cpu"))
