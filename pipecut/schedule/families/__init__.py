"""The schedules: each a function from a few integers to a Plan of computations."""

from __future__ import annotations

from .breadth_first import forward_only, gpipe, looped_bfs
from .controllable_memory import v_half, v_min
from .one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from .v_shaped import dualpipe_v, zero_bubble_v
from .zero_bubble import interleaved_zero_bubble, zero_bubble_h1, zero_bubble_h2

__all__ = [
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]
