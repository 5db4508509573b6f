"""verify() with every stage in memory of its own finds what works in one process and not on separate ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, SplitPoint, pipeline
from pipecut.errors import IsolationError
from pipecut.verification.report import Verification
from pipecut.verification.verify import verify
from tests.run.distributed.isolation_cases import CASES, batch, net, penalty

mse = nn.functional.mse_loss
COLLECTED: list[Tensor] = []
COUNT = 0

Loss = Callable[[Tensor, Tensor], Tensor]


def checked(model: nn.Module, loss_fn: Loss, **options: Any) -> Verification:
    x, y = batch()
    cut = {"2": SplitPoint.BEGINNING}
    return verify(pipeline(model, (x[:3],), split_spec=cut), model, (x,), y, loss_fn, check=False, **options)


def names(found: Verification, what: str) -> list[str]:
    return sorted(each.name for each in found.wrong if each.what == what)


def hook_after(module: Any, function: Callable[[Tensor], Tensor | None]) -> None:
    module.linear.register_forward_hook(lambda _, args, output: function(output))


def test_a_model_without_side_channels() -> None:
    model = net()
    model[3].linear.weight = model[0].linear.weight  # tied
    found = checked(model, mse)
    assert found.ok, found
    assert {"weight", "second loss", "second output"} <= {each.what for each in found.differences}
    assert "every stage in memory of its own" in found.title


@pytest.mark.parametrize("name", ["regularises_all", "hook_with_a_weight", "hook_with_a_backward", "hook_that_writes"])
def test_what_ranks_refuse_is_named(name: str) -> None:
    model = net()
    loss_fn = CASES[name](model)
    found = checked(model, loss_fn)
    expected = {
        "regularises_all": [f"{layer}.linear.{part}" for layer in (0, 1) for part in ("bias", "weight")],
        "hook_with_a_weight": ["0.linear.weight"],
        "hook_with_a_backward": ["0.linear.bias"],
        "hook_that_writes": ["1.calls"],
    }
    assert names(found, "leak") == expected[name]
    text = str(found)
    assert "in stage 1, which does not reach stage 0" in text
    assert "note: stage 1 uses " in text
    assert "at isolation_cases.py:" in text
    assert "schedule.add_loss()" in text
    together = checked(model, loss_fn, isolated=False)
    assert not names(together, "leak")


def test_a_value_that_is_read_and_never_updated() -> None:
    """No gradient is lost: the second step differs, since only the stage that holds the weight has trained it."""
    model = net()
    hook_after(model[3], lambda output: output + model[0].linear.weight.detach().sum())
    found = checked(model, mse)
    assert not names(found, "gradient")
    assert names(found, "second loss") == ["second loss"]
    assert "stage 1 uses 0.linear.weight (of stage 0) at test_isolated.py:" in str(found)
    assert checked(model, mse, isolated=False).ok


def collects_in_a_closure(model: nn.Sequential) -> Loss:
    log: list[Tensor] = []
    hook_after(model[0], lambda output: log.append(output.pow(2).mean()))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + log.pop() if log else mse(output, target)

    return loss_fn


def collects_in_a_module(model: nn.Sequential) -> Loss:
    hook_after(model[0], lambda output: COLLECTED.append(output.detach().pow(2).mean()))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) * (1 + COLLECTED.pop() if COLLECTED else 1)

    return loss_fn


def counts_in_a_variable(model: nn.Sequential) -> Loss:
    def count(output: Tensor) -> None:
        global COUNT
        COUNT += 1

    hook_after(model[0], count)
    return lambda output, target: mse(output, target) * (2 if COUNT else 1)


class Scale:
    """A number that a hook sets and another reads, of the class and of an object."""

    of_all = 1.0

    def __init__(self) -> None:
        self.own = 1.0


def hands_over_in_an_object(model: nn.Sequential) -> Loss:
    scale = Scale()
    hook_after(model[0], lambda output: setattr(scale, "own", output.pow(2).mean().item()))
    hook_after(model[3], lambda output: output * scale.own)
    return mse


def hands_over_in_a_class(model: nn.Sequential) -> Loss:
    hook_after(model[0], lambda output: setattr(Scale, "of_all", 3.0))
    hook_after(model[3], lambda output: output * Scale.of_all)
    return mse


CHANNELS = {
    "'log' of ": collects_in_a_closure,
    "'COLLECTED' in tests.verification.test_isolated": collects_in_a_module,
    "tests.verification.test_isolated is one": counts_in_a_variable,
    "'scale' of ": hands_over_in_an_object,
    "class Scale is one": hands_over_in_a_class,
}


@pytest.mark.parametrize("told", CHANNELS, ids=[each.__name__ for each in CHANNELS.values()])
def test_channels_of_python(told: str) -> None:
    """Each gave the loss of the uncut model in one process, and another one on ranks, without a word."""
    model = net()
    loss_fn = CHANNELS[told](model)
    found = checked(model, loss_fn, n_microbatches=1)
    assert names(found, "loss") == ["loss"], found
    assert told in str(found)
    assert "on separate ranks each has its own" in str(found)
    assert (COLLECTED, COUNT, Scale.of_all) == ([], 0, 1.0)


def test_a_loss_that_finds_nothing() -> None:
    model = net()
    log: list[Tensor] = []
    hook_after(model[0], log.append)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = mse(output, target) + torch.stack([each.mean() for each in log]).mean()
        log.clear()
        return loss

    with pytest.raises(IsolationError, match="non-empty TensorList(.|\n)*'log' of (.|\n)*isolated=False"):
        checked(model, loss_fn)
    assert log == []


def test_what_nobody_reads_does_no_harm() -> None:
    model, log = net(), list[float]()
    for layer in model:
        hook_after(layer, lambda output: log.append(output.mean().item()))
    found = checked(model, mse)
    assert found.ok, found
    assert log == []


def test_everything_is_as_before() -> None:
    model = net()
    model[1].eval()
    model[0].table = torch.ones(2)
    log = [torch.zeros(2)]

    def note(output: Tensor) -> None:
        log[0].add_(1)
        log.append(output)
        model[0].table.mul_(2)
        model[0].seen = random.random() + numpy.random.rand() + torch.rand(()).item()

    hook_after(model[3], note)
    model(batch()[0]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = copy.deepcopy((model.state_dict(), log[0], model[0].table, model[0].seen, len(log)))
    states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
    checked(model, mse)
    after = (model.state_dict(), log[0], model[0].table, model[0].seen, len(log))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert [part.training for part in model] == [True, False, True, True]
    assert (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()) == states


@pytest.mark.parametrize("declared", [True, False])
def test_a_parameter_of_two_stages_cut_by_hand(declared: bool) -> None:
    """In one process they share it anyway; on ranks only a declared tie is summed."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).double()
    layers[1].weight = layers[0].weight
    stages = [PipelineStage(layer, index, 2, "cpu") for index, layer in enumerate(layers)]
    x, y = batch()
    options: Any = {"ties": [{0: "weight", 1: "weight"}]} if declared else {}
    assert verify(stages, layers, (x,), y, mse, check=False, isolated=False, **options).ok
    found = verify(stages, layers, (x,), y, mse, check=False, **options)
    assert found.ok is declared, found
    assert names(found, "gradient") == ([] if declared else ["0.weight", "0.weight"])


def test_stages_that_cannot_be_copied() -> None:
    model = net()
    model[0].linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    found = checked(model, mse)
    assert found.ok
    assert "0.linear.weight of stage 0 has a hook for accumulated gradients" in str(found)


def test_hooks_on_parameters_and_plain_tensors() -> None:
    """Copies have them too; a tensor that is a view of a weight is one of its copy."""
    model = net()
    model[0].linear.weight.register_hook(lambda gradient: gradient * 2)
    model[0].linear.row = model[0].linear.weight.detach()[0]
    hook_after(model[0], lambda output: output * model[0].linear.row.sum())
    found = checked(model, mse)
    assert found.ok, found


def test_a_regularisation_of_the_parameters_of_the_last_stage() -> None:
    model = net()
    found = checked(model, lambda output, target: mse(output, target) + penalty(model[3].parameters()))
    assert found.ok, found
