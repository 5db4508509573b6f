"""A chain whose times are measured: each block runs as a stage of its own, equal ones once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError, SplitError
from ..pipe_ir.effects import operator_name
from ..pipe_ir.pipe import Pipe
from ..pipe_ir.traced import Ref
from ..split.chain import Chain, steps_of
from ..split.costs.times import Times
from ..split.cut import cut_model
from .stage_times import measure_stages
from .walk import example_values

# A block that is measured should be small beside a stage: what is inside it is divided by the analytic costs. One that
# is too small is measured badly, and goes with the next one.
BLOCKS_PER_STAGE = 4
LEAST_SHARE = 0.1


def measured_chain(
    chain: Chain,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int = 1,
    device: torch.device | str | None = None,
) -> Chain:
    """The chain with the times that its blocks take on a device, that of the model if left out.

    Copies of the blocks run on the example; the model is not changed, and no random numbers are used up. Blocks of the
    same operations and shapes are measured once. The model needs values: one on the meta device cannot be run.

    >>> from torch import nn
    >>> from pipecut import pipeline
    >>> from pipecut.split.chain_maker import chain_of
    >>> model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.ones(2, 4)
    >>> chain = measured_chain(chain_of(pipeline(model, (x,)).traced), (x,))
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
    """The chain at the outermost depth whose blocks are small enough, each block a stage."""
    goal = sum(each.total for each in chain.times) / (BLOCKS_PER_STAGE * stages)
    depths = sorted({place.depth for place in chain.places}) or [0]
    fine = next((depth for depth in depths if max(each.total for each in chain.up_to(depth).times) <= goal), depths[-1])
    for depth in [depth for depth in reversed(depths) if depth <= fine]:
        outer = _without_small_blocks(chain.up_to(depth), LEAST_SHARE * goal)
        try:
            return outer, cut_model(chain.traced, outer.plan(range(1, len(outer.times))), may_recompute=False)
        except SplitError:  # that many cuts tear something apart: fewer may not
            if depth == depths[0]:
                raise
    raise AssertionError("there is at least one depth")


def _without_small_blocks(chain: Chain, least: float) -> Chain:
    """The chain without places that leave little between them."""
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
    """What two blocks have in common that take the same time: operations, shapes, and what gets a gradient."""
    steps = chain.traced.steps

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            return str(steps[value.index].spec)
        return tuple(map(plain, value)) if isinstance(value, list | tuple) else repr(value)

    return tuple(
        (operator_name(step.target), str(step.spec), plain(step.args)) for step in steps_of(chain, block, block + 1)
    )


def _divided(chain: Chain, outer: Chain, measured: Sequence[Times]) -> list[Times]:
    """The time of each outer block among the blocks inside it, in proportion to their analytic times."""
    bounds = bounds_of(chain, [place.cut.tick for place in outer.places])
    found: list[Times] = []
    for (begin, end), whole in zip(itertools.pairwise(bounds), measured, strict=True):
        inside = chain.times[begin:end]
        parts = [_shares(inside, part) for part in (_forward, _backward_input, _backward_weight)]
        found += [
            Times(*(total * share[nth] for total, share in zip(_parts(whole), parts, strict=True)))
            for nth in range(len(inside))
        ]
    return found


def bounds_of(chain: Chain, ticks: Sequence[int]) -> list[int]:
    """The blocks at which the parts of a cut begin, with the end of the last part."""
    own = [place.cut.tick for place in chain.places]
    return [0, *(own.index(tick) + 1 for tick in ticks), len(chain.times)]


def _parts(times: Times) -> tuple[float, float, float]:
    return times.forward, times.backward_input, times.backward_weight


def _forward(times: Times) -> float:
    return times.forward


def _backward_input(times: Times) -> float:
    return times.backward_input


def _backward_weight(times: Times) -> float:
    return times.backward_weight


def _shares(times: Sequence[Times], part: Callable[[Times], float]) -> list[float]:
    """The share of each in a part; where the analytic costs know of none, that in the forward."""
    values = [part(each) for each in times]
    if sum(values) == 0:
        values = [each.forward for each in times]
    total = sum(values)
    return [value / total for value in values] if total else [1 / len(values)] * len(values)
