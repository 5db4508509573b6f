"""Base class of the ways to hold a module on several ranks, and the entry that each of them has in the table.

torch's wrappers are made for one backward per step, and average gradients while it runs. A stage has many, whole or in
two parts, and other stages wait for what each sends back. So the gradients of a step are added up where they are, and
averaged once, after the last of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

_Context = contextlib.AbstractContextManager[None]
_NOTHING = contextlib.nullcontext()


class Replica:
    """Actions around the computations of a module that other ranks hold too; by default they do nothing."""

    has_contexts = True  # False if nothing happens around computations, which then need no context
    is_reduced = False  # True if gradients have to be averaged over other ranks after the last backward of a step
    groups: Sequence[dist.ProcessGroup] = ()  # over which the module is copied or sharded

    def forward(self) -> _Context:
        """Return the context of a forward of the module."""
        return _NOTHING

    def backward(self) -> _Context:
        """Return the context of a backward from the module's outputs, whole or for its inputs only."""
        return _NOTHING

    def weight_backward(self) -> _Context:
        """Return the context of the rest of a backward, that for the weights."""
        return _NOTHING

    def unshard(self) -> None:
        """Begin to gather the parameters; computations that need them wait."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def reduce_gradients(self) -> None:
        """Average the gradients over the copies, after the last backward of a step."""


class NotReplicated(Replica):
    """A module that only this rank holds."""

    has_contexts = False


class WrapperClass(NamedTuple):
    """A class that wrapped modules have, by its name: while its module is not imported, nothing is under it."""

    module: str
    name: str
    called: str  # the name that the user knows


class Wrapper(NamedTuple):
    """One way to wrap modules: the classes that wrapped parts of a stage have, and the Replica that steers them."""

    classes: Sequence[WrapperClass]
    replica: Callable[[nn.Module, Sequence[nn.Module]], Replica]  # of a stage's module and its wrapped parts
