"""Backward pass of one stage: in full, for the inputs only, for the weights only.

autograd.py has the full backward, backward.py the one in two parts.
"""

from .autograd import PendingWeights, full_backward
from .backward import input_backward, weight_backward
from .weights import StageWeights, max_rows, min_rows_to_defer, weight_sizes

__all__ = [
    "PendingWeights",
    "StageWeights",
    "full_backward",
    "input_backward",
    "max_rows",
    "min_rows_to_defer",
    "weight_backward",
    "weight_sizes",
]
