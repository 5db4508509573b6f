"""Every error that pipecut raises on purpose, under one root."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any


def printable(text: str, *, lines: bool = True) -> str:
    """Write what a terminal obeys or a file cannot hold as escapes; with `lines=False`, ends of lines too.

    Names come from models and files: none of them may move a cursor, or turn the direction of reading.

    >>> print(printable("layers.\\x1b[2J\\u202e0"), printable("two\\nlines", lines=False))
    layers.\\x1b[2J\\u202e0 two\\nlines
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


class PipeError(Exception):
    """Root of all pipecut errors: each message says what is wrong, where, and what to change."""

    def __str__(self) -> str:
        return printable(super().__str__())


class TraceError(PipeError, RuntimeError):
    """The model could not be traced; also a RuntimeError."""


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


class LaunchError(PipeError):
    """A launch failed. `rank` is where that began, None if it was not in a rank; `traceback` is that rank's."""

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.traceback)


class AbsentTensorError(PipeError, AttributeError):
    """A tensor was asked for that another stage has."""


class UnsentOutputError(PipeError):
    """An output was used that a training step does not send to the last stage."""


class ExampleError(InputError, RuntimeError):
    """Example arguments that do not make a call; also a RuntimeError, as for any model that could not be traced."""


class StageRunError(PipeError):
    """A stage does not run with what arrives at it."""


class CompiledStageError(InputError, RuntimeError):
    """A stage compiled as a whole, in a schedule that would gain nothing from it; also a RuntimeError."""


class StepError(PipeError, RuntimeError):
    """A step failed, on this rank or on another one; the message says where that began."""


class LostConnectionError(PipeError):
    """The connection to another rank is gone: its process has ended, or it has closed the connection."""

    def __init__(self, peer: int, error: BaseException) -> None:
        super().__init__(f"no connection to rank {peer}: {error}")
        self.peer = peer
        self.waited = "imed out" in str(error)


class ClosedGroupError(PipeError, RuntimeError):
    """The process group was destroyed, or closed by a step that failed: it has to be made anew."""


class DisagreementError(PipeError):
    """The ranks' plans or options differ."""


class RetraceError(DisagreementError, InputError):
    """The model could not be traced for the form of a call. All ranks raise it, and can go on with other calls."""


class MissingTargetError(InputError, RuntimeError):
    """There is no target for the loss; also a RuntimeError, since it depends on the rank and is found in the step."""


class KeywordError(InputError, TypeError):
    """There is no such keyword argument; also a TypeError."""


class LossesError(InputError, TypeError):
    """`losses=` is not a list; also a TypeError."""


class UnknownOpError(PlanError, RuntimeError):
    """There is no such kind of action."""


class MissingFileError(PlanError, FileNotFoundError):
    """There is no such plan. Also a FileNotFoundError."""


class TooLittleMemoryError(SplitError):
    """No cut fits. `needs` is the memory of each rank in the known cut that needs least."""

    def __init__(self, text: str, needs: Sequence[float]) -> None:
        super().__init__(text)
        self.needs = tuple(needs)


class NonFiniteNormError(PipeError, RuntimeError):
    """The norm of the gradients is infinite or not a number; also a RuntimeError, as torch's."""


class StageMetadataError(PipeError, RuntimeError):
    """Tensors do not match the declared metadata."""


class TooFewSamplesError(InputError, AssertionError):
    """Fewer samples than microbatches; also an AssertionError, for callers that catch that."""

    def __init__(self, text: str, samples: int = 0) -> None:
        super().__init__(text)
        self.samples = samples


class PlacementError(InputError, AssertionError):
    """DTensors that lie differently on their mesh, or DTensors and plain tensors, which cannot be joined."""


class MisfitError(InputError, RuntimeError):
    """Tensors that cannot be joined. Also a RuntimeError."""


class NoSuchDimError(InputError, IndexError):
    """Tensors without the dim that they should be joined along. Also an IndexError."""


class NothingToMergeError(InputError, IndexError):
    """There are no chunks to merge; also an IndexError."""


class SpecCountError(InputError, AssertionError):
    """Not as many specs as arguments; also an AssertionError, for callers that catch that."""


class GroupSizeError(InputError, RuntimeError):
    """A group with ranks that would have no stage; also a RuntimeError."""


class ChangedModelError(PipeError):
    """The model was changed after it was cut, and its stages were not; or the other way round."""


class IsolationError(PipeError):
    """A stage uses or changes what another stage holds, past the values that are sent between them."""


class StepMetadataError(StepError, StageMetadataError):
    """A step failed: tensors do not match the declared metadata."""


class PipeWarning(UserWarning):
    """Something works, but not in the way its author may expect."""


def warn(message: str) -> None:
    """Issue a PipeWarning at the line of the user's code that called pipecut, however deep in it this is called."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PipeWarning, stacklevel=level)
