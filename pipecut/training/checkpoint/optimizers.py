"""The state of optimizers by the names of parameters, so that a model that is cut otherwise can go on with it.

A tensor of the state is saved under `optimizer<number>/<key>/<name of the parameter>`. The settings of parameter groups
are kept for each name: which parameters make up a group on a rank depends on the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CheckpointError
from ...stage import is_distributed
from ...text import counted, did_you_mean, lines_of, listed, tensor_text
from .objects import snapshot

_SHOWN = 20
_PLAIN = (int, float, bool, str, type(None))

Names = Mapping[int, str]  # the name in the model of each parameter object, by its id


@dataclass(frozen=True)
class _Group:
    """A parameter group on one rank: its settings, and the names of its parameters."""

    settings: Mapping[str, Any]
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        """The settings in a form that can be compared."""
        return str({key: _setting(value) for key, value in sorted(self.settings.items())})


def _setting(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer of one rank without its tensors: small enough to be sent to the others."""

    kind: str
    groups: tuple[_Group, ...]
    values: Mapping[str, Mapping[str, Any]]  # what is no tensor in the state of a parameter, by name and key
    on_cpu: frozenset[str]  # keys whose tensors are on the CPU while the parameters are not
    other: Mapping[str, Any]  # what its state_dict() has besides


def as_list(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """Return one optimizer or several as a list."""
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for each in given:
        if not isinstance(each, Optimizer):
            raise CheckpointError(
                f"optimizer is a {type(each).__name__}: pass a torch.optim.Optimizer or a list of them; other objects "
                "with state_dict() and load_state_dict() go into extra="
            )
    return given


def kind_of(optimizer: Optimizer) -> str:
    """Return the class of an optimizer."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_parameters(optimizer: Optimizer, names: Names) -> None:
    """Raise on parameters that the schedule does not have."""
    unknown = [
        f"parameter {place} of group {number}, {tensor_text(parameter)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in names
    ]
    if unknown:
        raise CheckpointError(
            f"the {type(optimizer).__name__} holds {counted(len(unknown), 'parameter')} that the schedule does not "
            f"have:{lines_of(unknown, _SHOWN)}\nMake it from schedule.parameters(), after the stages were wrapped or "
            "moved"
        )


def facts_of(optimizer: Optimizer, names: Names) -> tuple[OptimizerFacts, dict[str, Tensor]]:
    """Return what is saved of an optimizer: the facts, and its tensors by key and name."""
    check_parameters(optimizer, names)
    state = optimizer.state_dict()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    on_cpu: set[str] = set()
    for parameter, place in zip(parameters, places, strict=True):
        name = names[id(parameter)]
        for key, value in state["state"].get(place, {}).items():
            if isinstance(value, Tensor):
                tensors.setdefault(f"{key}/{name}", value)
                if value.device.type == "cpu" and parameter.device.type != "cpu":
                    on_cpu.add(key)
            elif isinstance(value, _PLAIN) and isinstance(key, str):
                values.setdefault(name, {})[key] = value
            else:
                raise CheckpointError(
                    f"the {type(optimizer).__name__} keeps {key!r} of {name} as a {type(value).__name__}: only an "
                    "optimizer whose state is tensors and numbers of each parameter can go on under another cut"
                )
    other = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return OptimizerFacts(kind_of(optimizer), groups_of(optimizer, names), values, frozenset(on_cpu), other), tensors


def groups_of(optimizer: Optimizer, names: Names) -> tuple[_Group, ...]:
    """Return the parameter groups by names."""
    return tuple(
        _Group(
            {key: snapshot(value) for key, value in group.items() if key not in ("params", "param_names")},
            tuple(names[id(parameter)] for parameter in group["params"]),
        )
        for group in optimizer.param_groups
    )


def check_same_settings(groups: Iterable[tuple[int, _Group]]) -> None:
    """Raise if a parameter that several ranks or stages hold has different settings in two groups."""
    known: dict[str, tuple[int, _Group]] = {}
    for rank, group in groups:
        for name in group.names:
            before, other = known.setdefault(name, (rank, group))
            if other.text != group.text:
                raise CheckpointError(
                    f"the tied parameter {name} is in two parameter groups with different settings, "
                    f"{_difference(other, group)} (on rank {before} and on rank {rank}): its holders would drift "
                    "apart. Put it into groups with the same settings wherever it is held"
                )


def _difference(one: _Group, other: _Group) -> str:
    keys = [
        key
        for key in {**one.settings, **other.settings}
        if str(_setting(one.settings.get(key))) != str(_setting(other.settings.get(key)))
    ]
    return listed(
        (f"{key}={_setting(one.settings.get(key))} and {_setting(other.settings.get(key))}" for key in keys), at_most=4
    )


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer of a whole job, as a checkpoint has it."""

    kind: str
    settings: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int]  # the settings of each parameter
    places: Mapping[str, tuple[int, int]]  # of each parameter, the rank and the number of its group there
    values: Mapping[str, Mapping[str, Any]]
    on_cpu: Sequence[str]
    group_counts: Sequence[int] = ()  # by rank; none in checkpoints of 0.1.0

    def group(self, name: str) -> _Group:
        """Return the settings of a parameter."""
        return _Group(self.settings[self.group_of[name]], (name,))


