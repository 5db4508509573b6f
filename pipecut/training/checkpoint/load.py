"""Load a training job from a checkpoint, whatever cut, schedule and number of ranks it was saved with."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CheckpointError, DisagreementError, InputError, warn
from ...run import PipelineSchedule, differences
from ...stage import TRAINING_MANIFEST, TRAINING_PREFIX, UnwrappedNames, open_distributed
from ...text import counted, did_you_mean, dtype_name, lines_of, listed, shape_text
from ...torch_internals import EXTRA_STATE
from .contents import check_optimizers, extra_states, model_tensors, parameter_names
from .folder import Place, interrupted, latest_checkpoint, read_manifest
from .objects import Stateful, load_state, read_objects, restore_random_state
from .optimizers import (
    Names,
    OptimizerFacts,
    Origin,
    SavedOptimizer,
    as_list,
    check_fits,
    check_parameters,
    groups_of,
    kind_of,
    regrouped,
    restore,
    settings_of,
    target_like,
)
from .ranks import Position, Ranks, places_of, position_of, ranks_of
from .save import JOB_FILE, finish_pending

_SHOWN = 20


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Step and values of a checkpoint that was loaded: the number of steps that were done, and `extra`, by name."""

    path: Path
    step: int
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class _Facts:
    """Facts that the ranks compare before they load."""

    path: str
    position: Position
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    optimizers: tuple[OptimizerFacts, ...]
    trains: bool
    objects: tuple[str, ...]


