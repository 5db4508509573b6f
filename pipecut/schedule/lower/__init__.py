"""Passes from Plan to Plan: from computations alone to a plan that can be executed.

`lower`, in transfers.py, runs them in order.
"""

from .reorder import add_bubbles, drop_bubbles, merge_backwards, merge_row, receive_early, receive_late
from .sharding import GIVES_WEIGHT_GRADIENT, add_reduce_grad, add_unshard_reshard, shard_row, spliced
from .transfers import add_reduce_ties, add_transfers, drop_reduce_ties, lower

__all__ = [
    "GIVES_WEIGHT_GRADIENT",
    "add_bubbles",
    "add_reduce_grad",
    "add_reduce_ties",
    "add_transfers",
    "add_unshard_reshard",
    "drop_bubbles",
    "drop_reduce_ties",
    "lower",
    "merge_backwards",
    "merge_row",
    "receive_early",
    "receive_late",
    "shard_row",
    "spliced",
]
