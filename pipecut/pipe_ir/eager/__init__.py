"""Modules that torch.export cannot trace: each of their calls is one operation of the trace.

Read observe.py first, then example_runs.py and modules.py.
"""

from .example_runs import run_on_example as run_on_example
from .modules import EagerModules as EagerModules
from .modules import HiddenTieError as HiddenTieError
from .observe import Observations as Observations
