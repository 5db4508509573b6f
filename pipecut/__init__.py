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
    from .errors import PipeError as PipeError
    from .errors import PipeWarning as PipeWarning
    from .errors import PlanError as PlanError
    from .errors import SpecError as SpecError
    from .errors import SplitError as SplitError
    from .errors import TraceError as TraceError
    from .launcher.launch import launch as launch
    from .launcher.watch import LaunchError as LaunchError
    from .pipe import Pipe as Pipe
    from .pipe_ir.marker import pipe_split as pipe_split
    from .pipe_ir.pipe import Edge as Edge
    from .pipe_ir.pipe import PipeInfo as PipeInfo
    from .pipe_ir.pipe import StageInfo as StageInfo
    from .pipe_ir.pipe import TiedParameter as TiedParameter
    from .pipe_ir.spec import TensorSpec as TensorSpec
    from .planning.search import plan as plan
    from .planning.training_plan import TrainingPlan as TrainingPlan
    from .schedule.comparison import compare as compare
    from .schedule.run.failure import StepError as StepError
    from .schedule.run.schedules import PipelineScheduleMulti as PipelineScheduleMulti
    from .schedule.run.schedules import PipelineScheduleSingle as PipelineScheduleSingle
    from .schedule.run.schedules import PlannedSchedule as PlannedSchedule
    from .schedule.run.schedules import Schedule1F1B as Schedule1F1B
    from .schedule.run.schedules import ScheduleDualPipeV as ScheduleDualPipeV
    from .schedule.run.schedules import ScheduleForwardOnly as ScheduleForwardOnly
    from .schedule.run.schedules import ScheduleGPipe as ScheduleGPipe
    from .schedule.run.schedules import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from .schedule.run.schedules import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from .schedule.run.schedules import ScheduleLoopedBFS as ScheduleLoopedBFS
    from .schedule.run.schedules import ScheduleVHalf as ScheduleVHalf
    from .schedule.run.schedules import ScheduleVMin as ScheduleVMin
    from .schedule.run.schedules import ScheduleZBH1 as ScheduleZBH1
    from .schedule.run.schedules import ScheduleZBH2 as ScheduleZBH2
    from .schedule.run.schedules import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from .schedule.run.schedules import get_schedule_class as get_schedule_class
    from .split import SplitPoint as SplitPoint
    from .split.costs.machine import Machine as Machine
    from .stage.materialization.empty_weights import empty_weights as empty_weights
    from .stage.materialization.save_stage import save_stage as save_stage
    from .stage.microbatch import Replicate as Replicate
    from .stage.microbatch import TensorChunkSpec as TensorChunkSpec
    from .stage.randomness import random_streams as random_streams
    from .stage.stage import PipelineStage as PipelineStage
    from .stage.stage import build_stage as build_stage
    from .verification.report import Verification as Verification
    from .verification.report import VerificationError as VerificationError
    from .verification.verify import verify as verify

HOMES = {
    ".api": ("pipeline",),
    ".errors": (
        "CheckpointError",
        "InputError",
        "PipeError",
        "PipeWarning",
        "PlanError",
        "SpecError",
        "SplitError",
        "TraceError",
    ),
    ".pipe_ir.marker": ("pipe_split",),
    ".launcher.launch": ("launch",),
    ".launcher.watch": ("LaunchError",),
    ".pipe": ("Pipe",),
    ".pipe_ir.pipe": ("Edge", "PipeInfo", "StageInfo", "TiedParameter"),
    ".pipe_ir.spec": ("TensorSpec",),
    ".planning.search": ("plan",),
    ".planning.training_plan": ("TrainingPlan",),
    ".schedule.comparison": ("compare",),
    ".schedule.run.failure": ("StepError",),
    ".schedule.run.schedules": (
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
    ".split": ("SplitPoint",),
    ".split.costs.machine": ("Machine",),
    ".stage.materialization.empty_weights": ("empty_weights",),
    ".stage.materialization.save_stage": ("save_stage",),
    ".stage.microbatch": ("Replicate", "TensorChunkSpec"),
    ".stage.randomness": ("random_streams",),
    ".stage.stage": ("PipelineStage", "build_stage"),
    ".verification.report": ("Verification", "VerificationError"),
    ".verification.verify": ("verify",),
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
