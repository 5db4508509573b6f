"""What a plan says of the memory between the halves of a backward, beside what is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import PipelineStage
from pipecut.planning.costs import DeferralRule, pending_bytes
from pipecut.planning.measure import checkpoint_forward
from pipecut.split.chain import chain_of

WIDTH = 768


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


@pytest.mark.parametrize(("rows", "at_once"), [(512, False), (1, True)])
def test_what_a_microbatch_keeps_between_the_halves(rows: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put off gradients keep what they will be made of, twice the activations here; it was taken to be once."""
    if at_once:
        monkeypatch.setattr("pipecut.stage.backward.weights._MICROSECONDS_PER_MATRIX", 1e9)
    net, x = nn.Sequential(Block(), Block(), Block()), torch.ones(rows, WIDTH)
    pipe = pipecut.pipeline(net, (x,), split_spec={"0": pipecut.SplitPoint.END, "1": pipecut.SplitPoint.END})
    chain = chain_of(pipe.traced)
    cuts = [number for number, place in enumerate(chain.places, 1) if place.depth == 0]
    cost = chain.stage_costs(cuts)[1]
    assert DeferralRule(chain).holds(*[*cuts, len(chain.times)][:2]) == at_once
    # What the stage was called with, and the gradient that came, were there before.
    there_before = 0 if at_once else 2 * x.nbytes
    expected = pending_bytes(cost, at_once) - there_before
    assert kept_between_halves(pipe.build_stage(1, "cpu"), rows) == pytest.approx(expected, rel=0.02, abs=64)


def test_what_is_computed_again_cannot_be_put_off() -> None:
    """The gradients of the weights are made along with those of the inputs, and nothing is kept."""
    net, x = nn.Sequential(Block(), Block(), Block()), torch.ones(512, WIDTH)
    found = pipecut.plan(
        net, x, ranks=3, batch=512 * 3, microbatch=512, schedules=["ZB-H1"], recompute=True, time_budget=0.0,
        machine=pipecut.Machine.nominal("cpu"),
    )  # fmt: skip
    stage = found.pipe().build_stage(1, "cpu")
    checkpoint_forward(stage.submod)
    kept = kept_between_halves(stage, 512)
    freed = found.report.costs.memory_backward_weight
    assert isinstance(freed, tuple)
    assert (kept, freed[1]) == (pytest.approx(0, abs=64), 0)


def kept_between_halves(stage: PipelineStage, rows: int) -> float:
    """The bytes that a forward and the first half of its backward leave, besides the gradients that are given back."""
    for each in stage.submod.parameters():
        each.grad = torch.zeros_like(each)  # from the microbatches before
    value, gradient = torch.randn(rows, WIDTH, requires_grad=True), torch.ones(rows, WIDTH)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        stage.forward(0, [value], {}, training=True)
        given_back = stage.backward(0, [gradient], weights=False)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return sum(changes) - sum(each.nbytes for each in given_back if each is not None)
