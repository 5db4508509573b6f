"""Whatever fits some memory fits more than that, and the least that would do does."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import PlanError, TrainingPlan
from pipecut.planning.candidate import make_candidate
from pipecut.planning.choices import TRAINING, Choice
from pipecut.planning.lean_cut import leanest_cut
from pipecut.planning.rank_memory import RankMemory
from pipecut.planning.stages import Stages
from pipecut.schedule import simulate
from pipecut.split.chain import Chain
from pipecut.split.chain_maker import chain_of
from pipecut.split.costs.machine import Machine

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


CASES = [
    ("equal", "ZB-H2", False),
    ("tied", "1F1B", False),
    ("tied", "ZBVZeroBubble", True),
    ("widening", "GPipe", True),
    ("widening", "ZB-H1", False),
]


@pytest.mark.parametrize(("name", "schedule", "recompute"), CASES)
def test_more_memory_never_fits_less(name: str, schedule: str, recompute: bool) -> None:
    """A cut that did not fit was made again four times with less, and others that fit were missed: 104975 bytes were
    enough for a plan, 111150 were not, and the error said that 123.5 kB were the least."""
    options: dict[str, Any] = {"schedules": [schedule], "recompute": recompute}
    said = least_of(name, 1000, **options)
    found = fitted(name, said, **options)
    least = max(found.memory)
    assert least_of(name, 0.8 * least, **options) == least_of(name, 0.999 * least, **options) == said
    times = []
    for factor in (1.0, 1.02, 1.06, 1.13, 1.2, 1.3, 1.5):
        plan = fitted(name, factor * least * (1 + 1e-12), **options)
        assert max(plan.memory) <= factor * least * (1 + 1e-9)
        times.append(plan.step_time)
    assert fitted(name, None, **options).step_time <= min(times) * (1 + 1e-9)


def chain(name: str) -> Chain:
    make, example = MODELS[name]
    return chain_of(pipecut.pipeline(make(), (example,)).traced, MACHINE)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("limits", [(1.0, 1.0), (1.0, 3.0)])
def test_no_cut_is_much_leaner_than_the_leanest(name: str, limits: tuple[float, float]) -> None:
    blocks = chain(name)
    for recompute, schedule in itertools.product((False, True), ("GPipe", "1F1B", "ZB-H1", "ZB-H2", "ZBVZeroBubble")):
        plan = Choice(schedule, 4, 6, recompute).plan(2)
        memory = RankMemory(plan, Stages(blocks, recompute))

        def share(cuts: Any, memory: RankMemory = memory) -> float:
            return max(need / limit for need, limit in zip(memory.needs(cuts), limits, strict=True))

        count = memory.stages.blocks.count
        everywhere = [*itertools.combinations(range(1, count), plan.stages - 1)]
        found = leanest_cut(memory, limits, everywhere[0])
        assert share(found) <= 1.01 * min(map(share, everywhere)), (schedule, recompute)


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_without_a_simulation_is_that_of_the_simulator(schedule: str, recompute: bool) -> None:
    stages = Stages(chain("tied"), recompute)
    choice = Choice(schedule, 4, 8, recompute)
    candidate = make_candidate(choice, stages, 2, None, None)
    memory = RankMemory(candidate.plan, stages)
    cuts = stages.cuts_of(candidate.cut.plan)
    peaks = simulate(candidate.plan, candidate.report.costs).peak_memory
    assert memory.needs(cuts) == pytest.approx(
        [kept + peak for kept, peak in zip(memory.kept(cuts), peaks, strict=True)]
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
        ({}, "Use more ranks, or a smaller microbatch."),
        ({"microbatch": [1, 4]}, "Use more ranks."),
        ({"recompute": False}, "Use more ranks, or a smaller microbatch, or recompute='auto'."),
        ({"recompute": False, "microbatch": 1}, "Use more ranks, or recompute='auto'."),
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
