"""Cuts the PyTorch model you already have into pipeline stages."""

from .api import pipeline
from .pipe_ir.marker import pipe_split
from .pipe_ir.pipe import Pipe
from .split import SplitPoint

__all__ = ["Pipe", "SplitPoint", "pipe_split", "pipeline"]
