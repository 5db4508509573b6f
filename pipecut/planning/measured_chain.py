"""Cuts by measured times: those of the blocks of a chain, then those of the stages of a cut.

To measure a chain, each block runs as a stage of its own; equal blocks run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import InputError, SplitError
from ..pipe import Pipe
from ..pipe_ir import Ref, operator_name
from ..split import BalancedCut, Chain, Times, cut_trace, operations_of
from .measure import example_values, measure_stages

# A block that is measured should be small beside a stage: what is inside it is divided by the analytic costs. One that
# is too small is measured badly, and goes with the next one.
_BLOCKS_PER_STAGE = 4
_LEAST_SHARE = 0.1


def measured_cut(
    chain: Chain,
    solve: Callable[[Chain], BalancedCut],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    *,
    stages: int,
    speeds: Sequence[float] | None,
) -> BalancedCut:
    """Return the cut of a chain that `solve` finds by measured times."""
    measured = measured_chain(chain, args, kwargs, stages=stages)
    return refined_cut(measured, solve, args, kwargs, speeds=speeds)


def measured_chain(
    chain: Chain,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 1,
    device: torch.device | str | None = None,
) -> Chain:
    """Return the chain with the times that its blocks take on a device, by default that of the model.

    Copies of the blocks run on the example; the model and the state of the random numbers do not change. Blocks of the
    same operations and shapes are measured once. The model needs values: one on the meta device cannot be run.

    >>> from torch import nn
    >>> from pipecut import pipeline
    >>> from pipecut.split import chain_of
    >>> model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    >>> chain = measured_chain(chain_of(pipeline(model, (x,), num_stages=1).traced), (x,))
    >>> len(chain.times), all(times.forward > 0 for times in chain.times)
    (3, True)
    """
    _check_has_values(chain)
    where = torch.device(device) if device is not None else chain.traced.device
    outer, pipe = _cut_into_blocks(chain, stages)
    values = example_values(chain.traced, args, kwargs, where)
    with torch.random.fork_rng(), torch.enable_grad():
        measured = measure_stages(pipe, values, where, lambda block: _signature(outer, block))
    return chain.with_times(_divided(chain, outer, measured))


def _check_has_values(chain: Chain) -> None:
    empty = next((name for name, tensor in chain.traced.model.named_parameters() if tensor.is_meta), None)
    if empty is not None:
        raise InputError(
            f'cost="measured" runs the model, and {empty} is on the meta device, without values: use cost="analytic", '
            "or give the model memory first"
        )


def _cut_into_blocks(chain: Chain, stages: int) -> tuple[Chain, Pipe]:
    """Return the chain at the outermost depth whose blocks are small enough, and a pipe with a stage per block."""
    goal = sum(each.total for each in chain.times) / (_BLOCKS_PER_STAGE * stages)
    depths = sorted({place.depth for place in chain.places}) or [0]
    fine = next((depth for depth in depths if max(each.total for each in chain.up_to(depth).times) <= goal), depths[-1])
    for depth in [depth for depth in reversed(depths) if depth <= fine]:
        outer = _without_small_blocks(chain.up_to(depth), _LEAST_SHARE * goal)
        try:
            return outer, cut_trace(chain.traced, outer.plan(range(1, len(outer.times))), Pipe, may_recompute=False)
        except SplitError:  # that many cuts tear something apart: fewer may not
            if depth == depths[0]:
                raise
    raise AssertionError("there is at least one depth")


def _without_small_blocks(chain: Chain, least: float) -> Chain:
    """Return the chain without places that leave little between them."""
    kept: list[int] = []
    waiting, left = 0.0, sum(each.total for each in chain.times)
    for place, times in enumerate(chain.times[:-1]):
        waiting += times.total
        left -= times.total
        if waiting >= least and left >= least:
            kept.append(place)
            waiting = 0.0
    return chain.with_places(kept)


def _signature(chain: Chain, block: int) -> Any:
    """Return a key that is equal for blocks that take the same time: operations, shapes, and gradients."""
    operations = chain.traced.operations

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            return str(operations[value.index].spec)
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else repr(value)

    return tuple(
        (operator_name(op.target), str(op.spec), plain(op.args)) for op in operations_of(chain, block, block + 1)
    )


def _divided(chain: Chain, outer: Chain, measured: Sequence[Times]) -> list[Times]:
    """Divide the time of each outer block among the blocks inside it, in proportion to their analytic times."""
    bounds = _block_bounds(chain, [place.cut.tick for place in outer.places])
    found: list[Times] = []
    for (begin, end), whole in zip(itertools.pairwise(bounds), measured, strict=True):
        inside = chain.times[begin:end]
        analytic = list(zip(*map(_parts, inside), strict=True))
        # Where the analytic times of a part are all zero, the shares of the forward count.
        shares = [_shares(part if sum(part) else analytic[0]) for part in analytic]
        totals = zip(_parts(whole), shares, strict=True)
        found += map(Times, *([total * share for share in each] for total, each in totals))
    return found


def _block_bounds(chain: Chain, ticks: Sequence[int]) -> list[int]:
    """Return the blocks at which the parts of a cut begin, with the end of the last part."""
    own = [place.cut.tick for place in chain.places]
    return [0, *(own.index(tick) + 1 for tick in ticks), len(chain.times)]


def _parts(times: Times) -> tuple[float, float, float]:
    return times.forward, times.backward_input, times.backward_weight


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total for value in values] if total else [1 / len(values)] * len(values)


# Refined cuts.

_ROUNDS = 6
_CLOSE = 1.03  # a longest stage this near to the mean is not worth another round
_FINALISTS = 3  # cuts whose stages are measured again, in turn
_SWEEPS = 30


def refined_cut(
    chain: Chain,
    solve: Callable[[Chain], BalancedCut],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    speeds: Sequence[float] | None = None,
) -> BalancedCut:
    """Return the best of several cuts whose stages were measured.

    The blocks of a stage take another time together than one by one. Their times are scaled until they add up to the
    measured times of the stages of all cuts so far, and the chain is cut again, until a cut comes back or its stages
    are even. The best few are measured once more, in turn, for one of many is the best by chance.
    """
    device = chain.traced.device
    values = example_values(chain.traced, args, kwargs, device)
    tried: dict[tuple[int, ...], _MeasuredCut] = {}

    def measure(cut: BalancedCut) -> None:
        pipe = cut_trace(chain.traced, cut.plan, Pipe)
        with torch.random.fork_rng(), torch.enable_grad():
            times = measure_stages(pipe, values, device)
        tried.setdefault(cut.plan.ticks, _MeasuredCut(cut, speeds)).runs.append(times)

    for _ in range(_ROUNDS):
        found = solve(chain)
        if found.plan.ticks in tried:
            break
        measure(found)
        if tried[found.plan.ticks].imbalance <= _CLOSE:
            return found
        chain = _fitted(chain, list(tried.values()))
    ranked = sorted(tried.values(), key=lambda each: each.bottleneck)[:_FINALISTS]
    for each in ranked if len(ranked) > 1 else ():
        measure(each.cut)
    return min(ranked, key=lambda each: each.bottleneck).cut


@dataclass(frozen=True)
class _MeasuredCut:
    """A cut, and the times of its stages in each measurement."""

    cut: BalancedCut
    speeds: Sequence[float] | None
    runs: list[Sequence[Times]] = field(default_factory=list)

    @property
    def totals(self) -> list[float]:
        """Return the mean time of each stage."""
        return [sum(times.total for times in stage) / len(self.runs) for stage in zip(*self.runs, strict=True)]

    @property
    def _loads(self) -> list[float]:
        return [total / (self.speeds[rank] if self.speeds else 1.0) for rank, total in enumerate(self.totals)]

    @property
    def bottleneck(self) -> float:
        """Return the longest time of a rank."""
        return max(self._loads)

    @property
    def imbalance(self) -> float:
        """Return the longest time of a rank beside the mean."""
        return self.bottleneck * len(self._loads) / (sum(self._loads) or 1.0)


def _fitted(chain: Chain, measured: Sequence[_MeasuredCut]) -> Chain:
    """Return the chain with times that add up to those of the measured stages, as nearly as all of them together allow.

    The blocks of one stage after the other are scaled to its time, cut after cut, several times over; the last cut has
    the last word.
    """
    totals = [each.total for each in chain.times]
    scales = [1.0] * len(totals)
    stages = [
        (begin, end, time)
        for each in measured
        for (begin, end), time in zip(
            itertools.pairwise(_block_bounds(chain, each.cut.plan.ticks)), each.totals, strict=True
        )
    ]
    for _ in range(_SWEEPS if len(measured) > 1 else 1):
        for begin, end, time in stages:
            now = sum(totals[block] * scales[block] for block in range(begin, end))
            factor = time / (now or time or 1.0)
            scales[begin:end] = [scale * factor for scale in scales[begin:end]]
    return chain.with_times([each.scaled(*[scale] * 3) for each, scale in zip(chain.times, scales, strict=True)])
