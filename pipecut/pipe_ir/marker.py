"""The `pipe_split` operator: a mark in a model's forward that survives tracing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import has_side_effect

torch.library.define("pipecut::pipe_split", "() -> ()")


@torch.library.impl("pipecut::pipe_split", "CompositeExplicitAutograd")
def _run_mark() -> None:
    """Do nothing: an uncut model runs through its marks."""


MARK: Callable[..., object] = torch.ops.pipecut.pipe_split.default
# Without outputs, a mark would be removed as dead code by any pass that cleans a graph.
has_side_effect(MARK)


def pipe_split() -> None:
    """Mark a cut: what runs after this line belongs to the next stage.

    The mark does nothing when the model runs uncut, in eager mode and under `torch.compile`.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    ...     def forward(self, x):
    ...         x = self.a(x)
    ...         pipe_split()
    ...         return self.b(x)
    >>> Net()(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return
    MARK()


def is_mark(target: object) -> bool:
    """Return True if a graph node's target is a mark, given as the operator or as the function."""
    return target in (MARK, pipe_split, torch.ops.pipecut.pipe_split)
