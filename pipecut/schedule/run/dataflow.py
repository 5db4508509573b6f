"""The dataflow of a pipe: what the planner has to know of its edges."""

from __future__ import annotations

from ...pipe_ir.pipe import PipeInfo
from ..rules import Dataflow


def dataflow_of(info: PipeInfo) -> Dataflow:
    """Which stages use what of which; an input of the model that needs a gradient goes and comes back like a value."""
    gradients = {(edge.source, edge.target) for edge in info.edges if edge.spec.requires_grad}
    activations = {(edge.source, edge.target) for edge in info.edges if edge.kind == "activation"}
    return Dataflow(
        stages=info.num_stages,
        activations=frozenset(activations | gradients),
        gradients=frozenset(gradients),
        root_inputs=frozenset(edge.target for edge in info.edges if edge.kind == "root input"),
        ties=tuple(frozenset(tie.stages) for tie in info.tied_parameters),
    )
