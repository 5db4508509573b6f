"""Balanced cuts of a chain of blocks, on plain numbers. Read problem.py, then solve.py."""

from .problem import Array as Array
from .problem import Blocks as Blocks
from .problem import CutCosts as CutCosts
from .problem import Ranks as Ranks
from .problem import Shared as Shared
from .reach import least_memory_cuts as least_memory_cuts
from .solve import Balance as Balance
from .solve import balance_stages as balance_stages
from .solve import evaluate_cuts as evaluate_cuts
