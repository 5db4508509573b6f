"""Cuts the PyTorch model you already have into pipeline stages.

The names are imported when they are first used, so that `pipecut.schedule`, which plans with whole numbers alone, does
not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import pipeline as pipeline
    from .errors import InputError as InputError
    from .errors import PipeError as PipeError
    from .errors import PipeWarning as PipeWarning
    from .errors import PlanError as PlanError
    from .errors import SpecError as SpecError
    from .errors import SplitError as SplitError
    from .errors import TraceError as TraceError
    from .pipe_ir.marker import pipe_split as pipe_split
    from .pipe_ir.pipe import Edge as Edge
    from .pipe_ir.pipe import Pipe as Pipe
    from .pipe_ir.pipe import PipeInfo as PipeInfo
    from .pipe_ir.pipe import StageInfo as StageInfo
    from .pipe_ir.pipe import TiedParameter as TiedParameter
    from .pipe_ir.spec import TensorSpec as TensorSpec
    from .split import SplitPoint as SplitPoint

HOMES = {
    ".api": ("pipeline",),
    ".errors": ("InputError", "PipeError", "PipeWarning", "PlanError", "SpecError", "SplitError", "TraceError"),
    ".pipe_ir.marker": ("pipe_split",),
    ".pipe_ir.pipe": ("Edge", "Pipe", "PipeInfo", "StageInfo", "TiedParameter"),
    ".pipe_ir.spec": ("TensorSpec",),
    ".split": ("SplitPoint",),
}
_HOME_OF = {name: home for home, names in HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name == "schedule":
        return import_module(".schedule", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pipecut' has no attribute '{name}'")
    value: object = getattr(import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
