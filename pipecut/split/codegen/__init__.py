"""Generated code: the Python source of the stages. Read emit.py first."""

from .emit import Emitter as Emitter
from .emit import Function as Function
from .expressions import Naming as Naming
from .expressions import name_values as name_values
