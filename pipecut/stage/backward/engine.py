"""Calls of autograd's engine, without what its Python front adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

# Where a gradient is handed over: at a tensor, or at an edge of the graph.
Way: TypeAlias = Tensor | GradientEdge

_engine: Any = torch.autograd.Variable._execution_engine


def accumulate(ways: Sequence[Way], gradients: Sequence[Tensor]) -> None:
    """Pass gradients on to all leaves, and add them to `.grad`."""
    _run(ways, gradients, (), True)


def collect(ways: Sequence[Way], gradients: Sequence[Tensor], wanted: Sequence[Way]) -> list[Tensor | None]:
    """The gradients that get to what is wanted; no `.grad` changes."""
    return list(_run(ways, gradients, tuple(wanted), False))


def _run(ways: Sequence[Way], gradients: Sequence[Tensor], wanted: tuple[Way, ...], add: bool) -> Any:
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    options = False, False, wanted, True, add
    if gradients[0].is_cpu:
        # For a small stage, what torch.autograd.backward does besides takes longer than the backward itself: it checks
        # the shapes, which is done already, and prepares threads for devices, of which a CPU has none.
        return _engine.run_backward(tuple(ways), tuple(gradients), *options)
    return torch.autograd.graph._engine_run_backward(tuple(ways), tuple(gradients), *options)
