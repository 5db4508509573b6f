"""What the cut itself costs at run time: all stages one after the other in one process, beside the uncut model.

Small batches, so that what a stage adds to the operations shows. pipecut calls the modules that lie in one stage as
they are, and writes code only for those that a cut goes through; one side is stages with all modules written anew. A
copy of the uncut model shows how far from 1 a ratio may be by chance.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig, next_token_loss, random_tokens

from .cuts import cut_and_rebuild, cut_by_upstream, cut_ours, even_cuts
from .measure import Goal, in_turn, median_ratio, milliseconds, seconds, show_goals, show_table

LAYERS, WIDTHS, STAGES = 12, (64, 256), (2, 4)
BATCH, LENGTH = 2, 32
STEPS_A_ROUND, ROUNDS_FOR_EACH = 2, 12
UNCUT, COPY, OURS, REBUILT, UPSTREAM = (
    "uncut",
    "uncut, a copy",
    "pipecut",
    "pipecut, all modules written anew",
    "upstream",
)

Times: TypeAlias = dict[str, list[float]]


def run(rounds: int) -> list[Goal]:
    """Measure all sizes, print the table and the goals."""
    rounds *= ROUNDS_FOR_EACH
    cases = {f"width {width}, {stages} stages": measure(width, stages, rounds) for width in WIDTHS for stages in STAGES}
    show_table(
        f"forward, backward; {LAYERS} layers, batch {BATCH} x {LENGTH}: CPU milliseconds, medians of {rounds} rounds",
        ["", "time", "of uncut", "of upstream"],
        [_row(case, name, times) for case, times in cases.items() for name in times],
    )
    return show_goals(list(_goals(cases)))


def measure(width: int, stages: int, rounds: int) -> Times:
    """Seconds of one forward and backward, a list for each side."""
    config = GPTConfig(layers=LAYERS, width=width, context=LENGTH)
    tokens = random_tokens(config, BATCH)
    cuts = even_cuts(LAYERS, stages)
    model = GPT(config)
    makers: dict[str, Callable[[GPT], Callable[[Tensor], Tensor]]] = {
        UNCUT: lambda model: model,
        COPY: lambda model: model,
        OURS: lambda model: cut_ours(model, tokens, cuts),
        REBUILT: lambda model: cut_and_rebuild(model, tokens, cuts),
        UPSTREAM: lambda model: cut_by_upstream(model, tokens, cuts),
    }
    sides = {}
    for name, make in makers.items():
        own_model = copy.deepcopy(model)
        own_run = make(own_model)
        torch.testing.assert_close(own_run(tokens), model(tokens))
        sides[name] = functools.partial(_time, own_run, own_model, tokens)
    return in_turn(sides, rounds, f"running width {width}, {stages} stages")


def _time(run: Callable[[Tensor], Tensor], holder: nn.Module, tokens: Tensor) -> float:
    def steps(count: int) -> None:
        for _ in range(count):
            holder.zero_grad(set_to_none=True)
            next_token_loss(run(tokens), tokens).backward()

    steps(1)  # brings this side's memory back to the caches, where a loop of its own would have it
    return seconds(lambda: steps(STEPS_A_ROUND)) / STEPS_A_ROUND


def _row(case: str, name: str, times: Times) -> list[str]:
    ratios = (median_ratio(times[name], times[other]) for other in (UNCUT, UPSTREAM))
    return [f"{case}: {name}", milliseconds(times[name]), *(f"{ratio:.3f}" for ratio in ratios)]


def _goals(cases: dict[str, Times]) -> Iterator[Goal]:
    for case, times in cases.items():
        yield Goal(f"{case}: pipecut, of uncut", median_ratio(times[OURS], times[UNCUT]), 1.05)
