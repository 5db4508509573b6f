"""A module without its tensors, for others that read its plain attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import PipeError
from .subclass import quiet_subclass


class AbsentTensorError(PipeError, AttributeError):
    """A tensor was asked for that another stage has."""


def empty(module: nn.Module, path: str) -> None:
    """Take the tensors from a module; who asks for one of them is told where it is.

    >>> import torch
    >>> linear = nn.Linear(2, 3)
    >>> empty(linear, "head")
    >>> linear.out_features
    3
    >>> linear.weight
    Traceback (most recent call last):
    pipecut.pipe_ir.emptied.AbsentTensorError: head.weight is asked for in a stage that does not hold 'head', by a \
module that refers to it without having registered it: cut so that both are in one stage, or pass the tensor as an \
argument
    """
    names = {name for tensors in (module._parameters, module._buffers) for name in tensors}
    module._parameters.clear()
    module._buffers.clear()
    base: Any = type(module)

    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        if name in names:
            raise AbsentTensorError(
                f"{path}.{name} is asked for in a stage that does not hold {path!r}, by a module that refers to it "
                "without having registered it: cut so that both are in one stage, or pass the tensor as an argument"
            )
        return base.__getattr__(self, name)

    module.__class__ = quiet_subclass(base, {"__getattr__": __getattr__})
