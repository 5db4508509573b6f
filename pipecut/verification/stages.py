"""The stages of this process, the plan by which they run, and the names of their parameters in the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from ..pipe import Pipe
from ..pipe_ir import flatten
from ..run import cut_by_hand, cut_traced
from ..schedule import FAMILIES, Plan, known_name, plan_for
from ..stage import PipelineStage, UnwrappedNames, is_distributed
from ..text import shape_text

Stages = Pipe | PipelineStage | Sequence[PipelineStage]
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class PlannedStages:
    """Stages and a plan: all stages without torch.distributed, and with it those of this rank."""

    stages: list[PipelineStage]
    plan: Plan
    is_distributed: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.stages[0].group

    @property
    def has_output(self) -> bool:
        """True if this process has the output of the model."""
        return not self.is_distributed or self._holds(self.plan.stages - 1)

    @property
    def has_input(self) -> bool:
        """True if this process takes the arguments of the model."""
        return not self.is_distributed or self._holds(0)

    def _holds(self, stage: int) -> bool:
        return self.plan.placement.rank_of[stage] == dist.get_rank(self.group)


@dataclass(frozen=True)
class ScheduleRequest:
    """The requested schedule."""

    schedule: str | type | Plan
    microbatches: int | None
    ranks: int | None
    specs: tuple[Any, Any]


def planned_stages(given: Stages, call: Call, request: ScheduleRequest) -> PlannedStages:
    """Return the stages that this process runs, built if a Pipe is given, and their plan."""
    is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    stages = _listed(given)
    group = stages[0].group if stages else None
    total = given.num_stages if isinstance(given, Pipe) else stages[0].num_stages
    plan = _plan(given, stages, total, call, request, dist.get_world_size(group) if is_distributed else None)
    here = plan.placement.stages_of[dist.get_rank(group)] if is_distributed else range(total)
    built = [_built(given, index, call) for index in here] if isinstance(given, Pipe) else _chosen(stages, here, total)
    return PlannedStages(built, plan, is_distributed)


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
    """Return those that run in this process."""
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
    given: Stages, stages: Sequence[PipelineStage], total: int, call: Call, request: ScheduleRequest, world: int | None
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
        variants = given.variants if isinstance(given, Pipe) else stages[0].variants
        info = stages[0].pipe_info if variants is None else variants.info(variants.number_for(*call))
        cut = cut_by_hand if info is None else functools.partial(cut_traced, info.call)
        calls = cut(*call, 2 * ranks, request.specs, fewer=True)
        microbatches = 1 if calls.made.sizes is None else len(calls.samples)
    return plan_for(name, ranks=ranks, chunks=total // ranks, microbatches=microbatches)


def _built(pipe: Pipe, index: int, call: Call) -> PipelineStage:
    return pipe.build_stage(index, _device_of(pipe.get_stage_module(index), call))


def _device_of(module: nn.Module, call: Call) -> torch.device:
    """Return the device of a module, where it stays; for one without tensors that of the data."""
    leaves, _ = flatten(call)
    here = (tensor for tensor in (*module.parameters(), *module.buffers(), *leaves) if isinstance(tensor, Tensor))
    return next((tensor.device for tensor in here), torch.device("cpu"))


# Names of parameters and buffers.

Naming = Callable[[int, str], str]  # stage, name in its module -> name in the model

_SHOWN = 6


@dataclass(frozen=True)
class HeldParameter:
    """A parameter that a stage holds, under its name in the model."""

    stage: int
    name: str
    parameter: Tensor


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Return all names of parameters, each with the first name of the same parameter: tied ones have several."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def match_parameters(stages: Sequence[PipelineStage], model: nn.Module, names: Naming | None) -> list[HeldParameter]:
    """Return the parameters of the stages by their names in the model; one that several stages hold is listed once.

    A stage holds the model's own parameters, or copies of them under the same names. Copies must have the same values,
    so that a parameter is not taken for another one with its name.
    """
    matcher = _Matcher(model, names)
    found: dict[int, HeldParameter] = {}
    for stage in stages:
        unwrapped = UnwrappedNames(stage.submod)
        for name, parameter in stage.submod.named_parameters():
            held = matcher.match(stage.stage_index, name, unwrapped.of(name), parameter)
            if held is not None:
                found.setdefault(id(parameter), held)
    matcher.raise_faults()
    return list(found.values())


BufferPlace = tuple[int, str]  # stage, name in its module


def match_buffers(stages: Sequence[PipelineStage], model: nn.Module) -> dict[BufferPlace, str]:
    """Return the names in the model of those buffers of the stages that are its buffers, or have the names of some."""
    named = dict(model.named_buffers(remove_duplicate=False))
    by_identity = {id(buffer): name for name, buffer in reversed(named.items())}
    by_unwrapped = _by_unwrapped(model, named)
    found: dict[BufferPlace, str] = {}
    for stage in stages:
        unwrapped = UnwrappedNames(stage.submod)
        for path, buffer in stage.submod.named_buffers(remove_duplicate=False):
            name = by_identity.get(id(buffer)) or by_unwrapped.get(unwrapped.of(path))
            if name is not None and named[name].shape == buffer.shape:
                found[stage.stage_index, path] = name
    return found


def _by_unwrapped(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return names in a model by those without wrappers: the model may have wrapped parts, or its copy in a stage."""
    unwrapped = UnwrappedNames(model)
    return {unwrapped.of(name): name for name in names}


class _Matcher:
    def __init__(self, model: nn.Module, names: Naming | None) -> None:
        self.kind = type(model).__name__
        self.names = names
        self.canonical = _parameter_names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.by_unwrapped = _by_unwrapped(model, self.parameters)
        self.by_identity = {id(parameter): self.canonical[name] for name, parameter in self.parameters.items()}
        self.faults: list[str] = []

    def match(self, stage: int, name: str, unwrapped: str, parameter: Tensor) -> HeldParameter | None:
        known = self.by_identity.get(id(parameter))
        if known is not None:
            return HeldParameter(stage, known, parameter)
        wanted = self.by_unwrapped.get(unwrapped, unwrapped) if self.names is None else self.names(stage, name)
        fault = self._fault(f"stage {stage}: '{name}'", wanted, parameter)
        if fault:
            self.faults.append(fault)
            return None
        return HeldParameter(stage, self.canonical[wanted], parameter)

    def _fault(self, where: str, wanted: str, parameter: Tensor) -> str:
        if is_distributed(parameter):
            return f"{where} is sharded, and the model's is not: verify before fully_shard"
        if wanted not in self.parameters:
            return f"{where} is not a parameter of {self.kind}, nor is there one named '{wanted}'"
        original = self.parameters[wanted]
        if parameter.shape != original.shape:
            return (
                f"{where} is {shape_text(parameter.shape)}, and '{wanted}' of the model is {shape_text(original.shape)}"
            )
        if not torch.equal(parameter.detach().to(original.device, original.dtype), original.detach()):
            return f"{where} has other values than '{wanted}' of the model"
        return ""

    def raise_faults(self) -> None:
        if self.faults:
            raise InputError("\n  ".join(_shortened(self.faults)) + f"\n{_REMEDY}")


_REMEDY = (
    "Give verify() the model that the stages are made of. If they hold copies under other names, pass names=, a "
    "function of (stage index, name in the stage) that gives the name in the model"
)


def _shortened(faults: Sequence[str]) -> Iterator[str]:
    yield "the parameters of the stages are not those of the model:"
    yield from faults[:_SHOWN]
    if len(faults) > _SHOWN:
        yield f"and {len(faults) - _SHOWN} more"
