"""Cuts the PyTorch model you already have into pipeline stages."""

from .api import pipeline
from .errors import InputError, PipeError, PipeWarning, SpecError, SplitError, TraceError
from .pipe_ir.marker import pipe_split
from .pipe_ir.pipe import Edge, Pipe, PipeInfo, StageInfo, TiedParameter
from .pipe_ir.spec import TensorSpec
from .split import SplitPoint

__all__ = [
    "Edge",
    "InputError",
    "Pipe",
    "PipeError",
    "PipeInfo",
    "PipeWarning",
    "SpecError",
    "SplitError",
    "SplitPoint",
    "StageInfo",
    "TensorSpec",
    "TiedParameter",
    "TraceError",
    "pipe_split",
    "pipeline",
]
