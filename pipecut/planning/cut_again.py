"""A model cut where a plan says, by the words for its cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..api import cut_where
from ..errors import SplitError
from ..pipe import Pipe
from ..pipe_ir.traced import TracedModel
from ..split.chain_maker import chain_of
from ..split.points import SplitPlan


def cut_at_labels(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, labels: Sequence[str]
) -> Pipe:
    """Trace the model and cut it at these places."""

    def find_cuts(traced: TracedModel) -> SplitPlan:
        places = {place.cut.label: place.cut for place in chain_of(traced).places}
        missing = [label for label in labels if label not in places]
        if missing:
            raise SplitError(
                f"{missing[0]}, which the plan asks for, is no place where this model can be cut: make the plan again "
                "with pipecut.plan()"
            )
        return SplitPlan(tuple(places[label] for label in labels))

    return cut_where(model, args, kwargs, find_cuts)
