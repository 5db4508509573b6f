"""Example tensors that a stage is made with, checked before there is a stage."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import StageMetadataError
from ..pipe_ir import flatten
from .dtensor import is_distributed


@dataclass(frozen=True)
class Examples:
    """Example tensors of a stage, as the user gives them."""

    input_args: Any = None
    output_args: Any = None
    input_grads: Any = None
    output_grads: Any = None

    def checked(self, stage_index: int, num_stages: int) -> Examples:
        """Return them as tuples. Inputs and outputs of the whole model may be nested; stages pass on tensors only."""
        inputs, outputs = f"Stage {stage_index}: input_", f"Stage {stage_index}: output_"
        made = Examples(
            tensors_of(self.input_args, f"{inputs}args", nested=stage_index == 0),
            tensors_of(self.output_args, f"{outputs}args", nested=stage_index == num_stages - 1),
            tensors_of(self.input_grads, f"{inputs}grads", allow_none=True),
            tensors_of(self.output_grads, f"{outputs}grads", allow_none=True),
        )
        # The gradients of plain tensors follow from these, whatever was given for them.
        taken, returned = flatten(made.input_args)[0], flatten(made.output_args)[0]
        if any(map(is_distributed, (*taken, *returned))):
            if made.input_args and made.input_grads:
                check_gradients(stage_index, tuple(taken), made.input_grads, is_input=True)
            if made.output_args and made.output_grads:
                check_gradients(stage_index, tuple(returned), made.output_grads, is_input=False)
        return made


def tensors_of(values: Any, called: str, *, allow_none: bool = False, nested: bool = False) -> tuple[Any, ...] | None:
    """Return a tensor, or several, as a tuple; with `nested`, each may be a nested value of tensors.

    >>> tensors_of([None], "input_grads", allow_none=True)
    (None,)
    """
    if values is None:
        return None
    several = isinstance(values, tuple | list)
    for place, value in enumerate(values if several else (values,)):
        for leaf in flatten(value)[0] if nested else [value]:
            if not isinstance(leaf, Tensor) and not (leaf is None and allow_none):
                kind = "is None" if leaf is None else f"has type {type(leaf).__name__}"
                raise StageMetadataError(
                    f"{called}[{place}] {kind}, and all of them must be tensors: pass other values by keyword"
                    if several
                    else f"{called} must be a tensor, or a tuple or list of tensors; got {type(leaf).__name__}"
                )
    return tuple(values) if several else (values,)


def check_gradients(
    stage_index: int, args: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], *, is_input: bool
) -> None:
    """Raise on gradients that do not fit the tensors that they are given for."""
    side = "input" if is_input else "output"
    if len(args) != len(grads):
        raise StageMetadataError(
            f"Stage {stage_index}: {side}_grads length ({len(grads)}) does not match {side}_args length ({len(args)}): "
            "give one gradient for each tensor, None where there is none"
        )
    for place, (value, grad) in enumerate(zip(args, grads, strict=True)):
        if grad is not None and not value.requires_grad:
            raise StageMetadataError(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=False, but {side}_grads[{place}] is not "
                "None: a tensor that needs no gradient has None there"
            )
        if grad is not None and is_distributed(value) and not is_distributed(grad):
            raise StageMetadataError(
                f"Stage {stage_index}: {side}_args[{place}] is a DTensor, but {side}_grads[{place}] is a "
                f"{type(grad).__name__}, expected DTensor or None: the gradient of a DTensor is one, in placements of "
                "its own"
            )
        if grad is None and value.requires_grad:
            warnings.warn(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=True, but {side}_grads[{place}] is None",
                stacklevel=3,
            )
