"""The ranks of a pipeline, and those that hold copies of its stages, meet once before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...errors import InputError
from ...pipe_ir.pipe import PipeInfo
from ...stage.stage import PipelineStage
from ..plan import Plan
from .agreement import Agreement, facts_of
from .tie import Stages, Tie, fingerprint, shape_of

REMEDY = "seed the model, or load a checkpoint, alike on all ranks"


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
        facts = facts_of(plan, info, ties, {**options, "version of torch": torch.__version__})
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
            facts[f"values of the tied parameter {tie.title} ({REMEDY})"] = fingerprint(parameter)
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
