"""The line of the model's code that is running, or has made a node, for messages."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_LAYERS = str(Path(torch.__file__).parent / "nn" / "modules")
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_START = str(Path(__file__).parent / "run.py")


def user_line() -> str:
    """The innermost line that is neither torch's nor this package's; in a model made of torch's layers, the layer's."""
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
    """The user's line, from the last frame of a stack trace that is a text."""
    lines = stack_trace.strip().splitlines()
    frames = [(place.strip(), code.strip()) for place, code in zip(lines, lines[1:], strict=False) if "File " in place]
    own = [f"{place}: {code}" for place, code in frames if _PACKAGE not in place]
    return own[-1] if own else ""


def _text(frame: FrameType) -> str:
    filename = frame.f_code.co_filename
    code = linecache.getline(filename, frame.f_lineno).strip()
    return f"{filename}:{frame.f_lineno}, in {frame.f_code.co_name}" + (f": {code}" if code else "")
