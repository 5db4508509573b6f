"""A measured cut made better: its stages are run, and what they took corrects the times of their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..split.automatic import BalancedCut
from ..split.chain import Chain
from ..split.costs.times import Times
from ..split.cut import cut_model
from .chain import bounds_of
from .stage_times import measure_stages
from .walk import example_values

ROUNDS = 4
CLOSE = 1.03  # a longest stage this near to the mean is not worth another round


def refined_cut(
    chain: Chain,
    solve: Callable[[Chain], BalancedCut],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    speeds: Sequence[float] | None = None,
) -> BalancedCut:
    """The best of some cuts whose stages were run.

    The parts of a stage take another time together than one by one. The times of its blocks are scaled to what the
    stage took, and the chain is cut anew, until the cut stays the same.
    """
    device = chain.traced.device
    values = example_values(chain.traced, args, kwargs, device)
    tried: dict[tuple[int, ...], tuple[float, BalancedCut]] = {}
    for _ in range(ROUNDS):
        found = solve(chain)
        if found.plan.ticks in tried:
            break
        with torch.random.fork_rng(), torch.enable_grad():
            seen = measure_stages(cut_model(chain.traced, found.plan), values, device)
        loads = [times.total / (speeds[rank] if speeds else 1.0) for rank, times in enumerate(seen)]
        tried[found.plan.ticks] = max(loads), found
        if max(loads) <= CLOSE * sum(loads) / len(loads):
            break
        chain = _corrected(chain, found.plan.ticks, seen)
    return min(tried.values(), key=lambda each: each[0])[1]


def _corrected(chain: Chain, ticks: Sequence[int], seen: Sequence[Times]) -> Chain:
    """The chain with times that add up to what was seen of the stages."""
    times: list[Times] = []
    for (begin, end), stage in zip(itertools.pairwise(bounds_of(chain, ticks)), seen, strict=True):
        inside = chain.times[begin:end]
        factor = stage.total / (sum(each.total for each in inside) or stage.total or 1.0)
        times += [each.scaled(factor, factor, factor) for each in inside]
    return chain.with_times(times)
