"""Lines of the user's code for messages: the one that runs, that made a node, or that raised an error."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = str(Path(torch.__file__).parent / "nn" / "modules")
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_START = str(Path(__file__).parent / "run.py")


def user_line() -> str:
    """Return the innermost line outside of torch and this package; in a model of torch's layers, that of the layer."""
    frame: FrameType | None = sys._getframe(1)
    layer = ""
    while frame is not None and frame.f_code.co_filename != _START:
        filename = frame.f_code.co_filename
        if not filename.startswith((_TORCH, _PACKAGE, "<")):
            return _text(frame)
        if not layer and filename.startswith(_LAYERS) and not filename.endswith("module.py"):
            layer = _text(frame)
        frame = frame.f_back
    return layer


def line_of(stack_trace: str) -> str:
    """Return the user's line from the last frame of a stack trace that is a text."""
    lines = stack_trace.strip().splitlines()
    frames = [(place.strip(), code.strip()) for place, code in zip(lines, lines[1:], strict=False) if "File " in place]
    own = [f"{place}: {code}" for place, code in frames if _PACKAGE not in place]
    return own[-1] if own else ""


def _text(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    code = linecache.getline(filename, frame.f_lineno).strip()
    return f"{filename}:{frame.f_lineno}, in {frame.f_code.co_name}" + (f": {code}" if code else "")


# Errors of which torch prints a page, about the tracer.
_PLAIN_WORDS = {
    "GuardOnDataDependentSymNode": "it decides by the values of tensors",
    "DataDependentOutputException": "it needs the values of tensors",
    "DynamicOutputShapeException": "it makes tensors whose sizes depend on the data",
}


def place_of(error: BaseException) -> str:
    """Return the user's line that raised an error: file, line, function and code; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not frames:
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def reason_of(error: BaseException) -> str:
    """Return the message of an error in one line."""
    plain = next((_PLAIN_WORDS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in _PLAIN_WORDS), None)
    if plain is not None:
        return plain
    text = str(error).strip().split("\n")[0].strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def why_and_where(error: BaseException) -> str:
    """Return reason and place of an error in one line."""
    place = place_of(error)
    return f"{reason_of(error)}, at {place}" if place else reason_of(error)


def _is_machinery(filename: str) -> bool:
    path = str(Path(filename).absolute())
    return path.startswith((_TORCH, _PACKAGE)) or not Path(filename).exists()