def merged(facts: Sequence[OptimizerFacts | None]) -> dict[str, Any]:
    """Return the optimizer of all ranks, as the fields of a SavedOptimizer."""
    settings: dict[str, tuple[int, Mapping[str, Any]]] = {}
    group_of: dict[str, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(facts):
        for number, group in enumerate(each.groups if each is not None else ()):
            place, _ = settings.setdefault(group.text, (len(settings), group.settings))
            for name in group.names:
                group_of.setdefault(name, place)
                places.setdefault(name, (rank, number))
    present = [each for each in facts if each is not None]
    return {
        "kind": present[0].kind,
        "settings": [dict(values) for _, values in settings.values()],
        "group_of": group_of,
        "places": places,
        "values": {name: dict(values) for each in present for name, values in each.values.items()},
        "on_cpu": sorted(set().union(*(each.on_cpu for each in present))),
        "group_counts": [0 if each is None else len(each.groups) for each in facts],
    }


def check_fits(saved: SavedOptimizer, kind: str, held: Sequence[str], where: str) -> None:
    """Raise if an optimizer is of another kind than the saved one, or over other parameters; `held` is by all ranks."""
    if saved.kind != kind:
        raise CheckpointError(
            f"{where} was saved with a {saved.kind}, and the optimizer now is a {kind}: make one of the same kind; or "
            "load without optimizer=, to begin with a new state"
        )
    known = set(held)
    new, gone = [name for name in held if name not in saved.group_of], sorted(set(saved.group_of) - known)
    lines = [f"{name}, which the saved one did not hold.{did_you_mean(name, gone)}" for name in dict.fromkeys(new)]
    lines += [f"{name}, which only the saved one held.{did_you_mean(name, new)}" for name in gone]
    if lines:
        raise CheckpointError(
            f"the optimizer is over other parameters than the one in {where}:{lines_of(lines, _SHOWN)}\nFreeze and "
            "group parameters as they were; or load without optimizer=, to begin with a new state"
        )


def settings_of(saved: SavedOptimizer, group: _Group, number: int) -> Mapping[str, Any]:
    """Return the saved settings of a group of parameters; raise if they were in groups with different ones."""
    found: dict[str, _Group] = {}
    for name in group.names:
        found.setdefault(saved.group(name).text, saved.group(name))
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise CheckpointError(
            f"group {number} of the optimizer has parameters that were saved with different settings, {one.names[0]} "
            f"and {other.names[0]} ({_difference(one, other)}): make groups as they were when it was saved"
        )
    return next(iter(found.values())).settings if found else group.settings


def target_like(
    parameter: nn.Parameter, size: Sequence[int], dtype: torch.dtype, where: str, *, on_cpu: bool
) -> Tensor:
    """Return a tensor without values to read a part of a parameter's state into, sharded like the parameter."""
    if tuple(size) == tuple(parameter.shape) and not on_cpu:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if is_distributed(parameter) and len(size) > 0:
        raise CheckpointError(
            f"{where} has another shape than its parameter, {list(size)} and {list(parameter.shape)}, which is in "
            "shards now: how the state would be sharded is not known. Load it into stages that are not sharded"
        )
    device = torch.device("cpu") if on_cpu or len(size) == 0 else parameter.device
    return torch.empty(tuple(size), dtype=dtype, device=device)


def restore(
    optimizer: Optimizer,
    names: Names,
    saved: SavedOptimizer,
    tensors: Mapping[str, Tensor],
    other: Mapping[str, Any],
) -> None:
    """Give an optimizer the saved settings and state; `tensors` are by key and name."""
    by_name: dict[str, dict[str, Any]] = {}
    for entry, tensor in tensors.items():
        key, _, name = entry.partition("/")
        by_name.setdefault(name, {})[key] = tensor
    for name, values in saved.values.items():
        by_name.setdefault(name, {}).update(values)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups, start = [], 0
    for number, group in enumerate(groups_of(optimizer, names)):
        numbers = list(range(start, start + len(group.names)))
        groups.append({**settings_of(saved, group, number), "params": numbers})
        start += len(numbers)
    seen: set[str] = set()
    state = {}
    for place, parameter in enumerate(parameters):
        name = names[id(parameter)]
        if name in by_name:
            # Holders that are apart do not share tensors: each is updated.
            copy = name in seen
            state[place] = {k: v.clone() if copy and isinstance(v, Tensor) else v for k, v in by_name[name].items()}
            seen.add(name)
    optimizer.load_state_dict({**other, "state": state, "param_groups": groups})
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        _undo_conversions(optimizer, parameters, state)


def _undo_conversions(
    optimizer: Optimizer, parameters: Sequence[Tensor], state: Mapping[int, Mapping[str, Any]]
) -> None:
    """Put back what torch has converted to the dtype of the parameter, such as float32 sums of a bfloat16 one."""
    for place, values in state.items():
        loaded = optimizer.state[parameters[place]]
        for key, value in values.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value


# Learning-rate schedulers, whose state has lists by parameter group.


@dataclass(frozen=True)
class Origin:
    """The place that a parameter group had: the state of a scheduler, the number of the group there, and of how many.

    The last is None where a checkpoint does not say it.
    """

    state: Any
    group: int
    groups: int | None

    def within(self, key: Any) -> Origin:
        return replace(self, state=self.state[key])

    @property
    def is_by_group(self) -> bool:
        """True if the state can be a list with an entry for each group."""
        return self.group < len(self.state) and self.groups in (None, len(self.state))

    def differs(self, other: Sequence[Any]) -> bool:
        return len(self.state) != len(other) or any(
            not torch.equal(one, two) if isinstance(one, Tensor) and isinstance(two, Tensor) else one != two
            for one, two in zip(self.state, other, strict=True)
        )


def regrouped(now: Any, saved: Any, origins: Sequence[Origin]) -> Any:
    """Return a scheduler's state in which lists with an entry for each group have those of other groups.

    `now` is the state of the scheduler that goes on, and `origins` has the place of each of its groups. A list is by
    group if it has as many entries as there were groups wherever it was saved, and are now. One that has been the same
    everywhere, and is now, such as that of milestones, needs no other order.

    >>> now, saved = {"base_lrs": [0.0], "last_epoch": 0}, {"base_lrs": [0.1, 0.2], "last_epoch": 7}
    >>> regrouped(now, saved, [Origin(saved, 1, 2)])
    {'base_lrs': [0.2], 'last_epoch': 7}
    """
    made = {}
    for key, value in saved.items():
        own = now.get(key)
        lists = isinstance(value, list) and isinstance(own, list)
        if isinstance(value, dict) and isinstance(own, dict):
            value = regrouped(own, value, [each.within(key) for each in origins])
        elif lists and all(isinstance(each, dict) for each in (*value, *own)):
            value = [
                regrouped(here, there, [each.within(key).within(place) for each in origins])
                for place, (here, there) in enumerate(zip(own, value, strict=False))
            ]
        elif lists and len(own) == len(origins):
            there = [each.within(key) for each in origins]
            if all(each.is_by_group for each in there) and any(each.differs(own) for each in there):
                value = [each.state[each.group] for each in there]
        made[key] = value
    return made
