"""What the module of a stage is called with: what was given to the step, and what other stages sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ...stage.stage import PipelineStage
from ..rules import Dataflow
from .batch import Batch
from .examples import check_arrived
from .graph_leaves import InnerLeaves, graph_leaf
from .keywords import taken_by
from .mail import Mail


class StageCall(NamedTuple):
    """The call of a stage's module, on leaves of its own graph; `inner` are those in nested values and keywords."""

    args: list[Any]
    kwargs: Mapping[str, Any]
    inner: InnerLeaves | None = None


class Arguments:
    """Makes the calls of one rank's stages."""

    def __init__(self, mail: Mail, dataflow: Dataflow) -> None:
        self.mail = mail
        self.dataflow = dataflow

    def of(self, stage: PipelineStage, microbatch: int, batch: Batch) -> StageCall:
        """The call for one microbatch."""
        if stage.ports is None:
            return self._by_hand(stage, microbatch, batch)
        index = stage.stage_index
        sources = {*stage.ports.incoming, *self.dataflow.makers[index]}
        arrived = {source: self.mail.take(source, index, microbatch) for source in sorted(sources)}
        roots = batch.roots[microbatch] if stage.is_first else {}
        args = [
            graph_leaf(roots[place]) if source is None else arrived[source][place]
            for source, place in stage.ports.arguments
        ]
        return StageCall(args, {})

    def _by_hand(self, stage: PipelineStage, microbatch: int, batch: Batch) -> StageCall:
        """A module that was cut by hand takes keywords too, and the first one nested values."""
        inner = InnerLeaves()
        enter = inner.put_into if batch.training else _as_it_is
        if stage.is_first:
            args = [
                graph_leaf(value) if isinstance(value, Tensor) else enter(value) for value in batch.args[microbatch]
            ]
        else:
            args = self.mail.take(stage.stage_index - 1, stage.stage_index, microbatch)
            check_arrived(stage, args)
        given = batch.kwargs[microbatch] if batch.kwargs else {}
        kwargs = enter(taken_by(stage.submod, len(args), given)) if given else {}
        return StageCall(args, kwargs, inner if inner.leaves else None)


def _as_it_is(value: Any) -> Any:
    return value
