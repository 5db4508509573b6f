"""Stages that use what others hold: allowed in one process, not on separate ranks, and asked for in one process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Schedule1F1B, SplitPoint, pipeline
from pipecut.errors import IsolationError
from tests.run.distributed.isolation_cases import CASES, batch, net
from tests.support.training import Problem, assert_same_gradients, assert_trains_as_uncut, gradients_of


def schedule_of(model: nn.Module, loss_fn: object, cut: str = "2") -> Schedule1F1B:
    pipe = pipeline(model, (batch()[0][:3],), split_spec={cut: SplitPoint.BEGINNING})
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, loss_fn)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["regularises_all", "hook_with_a_weight"])
def test_a_step_that_would_not_work_on_ranks(name: str) -> None:
    model = net()
    schedule, (x, y) = schedule_of(model, CASES[name](model)), batch()
    schedule.step(x, target=y)
    schedule.check_isolation()
    with pytest.raises(RuntimeError, match=r"stage 1 uses 0.linear.weight \(of stage 0\) at isolation_cases.py:"):
        schedule.step(x, target=y)


class Hidden:
    """An object whose attributes nobody looks at, as one that is written in C."""

    __slots__ = ("weight",)
    weight: Tensor


@pytest.mark.parametrize(("user", "told"), [(3, "the loss of stage 1"), (1, "an output of stage 0")])
def test_a_weight_that_graphs_show(user: int, told: str) -> None:
    """Whatever way a stage has to a weight: the graph of its output leads there."""
    model, hidden = net(), Hidden()
    hidden.weight = model[0 if user == 3 else 3].linear.weight
    model[user].linear.register_forward_hook(lambda module, args, output: output + hidden.weight.sum())
    schedule, (x, y) = schedule_of(model, F.mse_loss), batch()
    schedule.check_isolation()
    with pytest.raises(RuntimeError, match=f"{told} depends on .*linear.weight .of stage.*, past the values"):
        schedule.step(x, target=y)


def test_a_value_of_a_later_stage() -> None:
    model = net()
    model[0].linear.register_forward_hook(lambda module, args, output: output * model[3].linear.bias.mean().detach())
    schedule, (x, y) = schedule_of(model, F.mse_loss), batch()
    schedule.check_isolation()
    with pytest.raises(RuntimeError, match=r"stage 0 uses 3.linear.bias \(of stage 1\) at test_isolation.py:"):
        schedule.step(x, target=y)


def test_both_in_one_stage() -> None:
    """A remedy that the message names."""
    model = net()
    weight = model[2].linear.weight
    model[3].linear.register_forward_hook(lambda module, args, output: output + weight.sum())
    schedule, (x, y) = schedule_of(model, F.mse_loss), batch()
    F.mse_loss(model(x), y).backward()
    expected = gradients_of(model)
    model.zero_grad()
    schedule.check_isolation()
    schedule.step(x, target=y)
    assert_same_gradients(gradients_of(model), expected, 1e-10)


class SharesInForward(nn.Module):
    """The weight of the first layer is used by the last one, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        out: Tensor = self.layers[2](x) + self.layers[0].linear.weight.sum()
        return out


def test_a_weight_that_the_forward_uses_in_two_stages() -> None:
    """A remedy that the message names: it is tied."""
    model = SharesInForward()
    schedule, (x, y) = schedule_of(model, F.mse_loss, "layers.2"), batch()
    schedule.check_isolation()
    assert_trains_as_uncut(schedule, Problem(model, (x,), y, F.mse_loss))


def test_parameters_of_one_flat_tensor() -> None:
    """Its own part of the memory is a stage's own, though a hook can reach the other part."""
    model = net()
    flat = torch.randn(2, 4, 4).double()
    for part, layer in zip(flat, (model[0], model[3]), strict=True):
        layer.linear.weight = nn.Parameter(part)
    model[3].linear.register_forward_hook(lambda module, args, output: output * len(model))
    schedule, (x, y) = schedule_of(model, F.mse_loss), batch()
    schedule.check_isolation()
    schedule.step(x, target=y)


