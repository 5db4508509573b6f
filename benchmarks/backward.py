"""What it costs to split the backward of a stage: the input part and the weight part, beside the backward in full.

The full backward is torch's own, with the input's gradient taken from it. One forward a run, which does not count.
Every parameter has a gradient already, as from the second microbatch on.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from pipecut.stage.backward import StageWeights, full_backward, input_backward, weight_backward

from .measure import Goal, clock, in_turn, median_ratio, show_goals, show_table

FULL, OURS, PEER_FULL, PEER = "full", "pipecut, I + W", "peer, full", "peer, I + W"
ROUNDS_FOR_EACH = 20
LEAST_SECONDS_A_ROUND = 0.02
LIMIT = 1.05

Times: TypeAlias = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Case:
    """A stage, and what goes in."""

    name: str
    module: nn.Module
    value: Tensor


def cases() -> Iterator[Case]:
    """From layers that take microseconds to layers that take milliseconds."""
    for width, rows in ((16, 16), (64, 64), (256, 64), (256, 512), (1024, 64), (1024, 512)):
        layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
        yield Case(f"8 linear layers, width {width}, {rows} rows", nn.Sequential(*layers), torch.randn(rows, width))
    for width, length in ((32, 16), (128, 64), (512, 128)):
        blocks = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        ]
        name = f"2 transformer blocks, width {width}, 2 x {length} tokens"
        yield Case(name, nn.Sequential(*blocks), torch.randn(2, length, width))
    for channels, size in ((8, 8), (64, 32)):
        layers = [
            layer
            for _ in range(4)
            for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        ]
        name = f"4 convolutions, {channels} channels, 4 x {size} x {size}"
        yield Case(name, nn.Sequential(*layers), torch.randn(4, channels, size, size))


def run(rounds: int) -> None:
    """Measure all cases, print the table and the goals."""
    rounds *= ROUNDS_FOR_EACH
    measured = {case.name: measure(case, rounds) for case in cases()}
    show_table(
        f"backward of one stage: CPU microseconds, medians of {rounds} rounds",
        ["", "time", "of full", "input part, of full", "of the peer"],
        [_row(case, side, times) for case, times in measured.items() for side in times],
    )
    show_goals(list(_goals(measured)))


def measure(case: Case, rounds: int) -> Times:
    """Seconds of the input part and the weight part of one backward, a list for each side."""
    makers: dict[str, Callable[[nn.Module], Backward]] = {
        FULL: lambda module: _full,
        OURS: lambda module: functools.partial(_split, StageWeights(module.parameters())),
        PEER_FULL: lambda module: _peer_full,
        PEER: lambda module: functools.partial(_peer_split, module),
    }
    reference = copy.deepcopy(case.module)
    once, _ = _time(reference, _full, case.value, 3)
    repeats = max(1, min(50, int(LEAST_SECONDS_A_ROUND / once)))
    sides = {}
    for name, make in makers.items():
        module = copy.deepcopy(case.module)
        sides[name] = functools.partial(_time, module, make(module), case.value, repeats)
    return in_turn(sides, rounds, case.name)


Backward: TypeAlias = Callable[[Tensor, Tensor, Tensor], float]


def _time(module: nn.Module, backward: Backward, value: Tensor, repeats: int) -> tuple[float, float]:
    """Seconds for the whole backward and for its input part, on average."""
    total = first = 0.0
    gradient = torch.ones_like(value)
    for nth in range(-1, repeats):
        leaf = value.detach().requires_grad_()
        output = module(leaf)
        begin = clock()
        middle = backward(output, gradient, leaf)
        end = clock()
        if nth >= 0:  # the first brings this side's memory back to the caches
            total, first = total + end - begin, first + middle - begin
    return total / repeats, first / repeats


def _full(output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    full_backward([output], [gradient], [leaf])
    return clock()


def _split(weights: StageWeights, output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    _, pending = input_backward([output], [gradient], [leaf], weights)
    middle = clock()
    weight_backward(pending)
    return middle


def _peer_full(output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    stage_backward([output], [gradient], [leaf])
    return clock()


def _peer_split(module: nn.Module, output: Tensor, gradient: Tensor, leaf: Tensor) -> float:
    _, groups = stage_backward_input([output], [gradient], [leaf], module.parameters())
    middle = clock()
    stage_backward_weight(module.parameters(), groups)
    return middle


def _totals(times: Times, side: str) -> list[float]:
    return [total for total, _ in times[side]]


def _row(case: str, side: str, times: Times) -> list[str]:
    totals, firsts = _totals(times, side), [first for _, first in times[side]]
    peer = PEER if side == OURS else PEER_FULL
    return [
        f"{case}: {side}",
        f"{1e6 * statistics.median(totals):,.0f}",
        f"{median_ratio(totals, _totals(times, FULL)):.3f}",
        f"{median_ratio(firsts, _totals(times, FULL)):.3f}",
        f"{median_ratio(totals, _totals(times, peer)):.3f}",
    ]


def _goals(measured: dict[str, Times]) -> Iterator[Goal]:
    for case, times in measured.items():
        yield Goal(f"{case}: I + W, of full", median_ratio(_totals(times, OURS), _totals(times, FULL)), LIMIT)
