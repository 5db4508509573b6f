"""The schedules: each a function from a few integers to a Plan of computations."""

from __future__ import annotations

from .controllable_memory import v_half, v_min
from .dualpipe_v import dualpipe_v
from .forward_only import forward_only
from .gpipe import gpipe
from .interleaved import interleaved_one_f_one_b
from .interleaved_zero_bubble import interleaved_zero_bubble
from .looped_bfs import looped_bfs
from .one_f_one_b import one_f_one_b
from .zero_bubble_h import zero_bubble_h1, zero_bubble_h2
from .zero_bubble_v import zero_bubble_v

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
