"""What a module does besides its forward's tensors, once it is cut: hooks, and attributes that it sets."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..errors import PipeWarning, SplitError
from ..pipe_ir.trace import has_forward_hooks
from ..pipe_ir.traced import TracedModel
from .program import Piece, walk


def generated_paths(programs: Sequence[Piece]) -> set[str]:
    """The modules that run as generated code."""
    pieces = {item.path for program in programs for item in walk(program.items) if isinstance(item, Piece)}
    return {program.path for program in programs} | pieces


def hooks_to_trace(traced: TracedModel, programs: Sequence[Piece]) -> set[str]:
    """The paths of modules that are cut and have forward hooks: these hooks must run during the trace."""
    hooked = {path for path in generated_paths(programs) if has_forward_hooks(traced.model.get_submodule(path))}
    for path in sorted(hooked):
        warnings.warn(
            f"{path or type(traced.model).__name__!r} has a forward hook and is cut: what the hook does to tensors is "
            "part of the cut model, and all else that it does has happened once, during the trace; put the hook on a "
            "module that is not cut to have it run at every call",
            PipeWarning,
            stacklevel=4,
        )
    return hooked


def refuse_backward_hooks(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """A backward hook sees the gradients of a whole module; of a module that is cut there are none."""
    for path in sorted(generated_paths(programs)):
        module = traced.model.get_submodule(path)
        if module._backward_hooks or module._backward_pre_hooks:
            raise SplitError(
                f"{path or type(traced.model).__name__!r} has a backward hook and is cut, so that no stage sees its "
                "gradients; remove the hook, put it on a module inside, or cut elsewhere"
            )


def warn_of_assigned_attributes(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """Generated code works on tensors and buffers; a counter or a cache in a plain attribute stays as it is."""
    for path in sorted(generated_paths(programs) & traced.assigned_attributes.keys()):
        names = ", ".join(f"self.{name}" for name in traced.assigned_attributes[path])
        warnings.warn(
            f"the forward of {path or type(traced.model).__name__!r} sets {names}, and is cut: the stages do not set "
            "it, and go on with the value that it had during the trace; keep state in buffers, or in a module that is "
            "not cut",
            PipeWarning,
            stacklevel=4,
        )


def refuse_forgotten(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """Refuse to generate code for a forward that does what generated code cannot do."""
    for path in sorted(generated_paths(programs) & traced.forgotten.keys()):
        raise SplitError(
            f"the forward of {path or type(traced.model).__name__!r} uses {traced.forgotten[path]}, and is cut: a "
            "trace does not hold it; move it into a module that is not cut"
        )
