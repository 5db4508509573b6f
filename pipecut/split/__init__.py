"""Cutting: finds the places, balances stages, and turns a traced model into stages. Read `cut` first."""

from .cut import cut_model as cut_model
from .cut import cut_trace as cut_trace
from .points import SplitPlan, SplitPoint, SplitPolicy, check_split_spec, cuts_by_marks, cuts_by_spec

__all__ = [
    "SplitPlan",
    "SplitPoint",
    "SplitPolicy",
    "check_split_spec",
    "cuts_by_marks",
    "cuts_by_spec",
]
from .automatic import BalancedCut as BalancedCut
from .automatic import balanced_cut as balanced_cut
from .automatic import dominant_block as dominant_block
from .automatic import same_cuts as same_cuts
from .automatic import warn_of_dominant_block as warn_of_dominant_block
from .balance.chunked import ChunkedCuts as ChunkedCuts
from .balance.least_memory import least_memory_cuts as least_memory_cuts
from .balance.problem import Array as Array
from .balance.solve import Blocks as Blocks
from .balance.solve import Ranks as Ranks
from .balance.solve import evaluate_cuts as evaluate_cuts
from .chain import TRAINED_MEMORY_FACTOR as TRAINED_MEMORY_FACTOR
from .chain import Chain as Chain
from .chain import StageCost as StageCost
from .chain import StageTie as StageTie
from .chain import chain_of as chain_of
from .chain import operations_of as operations_of
from .cost.machine import ACCUMULATION_PASSES as ACCUMULATION_PASSES
from .cost.machine import Machine as Machine
from .cost.machine import Times as Times
from .cost.machine import mean_of as mean_of
from .cost.operation import ConcreteCosts as ConcreteCosts
from .points import cuts_by_policy as cuts_by_policy
from .state import changed_state as changed_state
