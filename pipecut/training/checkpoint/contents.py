"""The contents of a checkpoint, as one process holds them: tensors by the model's own names, objects, and facts.

Tensors go through torch.distributed.checkpoint: `model/<name>` for parameters and buffers, and those of optimizers.
Facts are small, and are sent to all ranks before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ...errors import CheckpointError, DisagreementError
from ...run import PipelineSchedule, differences
from ...stage import TRAINING_PREFIX, is_distributed
from ...text import tensor_text
from ...torch_internals import EXTRA_STATE
from .objects import Stateful, random_state, serialized, snapshot, state_of
from .optimizers import Names, OptimizerFacts, check_same_settings, facts_of
from .ranks import Position, check_copies, position_of


@dataclass(frozen=True)
class Facts:
    """Facts that the ranks compare before they save."""

    common: Mapping[str, str]  # the same on all ranks
    position: Position
    tensors: Mapping[str, str]  # dtype and shape of each of the model's, by name
    optimizers: tuple[OptimizerFacts, ...]
    trains: bool  # True if it holds parameters that are trained
    objects: Mapping[str, Any]  # of modules with an extra state, by name
    digests: Mapping[str, str]  # of the objects of this rank


@dataclass(frozen=True)
class Contents:
    """All that one rank writes."""

    tensors: Mapping[str, Tensor]
    objects: bytes
    facts: Facts

    def copied(self) -> Contents:
        """Return contents that no later step changes, on the CPU."""
        return replace(self, tensors={name: _copied(tensor) for name, tensor in self.tensors.items()})


def _copied(tensor: Tensor) -> Tensor:
    if is_distributed(tensor):
        return tensor.detach().clone()
    return tensor.detach().to("cpu", copy=True)


def parameter_names(schedule: PipelineSchedule) -> Names:
    """Return the first name in the model of each parameter object of this process, by id."""
    return {id(held.value): held.name for held in schedule.held_parameters()}


def model_tensors(schedule: PipelineSchedule) -> dict[str, list[Tensor]]:
    """Return the parameters and the buffers that are saved, by name; several where stages hold copies of one."""
    found: dict[str, list[Tensor]] = {}
    for held in schedule.held_parameters():
        found.setdefault(held.name, []).append(held.value.detach())
    saved = schedule.state_dict()
    for held in schedule.held_buffers():
        if held.local_name in saved:
            found.setdefault(held.name, []).append(held.value.detach())
    return found


def extra_states(schedule: PipelineSchedule) -> dict[str, Any]:
    """Return what modules save beside their tensors, by name."""
    return {name: value for name, value in schedule.state_dict().items() if name.rpartition(".")[2] == EXTRA_STATE}


def collect(
    folder: Path,
    schedule: PipelineSchedule,
    optimizers: Sequence[Optimizer],
    step: int,
    scheduler: Stateful | None,
    extra: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Contents:
    """Return what this process adds to a checkpoint."""
    held = model_tensors(schedule)
    _check_values(held)
    tensors = {f"{TRAINING_PREFIX}{name}": values[0] for name, values in held.items()}
    names = parameter_names(schedule)
    facts = []
    for number, optimizer in enumerate(optimizers):
        fact, state = facts_of(optimizer, names)
        facts.append(fact)
        tensors |= {f"optimizer{number}/{name}": value for name, value in state.items()}
    objects: dict[str, Any] = {
        "random streams": random_state(schedule),
        "scheduler": None if scheduler is None else snapshot(state_of(scheduler)),
        "optimizers": [snapshot(dict(fact.other)) for fact in facts],
        **{f"extra[{name!r}]": snapshot(state_of(value)) for name, value in extra.items()},
    }
    contents = {name: serialized(name, value) for name, value in objects.items()}
    extras = snapshot(extra_states(schedule))
    for name, value in extras.items():
        serialized(name, value)
    common = {
        "folder": str(folder.resolve()),
        "step": str(step),
        "model": _model_name(schedule),
        "number of stages": str(schedule.plan.stages),
        "scheduler": "none" if scheduler is None else type(scheduler).__name__,
        **{name: str(value) for name, value in options.items()},
    }
    return Contents(
        tensors,
        serialized("the objects of this rank", objects, checked=True),
        Facts(
            common,
            position_of(schedule),
            {name: tensor_text(values[0]) for name, values in held.items()},
            tuple(facts),
            any(parameter.requires_grad for parameter in schedule.parameters()),
            extras,
            {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()},
        ),
    )


def _model_name(schedule: PipelineSchedule) -> str:
    """Return the name of the class of the model."""
    return "modules cut by hand" if schedule.info is None else schedule.info.call.model_name


def _check_values(held: Mapping[str, Sequence[Tensor]]) -> None:
    empty = [name for name, values in held.items() if values[0].device.type == "meta"]
    if empty:
        raise CheckpointError(f"{empty[0]} is on the meta device: there is nothing to save")


def check_agreement(facts: Sequence[Facts]) -> None:
    """Raise on what differs between ranks, and on what would be mixed up in one checkpoint."""
    lines = differences([each.common for each in facts]) + differences([each.tensors for each in facts], absent=None)
    if lines:
        raise DisagreementError(
            "the ranks disagree on what to save:\n"
            + "".join(f"  {line}\n" for line in lines)
            + "Call save_checkpoint with the same arguments on every rank."
        )
    check_copies([each.position for each in facts])
    check_optimizers([each.optimizers for each in facts], [each.trains for each in facts])


def check_optimizers(every: Sequence[Sequence[OptimizerFacts]], trains: Sequence[bool]) -> None:
    """Raise unless all ranks that train have optimizers of the same kinds, with the same settings for one parameter."""
    with_some = [rank for rank, each in enumerate(every) if each]
    if not with_some:
        return
    kinds = [" and ".join(each.kind for each in optimizers) or "none" for optimizers in every]
    lines = differences(
        [
            {"optimizer": kind} if optimizers or training else {}
            for kind, optimizers, training in zip(kinds, every, trains, strict=True)
        ],
        absent=None,
    )
    if lines:
        raise DisagreementError(f"the ranks disagree on the optimizer: {lines[0]}. Pass one of the same kind on each")
    for number in range(len(every[with_some[0]])):
        check_same_settings((rank, group) for rank in with_some for group in every[rank][number].groups)


def by_number(every: Sequence[Sequence[OptimizerFacts]]) -> list[list[OptimizerFacts | None]]:
    """Return the facts of each optimizer on all ranks."""
    count = max((len(each) for each in every), default=0)
    return [[each[number] if number < len(each) else None for each in every] for number in range(count)]
