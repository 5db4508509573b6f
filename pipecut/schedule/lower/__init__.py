"""Passes from Plan to Plan: from computations alone to a plan that can be executed.

`lower`, in transfers.py, runs them in order.
"""

from .reorder import add_bubbles, drop_bubbles, merge_backwards, receive_early, receive_late
from .sharding import add_reduce_grad, add_unshard_reshard, shard_row
from .transfers import add_reduce_ties, add_transfers, drop_reduce_ties, lower

__all__ = [
    "add_bubbles",
    "add_reduce_grad",
    "add_reduce_ties",
    "add_transfers",
    "add_unshard_reshard",
    "drop_bubbles",
    "drop_reduce_ties",
    "lower",
    "merge_backwards",
    "receive_early",
    "receive_late",
    "shard_row",
]
