"""Local processes as ranks, for scripts, notebooks and tests without torchrun.

`launch()` (launch.py) calls a function once; `RankPool` (pool.py, the file to read first) keeps its ranks for more
calls. rank.py runs in the process of a rank.
"""

from .launch import launch as launch
