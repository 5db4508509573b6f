"""Losses of parameters alone, added to those of the microbatches: as in the uncut model, under every schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipecut import InputError, PipelineStage, PlannedSchedule, Schedule1F1B, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.sampling import sampled
from tests.support.training import assert_same_gradients, gradients_of

SCHEDULES = [name for name in FAMILIES if name != "ForwardOnly"]
mse = nn.functional.mse_loss


def tied_net(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).double()
    model[-1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model


def penalty(parameters: dict[str, Tensor]) -> Tensor:
    """A regularisation that tells parameters apart by name, as decay of weights does."""
    return sum((len(name) * each.pow(2).sum() for name, each in parameters.items()), torch.zeros(()).double())


@pytest.mark.parametrize("name", sampled(SCHEDULES, lambda name: name in ("1F1B", "ZBVZeroBubble")))
@pytest.mark.parametrize("scaled", [True, False])
def test_a_regularisation_of_the_whole_model(name: str, scaled: bool) -> None:
    plan = plan_for(name, ranks=2, microbatches=4)
    model, reference = tied_net(plan.stages), tied_net(plan.stages)
    x, y = torch.randn(6, 4).double(), torch.randn(6, 4).double()
    pipe = pipeline(model, (x[:2],), num_stages=plan.stages)
    assert pipe.tied_parameters
    stages = [pipe.build_stage(index, "cpu") for index in range(plan.stages)]
    reduction = "mean" if scaled else "sum"
    schedule = PlannedSchedule(stages, plan, lambda a, b: mse(a, b, reduction=reduction), scale_grads=scaled)
    schedule.add_loss(penalty)
    schedule.add_loss(lambda parameters: sum(each.sum() for each in parameters.values()))
    for _ in range(2):  # steps add up
        named = dict(reference.named_parameters())
        expected = (
            mse(reference(x), y, reduction=reduction) + penalty(named) + sum(each.sum() for each in named.values())
        )
        expected.backward()
        schedule.step(x, target=y)
        assert abs(schedule.mean_loss() - expected.item()) < 1e-9 * expected.item()
    assert_same_gradients(gradients_of(model), gradients_of(reference), 1e-9)
    schedule.eval(x, target=y)
    assert abs(schedule.mean_loss() - mse(reference(x), y, reduction=reduction).item()) < 1e-9


def test_stages_without_parameters_and_ties_of_modules_cut_by_hand() -> None:
    model = tied_net(3)
    parts = [nn.Linear(4, 4).double(), nn.Tanh(), nn.Linear(4, 4).double()]
    parts[0].load_state_dict(model[0].state_dict())
    parts[2].load_state_dict(model[2].state_dict())
    stages = [PipelineStage(part, index, 3, "cpu") for index, part in enumerate(parts)]
    schedule = Schedule1F1B(stages, 2, mse, ties=[{0: "weight", 2: "weight"}])
    schedule.add_loss(lambda parameters: sum(each.pow(2).sum() for each in parameters.values()))
    x = torch.randn(4, 4).double()
    schedule.step(x, target=x)
    reference = nn.Sequential(model[0], nn.Tanh(), model[2])
    (mse(reference(x), x) + sum(each.pow(2).sum() for each in reference.parameters())).backward()
    for part, own in ((parts[0], model[0]), (parts[2], model[2])):
        assert_same_gradients(gradients_of(part), gradients_of(own), 1e-10)


def schedule_of() -> tuple[Schedule1F1B, Tensor]:
    x = torch.ones(4, 4).double()
    pipe = pipeline(tied_net(2), (x,), num_stages=2)
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, mse), x


def test_errors() -> None:
    schedule, x = schedule_of()
    with pytest.raises(InputError, match=r"add_loss\(\) takes a function of a dict of parameters.*got float"):
        schedule.add_loss(0.1)  # type: ignore[arg-type]
    schedule.add_loss(lambda parameters: parameters.get("0.weight", 0))
    with pytest.raises(
        RuntimeError, match=r"returned a tensor of shape \[4, 4\] for stage 0: it must return one number"
    ):
        schedule.step(x, target=x)
    with pytest.raises(InputError, match="add losses before the first step"):
        schedule.add_loss(penalty)
