"""Ties of modules that were cut by hand: the user says which parameters of which stages are one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import InputError, did_you_mean
from ...stage.stage import PipelineStage
from ..rules import Dataflow
from .tie import Tie, shape_of, unwrapped

Declared = Sequence[Mapping[int, str]]
_FORM = 'a tie is a dict from stage to the name of the parameter there, such as {0: "embed.weight", 3: "head.weight"}'


def declared_ties(declared: Declared, stages: Iterable[PipelineStage]) -> tuple[Tie, ...]:
    """The ties, checked against each other and against the stages that are here.

    >>> from torch import nn
    >>> stages = [PipelineStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2)]
    >>> [tie.title for tie in declared_ties([{0: "weight", 1: "weight"}], stages)]
    ['weight of stage 0']
    """
    here = {stage.stage_index: stage for stage in stages}
    if isinstance(declared, Mapping | str):
        raise InputError(f"ties must be a list, got {type(declared).__name__}: {_FORM}")
    if declared and any(stage.pipe_info is not None for stage in here.values()):
        raise InputError("ties= is for modules that were cut by hand; those of a traced model are known: leave it out")
    total = max((stage.num_stages for stage in here.values()), default=0)
    ties = tuple(_checked(f"ties[{number}]", tie, total) for number, tie in enumerate(declared))
    holders: dict[object, str] = {}
    for number, tie in enumerate(ties):
        _refuse_unknown(f"ties[{number}]", tie, here)
        _refuse_shapes(f"ties[{number}]", tie, here)
        _refuse_twice(f"ties[{number}]", tie, here, holders)
    return ties


def _checked(where: str, tie: Any, total: int) -> Tie:
    pairs = list(tie.items()) if isinstance(tie, Mapping) else []
    plain = all(type(stage) is int and isinstance(name, str) for stage, name in pairs)
    if len(pairs) < 2 or not plain:
        raise InputError(f"{where} is {tie!r}: {_FORM}, with two stages at least")
    beyond = [stage for stage, _ in pairs if not 0 <= stage < total]
    if beyond:
        raise InputError(f"{where} has stage {beyond[0]}, and the stages are 0 to {total - 1}")
    first = min(stage for stage, _ in pairs)
    return Tie(f"{tie[first]} of stage {first}", {stage: (name,) for stage, name in sorted(pairs)})


def _refuse_unknown(where: str, tie: Tie, here: Mapping[int, PipelineStage]) -> None:
    for stage, (name,) in tie.names.items():
        if stage not in here:
            continue
        known = [each for each, _ in here[stage].submod.named_parameters(remove_duplicate=False)]
        if name not in known and name not in map(unwrapped, known):
            raise InputError(f"{where}: stage {stage} has no parameter {name!r}.{did_you_mean(name, known)}")


def _refuse_shapes(where: str, tie: Tie, here: Mapping[int, PipelineStage]) -> None:
    shapes = {stage: shape_of(parameter) for stage, parameter in tie.held(here)}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{tie.names[stage][0]} of stage {stage} is {shape}" for stage, shape in shapes.items())
        raise InputError(f"{where} cannot be one parameter: {told}")


def _refuse_twice(where: str, tie: Tie, here: Mapping[int, PipelineStage], holders: dict[object, str]) -> None:
    """A parameter in two ties would be summed twice; it may have two names in a stage."""
    keys = {(stage, name): f"{name} of stage {stage}" for stage, (name,) in tie.names.items()}
    objects = {id(parameter): f"{tie.names[stage][0]} of stage {stage}" for stage, parameter in tie.held(here)}
    for key, text in (keys | objects).items():
        if key in holders:
            raise InputError(f"{text} is in {holders[key]} and in {where}: put all that is one parameter in one tie")
        holders[key] = where


def with_ties(dataflow: Dataflow, ties: Sequence[Tie]) -> Dataflow:
    """A dataflow with these ties; if it has ties of its own they must be the same."""
    stages = tuple(frozenset(tie.stages) for tie in ties)
    if dataflow.ties not in ((), stages):
        raise InputError(
            f"the plan has ties between the stages {[sorted(tie) for tie in dataflow.ties]}, and the schedule got "
            f"{[sorted(tie) for tie in stages]}: pass ties=, for each of the plan's ties the name of the parameter in "
            "each stage"
        )
    return replace(dataflow, ties=stages)
