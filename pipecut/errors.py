"""Every error that pipecut raises on purpose, under one root."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PipeError(Exception):
    """Root of all pipecut errors: each message says what is wrong, where, and what to change."""


class TraceError(PipeError, RuntimeError):
    """The model could not be traced. It is a RuntimeError too, as torch.distributed.pipelining raises one."""


class SplitError(PipeError, ValueError):
    """The model cannot be cut at the places that were asked for."""


class InputError(PipeError, ValueError):
    """A call's arguments do not fit the model, or the trace of it."""


class SpecError(PipeError):
    """A tensor is not what a TensorSpec says."""


class CheckpointError(PipeError):
    """A checkpoint cannot be read or written, or does not fit the model."""


class PlanError(PipeError, ValueError):
    """A schedule's plan cannot be made, read or run. `faults` has every fault that a validation found."""

    def __init__(self, message: str, faults: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)


class PipeWarning(UserWarning):
    """Something works, but not in the way its author may expect."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known names, or nothing.

    >>> did_you_mean("layer.3", ["layers.3", "head"])
    " Did you mean 'layers.3'?"
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
