"""Whatever fits some memory fits more than that, and the least that would do does."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import PlanError, TrainingPlan
from pipecut.errors import TooLittleMemoryError
from pipecut.planning.candidate import Candidate, _least_memory_cut, _RankMemory, make_candidate
from pipecut.planning.choices import TRAINING, Choice
from pipecut.planning.costs import StageCosts
from pipecut.planning.replicas import Layout
from pipecut.schedule import simulate
from pipecut.split.chain import Chain, chain_of
from pipecut.split.cost.machine import Machine
from tests.support.sampling import sampled

MACHINE = Machine.nominal("cpu")


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self, width: int = 24, layers: int = 6) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.head(x)  # type: ignore[no-any-return]


class Widening(nn.Module):
    """Stages send, keep and work on other amounts, wherever they begin."""

    def __init__(self) -> None:
        super().__init__()
        widths = [8, 64, 16, 96, 8, 40, 8]
        self.layers = nn.Sequential(*(nn.Linear(one, other) for one, other in itertools.pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Any, Tensor]] = {
    "tied": (Tied, torch.zeros(2, 5, dtype=torch.long)),
    "equal": (lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))), torch.ones(4, 32)),
    "widening": (Widening, torch.ones(16, 8)),
}


def fitted(name: str, memory: Any, **options: Any) -> TrainingPlan:
    make, example = MODELS[name]
    options = {"ranks": 2, "batch": 16, "microbatch": 4, "machine": MACHINE, "time_budget": 0.0} | options
    return pipecut.plan(make(), example, memory=memory, **options)


def least_of(name: str, memory: Any, **options: Any) -> str:
    """The amount that the error says."""
    with pytest.raises(PlanError) as caught:
        fitted(name, memory, **options)
    return re.search(r"the least that would do is about ([0-9.]+ k?B)\.", str(caught.value))[1]  # type: ignore[index]


def test_the_amount_that_is_said_does_and_so_does_more() -> None:
    """A cut that did not fit was made again four times with less, and others that fit were missed: 104975 bytes were
    enough for a plan, 111150 were not, and the error said that 123.5 kB were the least."""
    options: dict[str, Any] = {"schedules": ["ZB-H2"], "recompute": False}
    said = least_of("equal", "70 kB", **options)
    assert max(fitted("equal", said, **options).memory) <= 1e3 * float(said.removesuffix(" kB"))
    assert max(fitted("equal", 111150, **options).memory) <= 111150


@functools.cache
def chain(name: str) -> Chain:
    make, example = MODELS[name]
    return chain_of(pipecut.pipeline(make(), (example,)).traced, MACHINE)


@pytest.mark.parametrize("name", sampled(list(MODELS), lambda name: name == "tied"))
@pytest.mark.parametrize(
    ("schedule", "recompute", "proportions"),
    [
        ("1F1B", False, (1.0, 1.0)),
        ("GPipe", True, (1.0, 2.0)),
        ("ZB-H2", False, (1.0, 1.0)),
        ("ZBVZeroBubble", True, (1.0, 1.0)),
    ],
)
def test_more_memory_never_fits_less(
    name: str, schedule: str, recompute: bool, proportions: tuple[float, float]
) -> None:
    stages, choice = StageCosts(chain(name), recompute), Choice(schedule, 4, 6, recompute, Layout(2))

    def cut_for(factor: float) -> Candidate:
        return make_candidate(choice, stages, None, [factor * each for each in proportions])

    with pytest.raises(TooLittleMemoryError) as caught:
        cut_for(1000.0)
    least = max(need / part for need, part in zip(caught.value.needs, proportions, strict=True))
    for factor in (0.5, 0.999):
        with pytest.raises(TooLittleMemoryError) as again:
            cut_for(factor * least)
        assert again.value.needs == caught.value.needs
    for factor in (1.0, 1.02, 1.1, 1.3):
        found = cut_for(factor * least)
        for need, part in zip(found.memory, proportions, strict=True):
            assert need <= factor * least * part * (1 + 1e-9)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("limits", [(1.0, 1.0), (1.0, 3.0)])
def test_no_cut_is_much_leaner_than_the_leanest(name: str, limits: tuple[float, float]) -> None:
    for recompute, schedule in itertools.product((False, True), ("GPipe", "1F1B", "ZB-H1", "ZB-H2", "ZBVZeroBubble")):
        plan = Choice(schedule, 4, 6, recompute, Layout(2)).plan()
        memory = _RankMemory(plan, StageCosts(chain(name), recompute))

        def share(cuts: Any, memory: _RankMemory = memory) -> float:
            return max(need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True))

        count = memory.stages.blocks.count
        everywhere = [*itertools.combinations(range(1, count), plan.stages - 1)]
        found = _least_memory_cut(memory, limits, everywhere[0])
        assert share(found) <= 1.01 * min(map(share, everywhere)), (schedule, recompute)


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_without_a_simulation_is_that_of_the_simulator(schedule: str, recompute: bool) -> None:
    stages = StageCosts(chain("tied"), recompute)
    choice = Choice(schedule, 4, 8, recompute, Layout(2))
    candidate = make_candidate(choice, stages, None, None)
    memory = _RankMemory(candidate.plan, stages)
    cuts = stages.cuts_of(candidate.cut.plan)
    peaks = simulate(candidate.plan, candidate.report.costs).peak_memory
    assert memory.needs(cuts) == pytest.approx(
        [constant + peak for constant, peak in zip(memory.constant(cuts), peaks, strict=True)]
    )


def test_what_a_rank_has_and_needs_is_said_of_each() -> None:
    with pytest.raises(
        PlanError,
        match=r"^Nothing fits memory=\[1 kB, 1 GB\]: rank 0 has 1 kB, and needs about ([\d.]+ kB) at the least. Use ",
    ) as caught:
        fitted("equal", [1000, 10**9], schedules=["1F1B"])
    least = re.search(r"about ([\d.]+ kB)", str(caught.value))[1]  # type: ignore[index]
    assert fitted("equal", [least, "1GB"], schedules=["1F1B"]).memory[0] > 1000


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        ({"microbatch": [1, 4]}, "Use more ranks."),
        ({"recompute": False}, "Use more ranks, or a smaller microbatch, or recompute='auto'."),
    ],
)
def test_only_what_was_not_tried_is_advised(options: dict[str, Any], remedies: str) -> None:
    """recompute='auto' was advised where it was 'auto', and smaller microbatches than 1."""
    with pytest.raises(PlanError, match=rf"^Nothing fits memory=1 kB on each rank: .*B\. {re.escape(remedies)}$"):
        fitted("equal", "1kB", schedules=["1F1B"], **options)


def test_recomputation_is_not_advised_where_it_is_impossible() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)))
    with pytest.raises(PlanError, match=r"Use more ranks, or a smaller microbatch\.$"):
        pipecut.plan(
            net, torch.ones(4, 8), ranks=2, batch=16, microbatch=4, recompute=False, memory="1kB", machine=MACHINE
        )
