"""The module layout and names of torch.distributed.pipelining (upstream) over pipecut's own objects.

stage_calls.py and orders.py add upstream's attributes to pipecut's stages and schedules; steps.py is the observer
of a running step; actions.py has upstream's actions, passes.py the passes over orders of them,
unsupported.py the names without a meaning here, imported_names.py those that upstream merely imports.

>>> import pipecut
>>> from pipecut.compat.schedules import get_schedule_class
>>> issubclass(get_schedule_class("1F1B"), pipecut.Schedule1F1B)
True
"""

from . import _IR as _IR
from . import _backward as _backward
from . import _debug as _debug
from . import _schedule_visualizer as _schedule_visualizer
from . import _unflatten as _unflatten
from . import _utils as _utils
from . import microbatch as microbatch
from . import schedules
from . import stage as stage
from ._IR import Pipe, SplitPoint, pipe_split, pipeline
from .installing import install as install
from .installing import uninstall as uninstall
from .stage import PipelineStage, build_stage

Schedule1F1B = schedules.Schedule1F1B
ScheduleDualPipeV = schedules.ScheduleDualPipeV
ScheduleGPipe = schedules.ScheduleGPipe
ScheduleInterleaved1F1B = schedules.ScheduleInterleaved1F1B
ScheduleInterleavedZeroBubble = schedules.ScheduleInterleavedZeroBubble
ScheduleLoopedBFS = schedules.ScheduleLoopedBFS
ScheduleZBVZeroBubble = schedules.ScheduleZBVZeroBubble
_ScheduleForwardOnly = schedules._ScheduleForwardOnly

# Upstream's, and no more: `from torch.distributed.pipelining import *` must not overwrite a user's `stage`.
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
    "build_stage",
    "pipe_split",
    "pipeline",
]
