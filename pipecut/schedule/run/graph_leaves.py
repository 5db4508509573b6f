"""Tensors at which the graph of a stage begins: they stand for those that the stage is called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...pipe_ir.structure import map_leaves


def graph_leaf(value: Any) -> Any:
    """A tensor without the graph that it comes from; other values as they are.

    That graph may be one of all microbatches, which can be gone through once only.
    """
    if not isinstance(value, Tensor):
        return value
    # Microbatches are parts of one tensor: with `detach()` a module that writes to its part would change them all in
    # the eyes of autograd, and the backward of those before it would be refused.
    return value.detach().requires_grad_() if value.requires_grad else value.data


@dataclass(frozen=True)
class InnerLeaves:
    """Leaves for the tensors inside of nested values. `leaves` stand for those of `originals`, which need a gradient.

    >>> import torch
    >>> inner, weight = InnerLeaves(), torch.ones(2, requires_grad=True)
    >>> given = {"weights": [weight * 2], "name": "x"}
    >>> taken = inner.put_into(given)
    >>> taken["weights"][0] is inner.leaves[0], given["weights"][0] is inner.originals[0]
    (True, True)
    """

    originals: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)

    def put_into(self, value: Any) -> Any:
        """The value with leaves in the place of its tensors."""
        return map_leaves(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        leaf = graph_leaf(value)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            self.originals.append(value)
            self.leaves.append(leaf)
        return leaf