def load_checkpoint(
    checkpoint: str | os.PathLike[str],
    schedule: PipelineSchedule,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | None = None,
    extra: Mapping[str, Stateful | torch.Generator] | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Let a job go on from a checkpoint, and return its step and what was saved in `extra`.

    `checkpoint` is the path of one, or of a folder of them, of which the last complete one is taken. All ranks of the
    job call this together, with an optimizer and a scheduler like those that `save_checkpoint` was called with. Number
    of stages, cut, schedule and number of replicas may be others. Values are read into the tensors that are there.
    Objects and generators of `extra=` get the states that were saved under their names. No code is run from the files.

    Random streams go on where they were. A rank that there was not goes on with those of the last rank of its pipeline,
    and a replica that there was not gets streams of its own. See `save_checkpoint` for an example.
    """
    ranks = ranks_of(schedule, group, "load_checkpoint")
    ranks.agree(finish_pending)
    names = parameter_names(schedule)

    def facts_of_rank() -> _Facts:
        _check_extra(extra)
        return _facts_of(Path(checkpoint), schedule, as_list(optimizer), names)

    facts = ranks.agree(facts_of_rank)
    lines = differences([{"checkpoint": each.path} for each in facts])
    if lines:
        raise DisagreementError(
            f"the ranks ask for different checkpoints: {lines[0]}. Pass the same path on every rank"
        )
    check_optimizers([each.optimizers for each in facts], [each.trains for each in facts])
    job = _Job(Path(facts[0].path), schedule, as_list(optimizer), names, scheduler, extra or {})
    ranks.agree(lambda: job.check(facts, ranks))
    ranks.writing.agree(job.read)
    return LoadedCheckpoint(job.path, job.manifest.step, job.extra)


def _check_extra(extra: Mapping[str, Any] | None) -> None:
    for name, value in (extra or {}).items():
        if not isinstance(value, Stateful | torch.Generator):
            raise InputError(
                f"extra[{name!r}] is a {type(value).__name__} without load_state_dict(): leave it out, and read it "
                "from the result of load_checkpoint"
            )


def _facts_of(given: Path, schedule: PipelineSchedule, optimizers: Sequence[Optimizer], names: Names) -> _Facts:
    path = _resolved(given)
    for optimizer in optimizers:
        check_parameters(optimizer, names)
    held = model_tensors(schedule)
    return _Facts(
        str(path),
        position_of(schedule),
        {name: (tuple(values[0].shape), dtype_name(values[0].dtype)) for name, values in held.items()},
        tuple(OptimizerFacts(kind_of(each), groups_of(each, names), {}, frozenset(), {}) for each in optimizers),
        any(parameter.requires_grad for parameter in schedule.parameters()),
        tuple(extra_states(schedule)),
    )


def _resolved(given: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the last complete one in it."""
    path = given.resolve()
    if (path / TRAINING_MANIFEST).is_file() or not path.is_dir() or path.name.startswith(("step-", ".step-")):
        return path
    latest = latest_checkpoint(path)
    if latest is None:
        left = listed((each.name for each in interrupted(path)), at_most=4)
        raise CheckpointError(
            f"there is no complete checkpoint in {path}"
            + (f": {left} {'were' if ',' in left else 'was'} not written to the end" if left else "")
        )
    return latest


@dataclass
class _Job:
    """A job that is about to go on from a checkpoint."""

    path: Path
    schedule: PipelineSchedule
    optimizers: Sequence[Optimizer]
    names: Names
    scheduler: Stateful | None
    given: Mapping[str, Stateful | torch.Generator]
    extra: dict[str, Any] = field(default_factory=dict)

    def check(self, facts: Sequence[_Facts], ranks: Ranks) -> None:
        """Read all but the tensors, and raise on what does not fit, before anything is changed."""
        self.manifest = read_manifest(self.path)
        self.reader = open_distributed(self.path)
        self.saved: dict[str, Any] = dict(self.reader.metadata.state_dict_metadata)
        job = read_objects(self.path / JOB_FILE)
        self._check_model(facts, job["objects"])
        self.objects: dict[str, Any] = job["objects"]
        self.saved_optimizers = [SavedOptimizer(**each) for each in job["optimizers"]]
        self._check_optimizers(facts)
        self.model_targets = model_tensors(self.schedule)
        self.state_targets = [self._state_targets(number) for number in range(len(self.optimizers))]
        self._choose_objects(facts, ranks)

    def _check_model(self, facts: Sequence[_Facts], objects: Mapping[str, Any]) -> None:
        prefix = TRAINING_PREFIX
        saved = {name.removeprefix(prefix): entry for name, entry in self.saved.items() if name.startswith(prefix)}
        held = {name: form for each in facts for name, form in each.tensors.items()}
        known = {*saved, *objects}
        wanted = [*held, *dict.fromkeys(name for each in facts for name in each.objects)]
        missing = [name for name in wanted if name not in known]
        unexpected = sorted(known - set(wanted))
        if missing or unexpected:
            lines = [f"{name}.{did_you_mean(name, unexpected)}" for name in missing]
            more = [f"{name}.{did_you_mean(name, missing)}" for name in unexpected]
            parts = [f"it does not have {len(missing)} of {counted(len(wanted), 'name')}:{lines_of(lines, _SHOWN)}"]
            parts += [f"it has {counted(len(unexpected), 'name')} that the model does not:{lines_of(more, _SHOWN)}"]
            raise CheckpointError(
                f"{self.path} is of another model, a {self.manifest.model}: "
                + "\n".join(part for part, some in zip(parts, (missing, unexpected), strict=True) if some)
            )
        forms = {name: (tuple(entry.size), dtype_name(entry.properties.dtype)) for name, entry in saved.items()}
        other = [
            f"{name} is {_form(forms[name])} there, and {_form(form)} in the model"
            for name, form in held.items()
            if forms[name] != form
        ]
        if other:
            raise CheckpointError(
                f"{self.path} is of a model with other shapes or dtypes, {len(other)} of {len(held)}:"
                f"{lines_of(other, _SHOWN)}\nMake the model as it was when it was saved, before it is cut"
            )

    def _check_optimizers(self, facts: Sequence[_Facts]) -> None:
        given = max((each.optimizers for each in facts), key=len)
        if not given:
            return
        if len(given) != len(self.saved_optimizers):
            raise CheckpointError(
                f"{self.path} was saved with {counted(len(self.saved_optimizers), 'optimizer')}, and "
                f"{len(given)} {'is' if len(given) == 1 else 'are'} to be loaded: pass as many, in the same "
                "order, or none"
            )
        for number, saved in enumerate(self.saved_optimizers):
            some = [each.optimizers[number] for each in facts if each.optimizers]
            held = [name for each in some for group in each.groups for name in group.names]
            check_fits(saved, some[0].kind, held, str(self.path))
            for each in some:
                for place, group in enumerate(each.groups):
                    settings_of(saved, group, place)

    def _state_targets(self, number: int) -> dict[str, Tensor]:
        """Return tensors without values for the saved state of the parameters of one optimizer, by key and name."""
        parameters: dict[str, nn.Parameter] = {}
        for group in self.optimizers[number].param_groups:
            for parameter in group["params"]:
                parameters.setdefault(self.names[id(parameter)], parameter)
        on_cpu = set(self.saved_optimizers[number].on_cpu)
        targets = {}
        for entry, saved in self.saved.items():
            if entry.startswith(f"optimizer{number}/"):
                _, key, name = entry.split("/", 2)
                if name in parameters:
                    dtype, where = saved.properties.dtype, f"{key} of {name}"
                    on_host = key in on_cpu
                    targets[f"{key}/{name}"] = target_like(parameters[name], saved.size, dtype, where, on_cpu=on_host)
        return targets

    def _choose_objects(self, facts: Sequence[_Facts], ranks: Ranks) -> None:
        """Read the objects of the rank whose place this one takes."""
        pipeline, rank = places_of([each.position for each in facts])[ranks.rank]
        self.place, self.fork = _nearest(self.manifest.places, pipeline, rank)
        self.own = read_objects(self.path / self.place.file)
        self.extra = {
            ast.literal_eval(name[len("extra[") : -1]): value
            for name, value in self.own.items()
            if name.startswith("extra[")
        }
        missing = [name for name in self.given if name not in self.extra]
        if missing:
            raise CheckpointError(
                f"{self.path} has no extra {missing[0]!r}.{did_you_mean(missing[0], self.extra)} It has "
                f"{listed(map(repr, self.extra)) or 'none'}"
            )
        if self.scheduler is not None and self.own["scheduler"] is None:
            raise CheckpointError(f"{self.path} was saved without scheduler=: load it without, too")
        if self.scheduler is not None:
            self._optimizer_of(self.scheduler)  # raises if that is not known, and has to be
        if (self.place.pipeline, self.place.rank) != (pipeline, rank):
            self._warn_of_other_place()

    def _warn_of_other_place(self) -> None:
        """Warn of objects that were not the same on all ranks, and that a rank gets that there was not."""
        own = self.place.digests
        differ = [name for name in own if name.startswith("extra[") and self._differs(name)]
        if differ:
            warn(
                f"{listed(differ)} {'was' if len(differ) == 1 else 'were'} not the same on all ranks when {self.path} "
                f"was saved, and this rank has no counterpart there: it gets what rank {self.place.rank} of pipeline "
                f"{self.place.pipeline} had"
            )

    def _differs(self, name: str) -> bool:
        return len({place.digests.get(name) for place in self.manifest.places}) > 1

    def read(self) -> None:
        """Read the tensors, and let everything go on from what was saved."""
        try:
            self._read_tensors()
        except (OSError, RuntimeError, EOFError, AssertionError) as error:
            raise CheckpointError(
                f"{self.path} could not be read to the end: {type(error).__name__}: {error}. Some parameters have the "
                "values of the checkpoint by now: load another one before you go on"
            ) from error
        for number, optimizer in enumerate(self.optimizers):
            others = self.own["optimizers"]
            other = others[number] if number < len(others) else {}
            restore(optimizer, self.names, self.saved_optimizers[number], self.state_targets[number], other)
        self._restore_extra_states()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self._state_for(self.scheduler, "scheduler"))
        for name, value in self.given.items():
            load_state(value, self._state_for(value, f"extra[{name!r}]"))
        restore_random_state(self.schedule, self.own["random streams"], self.fork)  # last: all of that may draw

    @torch.no_grad()
    def _read_tensors(self) -> None:
        into: dict[str, Any] = {f"{TRAINING_PREFIX}{name}": held[0] for name, held in self.model_targets.items()}
        for number, targets in enumerate(self.state_targets):
            into |= {f"optimizer{number}/{name}": target for name, target in targets.items()}
        self.reader.read(into)
        for held in self.model_targets.values():
            for copy in held[1:]:
                copy.copy_(held[0])

    def _restore_extra_states(self) -> None:
        for stage in self.schedule.stages:
            names = UnwrappedNames(stage.submod)
            for raw in stage.submod.state_dict():
                owner, _, last = raw.rpartition(".")
                if last == EXTRA_STATE:
                    stage.submod.get_submodule(owner).set_extra_state(self.objects[names.of(raw)])

    def _state_for(self, owner: Any, key: str) -> Any:
        """Return the saved state of an object; if it is a learning-rate scheduler, for the groups of this rank."""
        state, number = self.own[key], self._optimizer_of(owner)
        if not isinstance(state, dict) or not self.optimizers or number is None:
            return state
        rank, origins = self._origins(number)
        if origins == [(rank, place) for place in range(len(origins))]:
            return state
        states = {rank: state}
        for other, _ in origins:
            if other not in states:
                states[other] = read_objects(self.path / self.manifest.places[other].file)[key]
        counts = self.saved_optimizers[number].group_counts
        found = [Origin(states[other], place, counts[other] if counts else None) for other, place in origins]
        return regrouped(owner.state_dict(), state, found)

    def _optimizer_of(self, owner: Any) -> int | None:
        """Return the number of the optimizer that a scheduler is over; None for an object that is no scheduler."""
        over = getattr(owner, "optimizer", None)
        found = next((number for number, each in enumerate(self.optimizers) if each is over), None)
        if found is not None or owner is not self.scheduler:
            return found
        if len(self.optimizers) > 1 and any(
            origins != [(rank, place) for place in range(len(origins))]
            for rank, origins in map(self._origins, range(len(self.optimizers)))
        ):
            raise CheckpointError(
                f"the scheduler is a {type(owner).__name__} without an attribute `optimizer`, so that it is not known "
                f"which of {len(self.optimizers)} optimizers it is over, and the parameter groups of this rank are "
                "others than when it was saved: give it that attribute, or load under the same cut"
            )
        return 0

    def _origins(self, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the saved rank of this process, and for each group of an optimizer the rank and group that it was."""
        saved, rank = self.saved_optimizers[number], self.manifest.places.index(self.place)
        groups = groups_of(self.optimizers[number], self.names)
        return rank, [
            saved.places[group.names[0]] if group.names else (rank, place) for place, group in enumerate(groups)
        ]


def _form(form: tuple[tuple[int, ...], str]) -> str:
    return f"{form[1]}{shape_text(form[0])}"


def _nearest(places: Sequence[Place], pipeline: int, rank: int) -> tuple[Place, int]:
    """Return the saved place that a rank goes on from, and the number by which its random streams go apart, if any.

    >>> saved = [Place(0, 0, "a", {}), Place(0, 1, "b", {}), Place(1, 0, "c", {}), Place(1, 1, "d", {})]
    >>> [_nearest(saved, 0, 2)[0].file, _nearest(saved, 1, 0)[0].file, *(_nearest(saved, 2, 1)[i] for i in (1,))]
    ['b', 'c', 2]
    """
    pipelines = {place.pipeline for place in places}
    source = pipeline if pipeline in pipelines else min(pipelines)
    ranks = {place.rank: place for place in places if place.pipeline == source}
    before = [each for each in ranks if each <= rank]
    return ranks[max(before) if before else min(ranks)], 0 if source == pipeline else pipeline
