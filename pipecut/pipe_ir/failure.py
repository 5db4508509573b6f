"""Why and where a trace failed, in the words of the user's own code."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_OWN_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parent.parent)

# What torch says of these takes a page, and is about the tracer.
_PLAIN_WORDS = {
    "GuardOnDataDependentSymNode": "it decides by the values of tensors",
    "DataDependentOutputException": "it needs the values of tensors",
    "DynamicOutputShapeException": "it makes tensors whose sizes depend on the data",
}


def place_of(error: BaseException) -> str:
    """The user's line that raised an error: file, line, function and code; empty where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not frames:
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def reason_of(error: BaseException) -> str:
    """What an error says, in one line."""
    plain = next((_PLAIN_WORDS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _PLAIN_WORDS), None)
    if plain is not None:
        return plain
    text = str(error).strip().split("\n")[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_and_where(error: BaseException) -> str:
    """Reason and place in one line."""
    place = place_of(error)
    return f"{reason_of(error)}, at {place}" if place else reason_of(error)


def _is_machinery(filename: str) -> bool:
    path = Path(filename)
    return not path.exists() or any(folder in path.parents for folder in _OWN_FOLDERS)
