"""What it costs to split the backward of a stage: the input part and the weight part, beside the backward in full.

One thread. The forwards do not count. Every parameter has a gradient already, as from the second microbatch on. A stage
of small layers does nearly all in the input part: there is nothing to gain from putting anything off, only to lose.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from pipecut.stage.backward import StageWeights, full_backward, input_backward, weight_backward

from .measure import Goal, clock, in_turn, median_ratio, show_goals, show_table

FULL, SPLIT, UPSTREAM_FULL, UPSTREAM_SPLIT = "full", "split", "upstream, full", "upstream, split"
ROUNDS_FOR_EACH = 3
SECONDS_A_ROUND, MOST_REPEATS = 0.02, 50
LIMIT, INPUT_LIMIT = 1.05, 0.6


@dataclass(frozen=True)
class Case:
    """A stage, and what goes in."""

    name: str
    module: nn.Module
    value: Tensor
    is_of_products: bool = False  # most of the time goes into products with weights, half of which can wait


class Spent(NamedTuple):
    """Seconds for a whole backward, and for its part up to the input gradients."""

    total: float
    inputs: float


Times: TypeAlias = dict[str, list[Spent]]
# Runs a backward from an output, with a gradient, to an input; returns when the input's gradient was there.
Backward: TypeAlias = Callable[[Tensor, Tensor, Tensor], float]


def cases() -> Iterator[Case]:
    """From layers that take microseconds to layers that take milliseconds."""
    for width, rows in ((16, 16), (64, 64), (256, 64), (256, 512), (1024, 64), (1024, 512)):
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
        name = f"8 linear layers, width {width}, {rows} rows"
        yield Case(name, nn.Sequential(*layers), torch.randn(rows, width), is_of_products=width >= 256)
    for width, tokens in ((32, 16), (128, 64), (512, 128)):
        make_block = functools.partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
        blocks = [make_block(width, 4, 4 * width) for _ in range(2)]
        name = f"2 transformer blocks, width {width}, 2 x {tokens} tokens"
        yield Case(name, nn.Sequential(*blocks), torch.randn(2, tokens, width), is_of_products=width >= 512)
    for channels, size in ((8, 8), (64, 32)):
        make_layers = (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        layers = [copy.deepcopy(layer) for _ in range(4) for layer in make_layers]
        name = f"4 convolutions, {channels} channels, 4 x {size} x {size}"
        yield Case(name, nn.Sequential(*layers), torch.randn(4, channels, size, size))


def run(rounds: int) -> list[Goal]:
    """Measure all cases, print the table and the goals."""
    rounds *= ROUNDS_FOR_EACH
    measured = [(case, measure(case, rounds)) for case in cases()]
    show_table(
        f"backward of a stage: CPU microseconds in full, and what else takes as part of that; {rounds} rounds",
        ["", "full", "I + W", "I alone", "upstream, full", "upstream, I + W", "upstream, I alone"],
        [_row(case.name, times) for case, times in measured],
    )
    goals = [Goal(f"{case.name}: I + W, of full", _ratio(times, SPLIT), LIMIT) for case, times in measured]
    goals += [
        Goal(f"{case.name}: I alone, of full", _input_ratio(times, SPLIT), INPUT_LIMIT)
        for case, times in measured
        if case.is_of_products
    ]
    return show_goals(goals)


def measure(case: Case, rounds: int) -> Times:
    """What each side spends on one backward, each on a copy of the stage."""
    modules = {name: copy.deepcopy(case.module) for name in (FULL, SPLIT, UPSTREAM_FULL, UPSTREAM_SPLIT)}
    weights = StageWeights(modules[SPLIT].parameters())
    backwards: dict[str, Backward] = {
        FULL: _full,
        SPLIT: functools.partial(_split, weights),
        UPSTREAM_FULL: _upstream_full,
        UPSTREAM_SPLIT: functools.partial(_upstream_split, modules[UPSTREAM_SPLIT]),
    }
    once = _spend(case.module, _full, case.value, 3, weights).total
    repeats = max(1, min(MOST_REPEATS, int(SECONDS_A_ROUND / once)))
    sides = {
        name: functools.partial(_spend, modules[name], backward, case.value, repeats, weights)
        for name, backward in backwards.items()
    }
    return in_turn(sides, rounds, case.name)


def _spend(module: nn.Module, backward: Backward, value: Tensor, repeats: int, weights: StageWeights) -> Spent:
    weights.refresh()  # as each step of a schedule begins: the hooks that upstream has put on nodes since are not ours
    total = inputs = 0.0
    gradient = torch.ones_like(value)
    for nth in range(repeats + 1):
        leaf = value.detach().requires_grad_()
        output = module(leaf)
        begin = clock()
        middle = backward(output, gradient, leaf)
        end = clock()
        if nth:  # the first one brings this side's memory back to the caches, where a loop of its own would have it
            total, inputs = total + end - begin, inputs + middle - begin
    return Spent(total / repeats, inputs / repeats)


def _full(output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    full_backward([output], [gradient], [leaf])
    return clock()


def _split(weights: StageWeights, output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    _, pending = input_backward([output], [gradient], [leaf], weights)
    middle = clock()
    weight_backward(pending)
    return middle


def _upstream_full(output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    stage_backward([output], [gradient], [leaf])
    return clock()


def _upstream_split(module: nn.Module, output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    _, groups = stage_backward_input([output], [gradient], [leaf], module.parameters())
    middle = clock()
    stage_backward_weight(module.parameters(), groups)
    return middle


def _ratio(times: Times, side: str) -> float:
    return median_ratio([spent.total for spent in times[side]], [spent.total for spent in times[FULL]])


def _input_ratio(times: Times, side: str) -> float:
    return median_ratio([spent.inputs for spent in times[side]], [spent.total for spent in times[FULL]])


def _row(case: str, times: Times) -> list[str]:
    ratios = _ratio(times, SPLIT), _input_ratio(times, SPLIT), _ratio(times, UPSTREAM_FULL)
    ratios += _ratio(times, UPSTREAM_SPLIT), _input_ratio(times, UPSTREAM_SPLIT)
    full = 1e6 * statistics.median(spent.total for spent in times[FULL])
    return [case, f"{full:,.0f}", *(f"{ratio:.3f}" for ratio in ratios)]
