"""The ranks of a pipeline, and those that hold copies of its stages, meet once before the first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import DisagreementError, InputError
from ..pipe_ir import PipeInfo
from ..schedule import Plan
from ..stage import PipelineStage
from .ties import Stages, Tie, fingerprint, shape_of

# MERGED: Before the first step the ranks compare what they are about to do: a difference is an error, not a hang.


def _facts_of(plan: Plan, info: PipeInfo | None, ties: Sequence[Tie], options: Mapping[str, object]) -> dict[str, str]:
    """What has to be the same on all ranks, in words where they are short."""
    facts = {
        "schedule": plan.name,
        "ranks": str(plan.ranks),
        "stages": str(plan.stages),
        "microbatches": str(plan.microbatches),
        "placement of stages": str(list(plan.placement.rank_of)),
        "actions of the plan": _digest(plan.actions),
        "kind of stages": "cut by hand" if info is None else "traced",
    }
    if info is not None:
        facts["model"] = info.call.model_name
        facts |= {
            f"value {edge.name} from stage {edge.source} to stage {edge.target}": str(edge.spec) for edge in info.edges
        }
    facts |= {f"holders of the tied parameter {tie.title}": _holders(tie) for tie in ties}
    return facts | {name: str(value) for name, value in options.items()}


def _holders(tie: Tie) -> str:
    return ", ".join(f"{tie.names[stage][0]} of stage {stage}" for stage in tie.stages)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


class Agreement:
    """Exchanges facts through the store of a process group, under a name that the ranks count in the same way."""

    _made: dict[str, int] = {}

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        world = group if group is not None else dist.group.WORLD
        assert world is not None  # torch.distributed is initialised
        self.store = world.get_group_store()
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.timeout = timeout
        name = world.group_name
        self.number = self._made[name] = self._made.get(name, 0) + 1

    def reach(self, facts: Mapping[str, str], held: Mapping[str, str] | None = None) -> dict[str, str]:
        """Give this rank's facts, and compare those of all. `held` are those that only some ranks have: returns all."""
        self.store.set(self._key(self.rank), json.dumps([dict(facts), dict(held or {})]))
        told = {rank: self._facts(rank) for rank in range(self.ranks)}
        everywhere = {rank: facts for rank, (facts, _) in told.items()}
        differences = _differences(everywhere, "nothing") + _differences(
            {rank: held for rank, (_, held) in told.items()}, None
        )
        if differences:
            raise DisagreementError(
                "the ranks are not about to do the same thing:\n"
                + "\n".join(differences)
                + "\nMake the pipe and the schedule in the same way on every rank."
            )
        return {name: value for _, held in told.values() for name, value in held.items()}

    def _facts(self, rank: int) -> tuple[dict[str, str], dict[str, str]]:
        try:
            self.store.wait([self._key(rank)], self.timeout)
        except (RuntimeError, OSError) as error:
            raise DisagreementError(
                f"rank {rank} did not come to its first step within {self.timeout.total_seconds():g} s. Does every "
                "rank make the same schedules, in the same order, and call step() or eval()?"
            ) from error
        facts, held = json.loads(self.store.get(self._key(rank)))
        return facts, held

    def _key(self, rank: int) -> str:
        return f"pipecut/agreement/{self.number}/{rank}"


def _differences(known: Mapping[int, Mapping[str, str]], absent: str | None) -> list[str]:
    """Facts that are not the same on all ranks; a rank that does not know one has `absent`, or is left out."""
    found = []
    for name in dict.fromkeys(name for facts in known.values() for name in facts):
        values = {rank: facts.get(name, absent) for rank, facts in known.items()}
        given = {rank: value for rank, value in values.items() if value is not None}
        if len(set(given.values())) > 1:
            found.append(f"  {name}: {_told(given)}")
    return found


def _told(values: Mapping[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in by_value.items()
    )


_REMEDY = "seed the model, or load a checkpoint, alike on all ranks"


class Meeting:
    """What is still to be agreed on: within the pipeline, if it is on many ranks, and with each group of copies."""

    def __init__(self, pipeline: Agreement | None, copies: Iterable[Agreement]) -> None:
        self._pipeline = pipeline
        self._copies = list(copies)
        self._is_over = False
        self.held: dict[str, str] = {}  # what some ranks have told all

    def hold(
        self,
        plan: Plan,
        info: PipeInfo | None,
        ties: Sequence[Tie],
        stages: Sequence[PipelineStage],
        options: Mapping[str, object],
        own: Mapping[str, str],
    ) -> None:
        """Compare what the ranks are about to do; nothing, once they have agreed. Not all ranks have `own` facts."""
        if self._is_over:
            return
        held = {stage.stage_index: stage for stage in stages}
        self.held = dict(own)
        facts = _facts_of(plan, info, ties, {**options, "version of torch": torch.__version__})
        if self._pipeline is not None:
            self.held = self._pipeline.reach(facts, {**own, **_facts_of_ties(ties, held)})
            self._pipeline = None
        _refuse_other_values(ties, held)
        same_stages = {"stages of a rank and its copies": str([stage.stage_index for stage in stages])}
        while self._copies:
            self._copies.pop(0).reach({**facts, **own, **same_stages})
        self._is_over = True


def _facts_of_ties(ties: Sequence[Tie], stages: Stages) -> dict[str, str]:
    """So that holders of one parameter begin with the same values."""
    facts = {}
    for tie in ties:
        for _, parameter in tie.held(stages)[:1]:
            facts[f"tied parameter {tie.title}"] = shape_of(parameter)
            facts[f"values of the tied parameter {tie.title} ({_REMEDY})"] = fingerprint(parameter)
    return facts


def _refuse_other_values(ties: Sequence[Tie], stages: Stages) -> None:
    """The same for holders that are here, if they are more than one object."""
    for tie in ties:
        held = tie.held(stages)
        first, one = held[0] if held else (0, None)
        for stage, other in held[1:]:
            assert one is not None  # the first of those that are held
            if other is not one and fingerprint(other) != fingerprint(one):
                raise InputError(
                    f"the tied parameter {tie.title} has other values in stage {stage} than in stage {first}: let both "
                    "hold the same nn.Parameter, or copy its values before the first step"
                )
