"""What a plan says of the memory between the halves of a backward, beside what is there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut.planning.deferral import pending_bytes, stages_that_hold
from pipecut.split.chain_maker import chain_of

WIDTH = 768


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


@pytest.mark.parametrize(("rows", "holds"), [(512, False), (1, True)])
def test_what_a_microbatch_keeps_between_the_halves(rows: int, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put off gradients keep what they will be made of, twice the activations here; it was taken to be once."""
    if holds:
        monkeypatch.setattr("pipecut.stage.backward.worth._MICROSECONDS_A_MATRIX", 1e9)
    net, x = nn.Sequential(Block(), Block(), Block()), torch.ones(rows, WIDTH)
    pipe = pipecut.pipeline(net, (x,), split_spec={"0": pipecut.SplitPoint.END, "1": pipecut.SplitPoint.END})
    chain = chain_of(pipe.traced)
    cuts = [number for number, place in enumerate(chain.places, 1) if place.depth == 0]
    cost = chain.stage_costs(cuts)[1]
    assert stages_that_hold(chain, cuts)[1] == holds
    stage = pipe.build_stage(1, "cpu")
    value, gradient = torch.randn(rows, WIDTH, requires_grad=True), torch.ones(rows, WIDTH)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        stage.forward(0, [value], {}, training=True)
        given_back = stage.backward(0, [gradient], weights=False)
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    kept = sum(changes) - sum(each.nbytes for each in given_back if each is not None)
    # What the stage was called with, and the gradient that came, were there before.
    there_before = 0 if holds else value.nbytes + gradient.nbytes
    assert kept == pytest.approx(pending_bytes(cost, holds) - there_before, rel=0.02)
