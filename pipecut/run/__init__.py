"""Run a plan on stages: one executor, over transports between ranks or inside one process.

Begin with schedule.py, the base class of all schedules. A step goes from there to inputs.py, which cuts the arguments
into a StepState for each rank (state.py), to a runner (runner.py), which goes through the actions of the plan, and to
the executor (executor.py), which has a handler for each kind of action.
"""

from .agreement import Agreement as Agreement
from .assembly import MAX_HELD as MAX_HELD
from .calls import cut_by_hand as cut_by_hand
from .calls import cut_traced as cut_traced
from .connection import CLIP as CLIP
from .connection import NORM as NORM
from .connection import UNSCALE as UNSCALE
from .executor import ActionContext as ActionContext
from .executor import Executor as Executor
from .executor import checked_op as checked_op
from .failure import PATIENCE as PATIENCE
from .handshake import differences as differences
from .handshake import digest as digest
from .handshake import exchange as exchange
from .inputs import Given as Given
from .inputs import InputCutter as InputCutter
from .metrics import RankMetrics as RankMetrics
from .metrics import StepMetrics as StepMetrics
from .parameters import HeldTensor as HeldTensor
from .schedule import PipelineSchedule as PipelineSchedule
from .schedules import FamilySchedule as FamilySchedule
from .schedules import PipelineScheduleMulti as PipelineScheduleMulti
from .schedules import PipelineScheduleSingle as PipelineScheduleSingle
from .schedules import PlannedSchedule as PlannedSchedule
from .schedules import Schedule1F1B as Schedule1F1B
from .schedules import ScheduleDualPipeV as ScheduleDualPipeV
from .schedules import ScheduleForwardOnly as ScheduleForwardOnly
from .schedules import ScheduleGPipe as ScheduleGPipe
from .schedules import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from .schedules import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from .schedules import ScheduleLoopedBFS as ScheduleLoopedBFS
from .schedules import ScheduleVHalf as ScheduleVHalf
from .schedules import ScheduleVMin as ScheduleVMin
from .schedules import ScheduleZBH1 as ScheduleZBH1
from .schedules import ScheduleZBH2 as ScheduleZBH2
from .schedules import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
from .schedules import check_not_compiled as check_not_compiled
from .schedules import get_schedule_class as get_schedule_class
from .state import StepState as StepState
from .transport import Transport as Transport
from .transport import TransportFactory as TransportFactory
