"""The module layout and names of torch.distributed.pipelining over pipecut's own objects.

>>> from pipecut import Schedule1F1B
>>> from pipecut.compat.schedules import get_schedule_class
>>> get_schedule_class("1F1B") is Schedule1F1B
True
"""

from . import _IR, _backward, _debug, _schedule_visualizer, _unflatten, _utils, microbatch, schedules, stage
from ._IR import Pipe, SplitPoint, pipe_split, pipeline
from .installing import install, uninstall
from .stage import PipelineStage, build_stage

Schedule1F1B = schedules.Schedule1F1B
ScheduleDualPipeV = schedules.ScheduleDualPipeV
ScheduleGPipe = schedules.ScheduleGPipe
ScheduleInterleaved1F1B = schedules.ScheduleInterleaved1F1B
ScheduleInterleavedZeroBubble = schedules.ScheduleInterleavedZeroBubble
ScheduleLoopedBFS = schedules.ScheduleLoopedBFS
ScheduleZBVZeroBubble = schedules.ScheduleZBVZeroBubble
_ScheduleForwardOnly = schedules._ScheduleForwardOnly

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_IR",
    "_ScheduleForwardOnly",
    "_backward",
    "_debug",
    "_schedule_visualizer",
    "_unflatten",
    "_utils",
    "build_stage",
    "install",
    "microbatch",
    "pipe_split",
    "pipeline",
    "schedules",
    "stage",
    "uninstall",
]
