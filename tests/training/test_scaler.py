"""GradScaler of a pipeline: torch's scaler on the uncut model, and all ranks skip a step or none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import GradScaler, Schedule1F1B, StepError, clip_grad_norm_, get_total_norm, pipeline
from pipecut.errors import InputError
from tests.run.distributed.test_failures import assert_all_fail, outcomes
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training import scaler_cases as cases

SCALES = [4096.0, 8192.0, 4096.0, 4096.0, 8192.0, 8192.0]  # one step overflows; two good ones double the scale


@pytest.mark.parametrize(("clips", "fused"), [(False, False), (True, False), (False, True), (True, True)])
def test_trains_as_the_uncut_model_with_the_scaler_of_torch(clips: bool, fused: bool) -> None:
    assert cases.trains_as_uncut(None, clips=clips, fused=fused) == SCALES


def trains_on_rank(rank: int) -> list[float]:
    return cases.trains_as_uncut(rank, clips=True, fused=False)


def trains_on_rank_by_a_fused_optimizer(rank: int) -> list[float]:
    return cases.trains_as_uncut(rank, clips=False, fused=True)


@pytest.mark.distributed
@pytest.mark.parametrize("train", [trains_on_rank, trains_on_rank_by_a_fused_optimizer])
def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks: Ranks, train: Any) -> None:
    assert two_ranks.run(train) == [SCALES, SCALES]


@pytest.mark.distributed
def test_a_rank_with_nothing_to_train(two_ranks: Ranks) -> None:
    assert two_ranks.run(cases.has_nothing_to_train) == [2.0**15, 2.0**15]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", sampled(["fully_shard", "TP"], lambda kind: kind == "TP"))
def test_an_overflow_in_one_shard_or_part(four_ranks: Ranks, kind: str) -> None:
    assert four_ranks.run(cases.overflows_in_one_part, kind, 3) == [(2.0**15, True)] * 4


@pytest.mark.distributed
def test_an_error_on_one_rank_is_one_on_all(two_ranks: Ranks) -> None:
    for told in two_ranks.run(cases.fails_on_one):
        assert told.startswith("StepError: the step failed: rank 1 failed in unscale_() or step() of GradScaler: ")
        assert "Attempting to unscale FP16 gradients" in told


def test_clipping_before_all_optimizers_are_unscaled() -> None:
    """Whatever one of two optimizers had unscaled, the norm was taken, with the gradients of the other times 65536."""
    schedule = cases.scheduled(cases.Net())
    scaler = GradScaler(schedule)
    named = dict(schedule.named_parameters())
    weights, biases = ([value for name, value in named.items() if kind in name] for kind in ("weight", "bias"))
    first, second = cases.sgd(weights), cases.sgd(biases)
    cases.step(schedule)
    scaler.unscale_(first)
    biases_named = "the optimizer of first.0.bias, first.2.bias, last.0.bias, last.2.bias"
    told = f"multiplied by the scale of the GradScaler, 65536: call scaler.unscale_({biases_named}) before"
    with pytest.raises(InputError, match=re.escape(told)):
        clip_grad_norm_(schedule, 1.0)
    clip_grad_norm_(schedule, 1.0, parameters=weights)
    scaler.unscale_(second)
    clip_grad_norm_(schedule, 1.0)
    fused = torch.optim.SGD(weights, lr=0.0, fused=True)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    cases.step(schedule)
    scaler.step(fused)  # which is given the scale, and need not change the gradients
    with pytest.raises(InputError, match="multiplied by the scale of the GradScaler"):
        clip_grad_norm_(schedule, 1.0)


@pytest.mark.distributed
def test_clipping_before_the_optimizers_of_a_rank_are_unscaled(two_ranks: Ranks) -> None:
    for told in two_ranks.run(cases.leaves_an_optimizer_scaled):
        assert told.startswith("StepError: the step failed: rank 1 failed in clip_grad_norm_(): ")
        assert "call scaler.unscale_(the optimizer of last.0.bias, last.2.bias) before clip_grad_norm_()" in told


@pytest.mark.distributed
def test_scales_that_differ() -> None:
    told = "the scalers of the ranks have different scales: 256.0, 512.0 on ranks 0 to 1, and"
    assert_all_fail(outcomes(2, cases.has_another_scale), "DisagreementError", told, "load the same state_dict()")


@pytest.mark.distributed
def test_a_rank_without_autocast_is_an_error_on_all() -> None:
    told = "this schedule has a GradScaler, which is for float16, and torch.autocast is off here: call step() under"
    assert_all_fail(outcomes(2, cases.has_no_autocast_on_one), "StepError", "rank 1 failed", told)


def test_reported_losses_are_not_scaled_and_added_losses_are_unscaled_with_the_rest() -> None:
    class WithLoss(cases.Net):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            return {"loss": output.float().square().mean(), "output": output}

    model = WithLoss()
    pipe = cases.cut(model)
    grads = []
    for init_scale in (1.0, 2.0**10):
        schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2)
        schedule.add_loss(lambda named: sum(each.square().sum() for each in named.values()))
        scaler = GradScaler(schedule, init_scale=init_scale)
        optimizer = torch.optim.SGD(schedule.parameters(), lr=0.0)
        losses: list[torch.Tensor] = []
        with cases.half():
            output = schedule.step(cases.X, losses=losses)
            schedule.eval(cases.X)
        assert output["loss"].item() == pytest.approx(sum(each.item() for each in losses) / 2)
        assert output["loss"] < 10
        scaler.unscale_(optimizer)
        grads.append([each.grad.clone() for each in schedule.parameters()])  # type: ignore[union-attr]
        optimizer.zero_grad()
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-3)  # of float16


def test_a_scaler_needs_autocast_around_the_step_or_inside_the_model() -> None:
    model = cases.Net()
    schedule = Schedule1F1B(cases.scheduled(model).stages, 2, cases.loss_fn)
    scaler = GradScaler(schedule)
    told = r'torch.autocast is off here: call step\(\) under torch.autocast\("cpu", torch.float16\) on every rank; make'
    with pytest.raises((StepError, InputError), match=told):
        schedule.step(cases.X, target=cases.Y)
    cases.step(schedule)  # the first remedy
    scaler.step(cases.sgd(schedule.parameters()))
    for remedy in ({"enabled": False}, {"check_autocast": False}):
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        pipe = pipeline(plain, (cases.X,), num_stages=2)
        schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, cases.loss_fn)
        scaler = GradScaler(schedule, **remedy)  # type: ignore[arg-type]
        schedule.step(cases.X, target=cases.Y)
        before = plain[0].weight.detach().clone()
        scaler.step(cases.sgd(schedule.parameters()))
        scaler.update()
        assert not torch.equal(plain[0].weight, before)
        assert scaler.get_scale() == (1.0 if "enabled" in remedy else 2.0**16)


def test_calls_that_do_not_work() -> None:
    for wrong in ((), ("cpu",)):
        with pytest.raises(
            InputError, match=r"takes the schedule whose loss it scales, and got .*: GradScaler\(schedule"
        ):
            GradScaler(*wrong)  # type: ignore[arg-type]
    schedule = cases.scheduled(cases.Net())
    old = GradScaler(schedule)
    scaler = GradScaler(schedule)
    optimizer = cases.sgd(schedule.parameters())
    with pytest.raises(
        InputError, match=re.escape("leave scaler.scale(loss).backward() out, and call schedule.step()")
    ):
        scaler.scale(torch.ones(()))
    cases.step(schedule)
    with pytest.raises(InputError, match=r"step\(\) of a GradScaler whose schedule has got another one since"):
        old.step(optimizer)
    told = r"multiplied by the scale of the GradScaler, 65536: call scaler.unscale_\(optimizer\) before {}\(\)"
    with pytest.raises(InputError, match=told.format("clip_grad_norm_")):
        clip_grad_norm_(schedule, 1.0)
    with pytest.raises(InputError, match=told.format("get_total_norm")):
        get_total_norm(schedule)
    scaler.unscale_(optimizer)
    clip_grad_norm_(schedule, 1.0)
    del schedule
    with pytest.raises(InputError, match="the schedule of this GradScaler is gone"):
        scaler.step(optimizer)


def test_a_state_goes_from_the_scaler_of_torch_to_that_of_a_pipeline_and_back() -> None:
    schedule = cases.scheduled(cases.Net())
    scaler, theirs = GradScaler(schedule), torch.amp.GradScaler("cpu", init_scale=2.0**5, growth_interval=7)
    scaler.load_state_dict(theirs.state_dict())
    cases.step(schedule)
    assert scaler.get_scale() == 2.0**5
    scaler.step(cases.sgd(schedule.parameters()))
    scaler.update()
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict()["_growth_tracker"] == 1
