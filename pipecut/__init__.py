"""Cuts the PyTorch model you already have into pipeline stages.

The names are imported when they are first used, so that `pipecut.schedule`, which plans with whole numbers alone, does
not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import pipeline as pipeline
    from .errors import CheckpointError as CheckpointError
    from .errors import InputError as InputError
    from .errors import LaunchError as LaunchError
    from .errors import PipeError as PipeError
    from .errors import PipeWarning as PipeWarning
    from .errors import PlanError as PlanError
    from .errors import SpecError as SpecError
    from .errors import SplitError as SplitError
    from .errors import StepError as StepError
    from .errors import TraceError as TraceError
    from .launcher import launch as launch
    from .pipe import Pipe as Pipe
    from .pipe_ir import Edge as Edge
    from .pipe_ir import PipeInfo as PipeInfo
    from .pipe_ir import StageInfo as StageInfo
    from .pipe_ir import TensorSpec as TensorSpec
    from .pipe_ir import TiedParameter as TiedParameter
    from .pipe_ir import pipe_split as pipe_split
    from .planning.search import plan as plan
    from .planning.training_plan import TrainingPlan as TrainingPlan
    from .run import PipelineScheduleMulti as PipelineScheduleMulti
    from .run import PipelineScheduleSingle as PipelineScheduleSingle
    from .run import PlannedSchedule as PlannedSchedule
    from .run import Schedule1F1B as Schedule1F1B
    from .run import ScheduleDualPipeV as ScheduleDualPipeV
    from .run import ScheduleForwardOnly as ScheduleForwardOnly
    from .run import ScheduleGPipe as ScheduleGPipe
    from .run import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from .run import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from .run import ScheduleLoopedBFS as ScheduleLoopedBFS
    from .run import ScheduleVHalf as ScheduleVHalf
    from .run import ScheduleVMin as ScheduleVMin
    from .run import ScheduleZBH1 as ScheduleZBH1
    from .run import ScheduleZBH2 as ScheduleZBH2
    from .run import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from .run import get_schedule_class as get_schedule_class
    from .schedule import compare as compare
    from .split import Machine as Machine
    from .split import SplitPoint as SplitPoint
    from .stage import PipelineStage as PipelineStage
    from .stage import Replicate as Replicate
    from .stage import TensorChunkSpec as TensorChunkSpec
    from .stage import build_stage as build_stage
    from .stage import empty_weights as empty_weights
    from .stage import random_streams as random_streams
    from .stage import save_stage as save_stage
    from .verification import Verification as Verification
    from .verification import VerificationError as VerificationError
    from .verification import verify as verify


HOMES = {
    ".api": ("pipeline",),
    ".errors": (
        "CheckpointError",
        "InputError",
        "LaunchError",
        "PipeError",
        "PipeWarning",
        "PlanError",
        "SpecError",
        "SplitError",
        "StepError",
        "TraceError",
    ),
    ".launcher": ("launch",),
    ".pipe": ("Pipe",),
    ".pipe_ir": ("Edge", "PipeInfo", "StageInfo", "TensorSpec", "TiedParameter", "pipe_split"),
    ".planning.search": ("plan",),
    ".planning.training_plan": ("TrainingPlan",),
    ".run": (
        "PipelineScheduleMulti",
        "PipelineScheduleSingle",
        "PlannedSchedule",
        "Schedule1F1B",
        "ScheduleDualPipeV",
        "ScheduleForwardOnly",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
        "ScheduleVHalf",
        "ScheduleVMin",
        "ScheduleZBH1",
        "ScheduleZBH2",
        "ScheduleZBVZeroBubble",
        "get_schedule_class",
    ),
    ".schedule": ("compare",),
    ".split": ("Machine", "SplitPoint"),
    ".stage": (
        "PipelineStage",
        "Replicate",
        "TensorChunkSpec",
        "build_stage",
        "empty_weights",
        "random_streams",
        "save_stage",
    ),
    ".verification": ("Verification", "VerificationError", "verify"),
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
