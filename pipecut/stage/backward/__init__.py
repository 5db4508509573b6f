"""The backward pass of one stage: in full, for the inputs only, for the weights only."""

from .backward import full_backward, input_backward, weight_backward
from .engine import PendingWeights
from .weights import StageWeights

__all__ = ["PendingWeights", "StageWeights", "full_backward", "input_backward", "weight_backward"]
