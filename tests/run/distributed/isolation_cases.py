"""Ranks that use what others hold, past the trace: each function runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import PipeError, Schedule1F1B, SplitPoint, pipeline
from tests.support.training import assert_same_gradients, gradients_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A linear layer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(x))
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4))).double()


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=numbers).double(), torch.randn(6, 4, generator=numbers).double()


def penalty(parameters: Any) -> Any:
    return 0.1 * sum(each.pow(2).sum() for each in parameters)


def regularises_all(model: nn.Sequential) -> Loss:
    """The loss_fn of the last stage asks for all parameters of the model."""
    return lambda output, target: F.mse_loss(output, target) + penalty(model.parameters())


def hook_with_a_weight(model: nn.Sequential) -> Loss:
    """A hook in the second stage computes with a weight of the first."""
    model[3].linear.register_forward_hook(lambda module, args, output: output + model[0].linear.weight.sum())
    return F.mse_loss


def hook_that_writes(model: nn.Sequential) -> Loss:
    """A hook in the second stage counts in a buffer of the first."""
    model[3].linear.register_forward_hook(lambda module, args, output: model[1].calls.add_(1) and None)
    return F.mse_loss


def hook_with_a_backward(model: nn.Sequential) -> Loss:
    """A hook on a gradient in the second stage has a backward of its own, which no graph of the step shows."""

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        with torch.enable_grad():
            model[0].linear.bias.pow(2).sum().backward()

    model[3].linear.register_full_backward_hook(hook)
    return F.mse_loss


def loss_of_a_list(model: nn.Sequential) -> Loss:
    """A hook in the first stage collects what the loss_fn of the last one adds."""
    collected: list[Tensor] = []
    model[0].linear.register_forward_hook(lambda module, args, output: collected.append(output.pow(2).mean()))
    return lambda output, target: F.mse_loss(output, target) + (collected.pop() if collected else 0.0)


class Counting(nn.Module):
    """A layer that scales by how often its counter was asked."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(4, 4).double(), counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        out: Tensor = self.linear(x) * self.counts["calls"]
        return out


COUNTS = {"calls": 0}


class CountingTogether(Counting):
    """A layer whose counter all layers of its kind share."""

    def __init__(self) -> None:
        super().__init__({"calls": 0})

    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        out: Tensor = self.linear(x) * COUNTS["calls"]
        return out


def layers_that_share_a_count(model: nn.Sequential) -> Loss:
    """The count of the first stage does not reach the second."""
    model[0], model[3] = CountingTogether(), CountingTogether()
    return F.mse_loss


def layers_that_count_alone(rank: int) -> None:
    """The remedy: each layer has a count of its own, and the model trains as the uncut one."""
    model, reference = net(), net()
    for each in (model, reference):
        each[0], each[3] = Counting({"calls": 0}), Counting({"calls": 0})
        for layer in (each[0], each[3]):
            torch.nn.init.constant_(layer.linear.weight, 0.5)
            torch.nn.init.zeros_(layer.linear.bias)
    _, step, module = schedule_of(rank, model, F.mse_loss)
    step()
    x, y = batch()
    for part in range(2):
        (F.mse_loss(reference(x[3 * part : 3 * part + 3]), y[3 * part : 3 * part + 3]) / 2).backward()
    whole = gradients_of(reference)
    assert_same_gradients(gradients_of(module), {name: whole[name] for name in gradients_of(module)}, 1e-10)


MAKERS = (
    regularises_all,
    hook_with_a_weight,
    hook_that_writes,
    hook_with_a_backward,
    loss_of_a_list,
    layers_that_share_a_count,
)
CASES = {each.__name__: each for each in MAKERS}


def schedule_of(rank: int, model: nn.Sequential, loss_fn: Loss, group: Any = None) -> tuple[Schedule1F1B, Any, Any]:
    """Two stages, this rank's step, and its module."""
    x, y = batch()
    pipe = pipeline(model, (x[:3],), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, "cpu", group)
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_fn)
    call = {"target": y} if rank else {}
    return schedule, lambda: schedule.step(*(() if rank else (x,)), **call), stage.submod


def every_leak(rank: int) -> dict[str, str]:
    """The error of each case on this rank, each in a process group of its own, which it breaks."""
    found = {}
    for name, case in CASES.items():
        model = net()
        _, step, _ = schedule_of(rank, model, case(model), dist.new_group([0, 1]))
        try:
            step()
        except PipeError as error:
            found[name] = str(error)
    return found


def adds_a_loss(rank: int) -> None:
    """The remedy: three steps of an optimizer beside the uncut model with the regularisation of all parameters."""
    model, reference = net(), net()
    schedule, step, module = schedule_of(rank, model, F.mse_loss)
    schedule.add_loss(lambda parameters: penalty(parameters.values()))
    x, y = batch()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, reference)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = F.mse_loss(reference(x), y) + penalty(reference.parameters())
        expected.backward()
        step()
        assert abs(schedule.mean_loss() - expected.item()) < 1e-10
        whole = gradients_of(reference)
        assert_same_gradients(gradients_of(module), {name: whole[name] for name in gradients_of(module)}, 1e-10)
        for optimizer in optimizers:
            optimizer.step()


def adds_a_loss_on_one_rank(rank: int) -> str:
    schedule, step, _ = schedule_of(rank, net(), F.mse_loss, dist.new_group([0, 1]))
    if rank:
        schedule.add_loss(lambda parameters: penalty(parameters.values()))
    try:
        step()
    except PipeError as error:
        return str(error)
    return ""


def replaced_and_switched(rank: int) -> dict[str, str]:
    """Return the errors of both ranks for changes that one of them makes after the cut."""
    found = {}
    for name in ("replaced", "switched"):
        model = net()
        _, step, _ = schedule_of(rank, model, F.mse_loss, dist.new_group([0, 1]))
        if rank == 1 and name == "replaced":
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
        elif rank == 1:
            model.eval()
        try:
            step()
        except PipeError as error:
            found[name] = str(error)
    return found