class Trainer:
    """Keeps statistics of layers, a factor and a count of its losses; `told` is what a layer tells the loss."""

    def __init__(self, model: nn.Sequential) -> None:
        self.statistics: dict[str, float] = {}
        self.factor, self.losses, self.told = 0.5, 0, 1.0
        for name, layer in model.named_children():
            layer.register_forward_hook(self.hook(name))

    def hook(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.statistics.update({name: output.mean().item()})

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.losses += 1
        return self.factor * F.mse_loss(output, target)


def test_a_loss_and_hooks_of_one_object() -> None:
    """They share it, and not what they use of it: no reason for an error."""
    model = net()
    trainer = Trainer(model)
    schedule, (x, y) = schedule_of(model, trainer.loss), batch()
    schedule.check_isolation()
    schedule.step(x, target=y)
    assert trainer.losses == 2


def test_a_loss_that_is_told_by_a_hook() -> None:
    model = net()
    trainer = Trainer(model)
    model[0].register_forward_hook(lambda module, args, output: setattr(trainer, "factor", 2.0))
    schedule, (x, y) = schedule_of(model, trainer.loss), batch()
    schedule.check_isolation()
    with pytest.raises(RuntimeError, match="stage 0 changes 'factor' of loss_fn in 0F0, which loss_fn uses"):
        schedule.step(x, target=y)


class ReturnsWhatTheLossNeeds(nn.Module):
    """The output of a layer of the first stage is part of the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](first)), first


def test_what_the_loss_needs_is_returned() -> None:
    """A remedy that the message names."""
    model = ReturnsWhatTheLossNeeds()

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0], target) + output[1].pow(2).mean()

    schedule, (x, y) = schedule_of(model, loss_fn, "layers.2"), batch()
    schedule.check_isolation()
    assert_trains_as_uncut(schedule, Problem(model, (x,), y, loss_fn))


KEPT: list[Tensor] = []
STATISTICS = SimpleNamespace(mean=None, calls=0)


class Keeps(nn.Module):
    """Keeps something of its output for the loss: in a list, in an object, in an attribute of its own."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second, self.where = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), where
        self.own: list[Tensor] = KEPT
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        if self.where == "a list":
            KEPT.append(y.mean())
        elif self.where == "an object":
            STATISTICS.mean = y.mean()
        elif self.where == "a count":
            STATISTICS.calls += 1
        elif self.where == "its own list":
            self.own.append(y.mean())
        else:
            self.mean = y.mean()
        return y


def loss_by_list(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + sum(KEPT)


def loss_by_object(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * (1 if STATISTICS.mean is None else STATISTICS.mean + STATISTICS.calls)


CUT, COPIED = (
    "it is cut, and the generated code does not do that",
    "a stage runs a copy of that module, and changes the",
)
LEFT = {
    "a list": (loss_by_list, "'KEPT' in .*test_isolation, which the forward of Keeps changes: " + CUT),
    "an object": (loss_by_object, "'mean' of 'STATISTICS' in .*, which the forward of Keeps changes: " + CUT),
    "a count": (loss_by_object, "'calls' of 'STATISTICS' in .*, which the forward of Keeps changes: " + CUT),
    "its own list": (loss_by_list, "'KEPT' in .*, which the forward of Keeps changes: " + COPIED),
    "itself": (None, "'mean' of .*, which the forward of Keeps changes: " + COPIED),
}


@pytest.mark.parametrize("where", LEFT)
@pytest.mark.filterwarnings("ignore:the forward of")
def test_a_loss_that_uses_what_a_forward_keeps(where: str) -> None:
    """It found what was there before the trace, in every step: a regularisation by what layers collect was lost."""
    KEPT.clear()
    STATISTICS.mean, STATISTICS.calls = None, 0
    model, (x, y) = Keeps(where), batch()
    loss_fn, told = LEFT[where]
    if loss_fn is None:
        loss_fn = lambda output, target: F.mse_loss(output, target) + model.mean  # noqa: E731
    schedule = schedule_of(model, loss_fn, "second")
    for _ in range(2):
        with pytest.raises(IsolationError, match=f"loss_fn uses {told}.*Let the model return what loss_fn needs"):
            schedule.step(x, target=y)


@pytest.mark.filterwarnings("ignore:the forward of")
def test_what_a_forward_keeps_and_the_loss_does_not_use() -> None:
    """A cache, or a count for a log: no reason for an error."""
    model, (x, y) = Keeps("an object"), batch()
    assert_trains_as_uncut(schedule_of(model, F.mse_loss, "second"), Problem(model, (x,), y, F.mse_loss))


def test_a_loss_that_uses_what_a_hook_sets_in_the_model() -> None:
    """A hook gets the stage's copy of the module, and the loss looks at the model."""
    model, (x, y) = net(), batch()
    model[3].register_forward_hook(lambda module, args, output: setattr(module, "mean", output.mean()))
    schedule = schedule_of(model, lambda output, target: F.mse_loss(output, target) + getattr(model[3].mean, "real", 0))
    model[3].mean = None
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="stage 1 changes 'mean' of .* in 1F0, which loss_fn uses as that of the"
        ):
            schedule.step(x, target=y)


def test_a_model_that_is_gone_is_not_watched() -> None:
    schedule, (x, y) = schedule_of(net(), F.mse_loss), batch()
    schedule.check_isolation()
    schedule.step(x, target=y)
    assert torch.isfinite(torch.tensor(schedule.mean_loss()))
