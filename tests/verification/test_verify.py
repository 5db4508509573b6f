"""verify() tells whether stages compute what the model computes, and leaves everything as it was."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecut import InputError, PipeError, PipelineStage, SplitPoint, pipeline
from pipecut.launcher import launch
from pipecut.schedule import plan_for, schedule_names
from pipecut.verification.report import (
    Difference,
    Tolerance,
    Verification,
    VerificationError,
    by_badness,
    compare_tensors,
    compare_values,
    tolerance_for,
)
from pipecut.verification.runs import SavedState
from pipecut.verification.verify import verify
from tests.support.limits import WORK
from tests.support.sampling import sampled

mse = nn.functional.mse_loss


class Net(nn.Module):
    """Four layers, of which the last is the first once more, and a skip over the middle."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        value = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first)))) + first
        out: Tensor = self.layers[3](value)
        return out


SPLIT = {f"layers.{layer}": SplitPoint.BEGINNING for layer in (1, 2, 3)}
NAMES = {"layers.0.weight", *(f"layers.{layer}.{part}" for layer in (1, 2) for part in ("weight", "bias"))}
NAMES |= {"layers.0.bias", "layers.3.bias"}


def batch(rows: int = 10, width: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def chain(layers: int = 4, width: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def stages_of(modules: Any) -> list[PipelineStage]:
    return [PipelineStage(module, index, len(modules), "cpu") for index, module in enumerate(modules)]


def gradients_in(found: Verification) -> set[str]:
    return {difference.name for difference in found.differences if difference.what == "gradient"}


# ------------------------------------------------------------------ all is well


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "ForwardOnly"])
def test_a_pipe_is_as_the_model_in_every_schedule(schedule: str) -> None:
    model, (x, y) = Net().double(), batch()
    x, y = x.double(), y.double()
    pipe = pipeline(model, (x,), split_spec=SPLIT)
    found = verify(pipe, model, (x,), target=y, loss_fn=mse, schedule=schedule)
    assert found.ok
    assert gradients_in(found) == NAMES  # the tied weight once, the unused ones not at all
    first, later = {"loss", "gradient norm", "output", "gradient"}, {"weight", "second loss", "second output"}
    assert {difference.what for difference in found.differences} == first | later
    loss = next(difference for difference in found.differences if difference.what == "loss")
    assert loss.values is not None
    assert loss.values[1] == mse(model(x), y).item()
    norm = next(difference for difference in found.differences if difference.what == "gradient norm")
    mse(model(x), y).backward()
    expected = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
    assert norm.values == pytest.approx((expected, expected), rel=1e-12)


def test_everything_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    x, y = torch.randn(8, 4, requires_grad=True), torch.randn(8, 2)
    pipe = pipeline(model, (x,), split_spec={"3": SplitPoint.BEGINNING})
    model[0].weight.grad = torch.full((4, 4), 7.0)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    verify(pipe, model, (x,), target=y, loss_fn=mse, n_microbatches=1)
    assert {name: parameter.grad for name, parameter in model.named_parameters()} == gradients
    assert torch.equal(gradients["0.weight"], torch.full((4, 4), 7.0))  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None
    assert model.training


def test_a_run_that_fails_leaves_everything_too() -> None:
    model, (x, y) = chain(2), batch()
    weight = model[0][0].weight
    weight.grad = torch.ones_like(weight)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        if len(output) < len(x):
            raise ValueError("no microbatches, please")
        return mse(output, target)

    with pytest.raises(PipeError, match="no microbatches, please"):
        verify(stages_of(model), model, (x,), target=y, loss_fn=broken)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert model[1][0].weight.grad is None


def test_a_module_keeps_its_buffers_when_a_forward_replaces_them() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x

    module = Counts()
    buffer = module.count
    kept = SavedState([module])
    module(torch.ones(1))
    assert module.count.item() == 1
    kept.restore()
    assert module.count is buffer
    assert module.count.item() == 0


def test_without_a_loss_the_outputs_are_compared() -> None:
    model, (x, _) = Net(), batch()
    for schedule in ("1F1B", "ForwardOnly"):
        found = verify(pipeline(model, (x,), split_spec=SPLIT), model, (x,), schedule=schedule)
        assert [difference.what for difference in found.differences] == ["output"]
        assert found.notes == ("without a loss_fn the backward pass is not compared",)


def test_gradients_of_arguments_are_compared() -> None:
    model, (x, y) = chain(2), batch()
    x.requires_grad_()
    found = verify(stages_of(model), model, (x,), target=y, loss_fn=mse)
    assert [each.name for each in found.differences if each.what == "input gradient"] == ["args[0]"]
    assert x.grad is None


def test_frozen_parameters_have_no_gradient_in_both() -> None:
    model, (x, y) = Net(), batch()
    model.layers[1].requires_grad_(False)
    found = verify(pipeline(model, (x,), split_spec=SPLIT), model, (x,), target=y, loss_fn=mse)
    assert gradients_in(found) == NAMES - {"layers.1.weight", "layers.1.bias"}


def test_nested_outputs_are_compared_leaf_by_leaf() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.second(self.first(x))
            return {"logits": logits, "best": logits.argmax(-1)}

    model, x = Two(), torch.randn(6, 3)
    pipe = pipeline(model, (x,), split_spec={"second": SplitPoint.BEGINNING})
    found = verify(pipe, model, (x,), target=x, loss_fn=lambda out, target: mse(out["logits"], target))
    names = {difference.name for difference in found.differences if difference.what == "output"}
    assert names == {"output['logits']", "output['best']"}


def test_the_number_of_microbatches_follows_the_batch() -> None:
    model, (x, y) = chain(4), batch(rows=3)
    assert "microbatches=3, in one process" in verify(stages_of(model), model, (x,), target=y, loss_fn=mse).title
    x, y = batch(rows=20)
    assert "stages=4, ranks=4, microbatches=8," in verify(stages_of(model), model, (x,), target=y, loss_fn=mse).title


def test_a_plan_and_a_class_are_schedules_too() -> None:
    from pipecut import ScheduleInterleaved1F1B

    model, (x, y) = chain(4), batch()
    plan = plan_for("GPipe", ranks=4, microbatches=3)
    assert "by GPipe with" in verify(stages_of(model), model, (x,), target=y, loss_fn=mse, schedule=plan).title
    found = verify(stages_of(model), model, (x,), y, mse, ScheduleInterleaved1F1B, 4, 2)
    assert "by Interleaved1F1B with stages=4, ranks=2, microbatches=4" in found.title


def test_target_and_loss_follow_the_arguments() -> None:
    model, (x, y) = chain(4), batch()
    found = verify(stages_of(model), model, (x,), y, mse, schedule="ZB-H1")
    assert "by ZB-H1 with" in found.title
    assert gradients_in(found) == {name for name, _ in model.named_parameters()}


def test_keyword_arguments_and_options_go_where_they_belong() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.second(self.first(x) * extra["mask"])
            return out

    def weighted(output: Tensor, target: Tensor, weight: float) -> Tensor:
        return weight * mse(output, target)

    model, (x, y) = Masked(), batch()
    mask = torch.rand(10, 6, requires_grad=True)
    pipe = pipeline(model, (x,), {"extra": {"mask": mask}}, split_spec={"second": SplitPoint.BEGINNING})
    call = {"args": (x,), "kwargs": {"extra": {"mask": mask}}, "target": y, "loss_fn": weighted}
    found = verify(pipe, model, **call, loss_kwargs={"weight": 3.0})  # type: ignore[arg-type]
    loss = next(each for each in found.differences if each.what == "loss")
    assert loss.values is not None
    assert loss.values[1] == (3 * mse(model(x, {"mask": mask}), y)).item()
    assert [each.name for each in found.differences if each.what == "input gradient"] == ["extra['mask']"]


def test_the_model_may_be_a_copy_of_the_one_that_was_cut() -> None:
    model, (x, y) = Net(), batch()
    pipe = pipeline(model, (x,), split_spec=SPLIT)
    uncut = copy.deepcopy(model)
    assert gradients_in(verify(pipe, uncut, (x,), target=y, loss_fn=mse)) == NAMES
    assert all(parameter.grad is None for net in (model, uncut) for parameter in net.parameters())


def test_the_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    """A shift of all features does not change what LayerNorm gives: its gradient is what rounding leaves of it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.shift

    model, (x, y) = nn.Sequential(nn.Sequential(Shifted(), nn.LayerNorm(6)), nn.Linear(6, 6)), batch(rows=40)
    found = verify(stages_of(model), model, (x,), target=y, loss_fn=mse)
    shift = next(difference for difference in found.differences if difference.name == "0.0.shift")
    mse(model(x), y).backward()
    gradient = abs(float(model[0][0].shift.grad))
    assert 0 < gradient < 1e-6  # rounding
    assert shift.magnitude > 1e4 * gradient  # that of the weight beside it
    assert shift.ok


# ------------------------------------------------------------------ something is wrong


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is a little too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.001


class Faulty(nn.Module):
    """A layer of the model that is not used as in the model."""

    def __init__(self, layer: nn.Module, fault: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self.layer, x)


def with_fault(model: nn.Sequential, stage: int, fault: Callable[[Any, Tensor], Tensor]) -> list[PipelineStage]:
    return stages_of([Faulty(layer, fault) if index == stage else layer for index, layer in enumerate(model)])


def test_wrong_gradients_are_found_and_named() -> None:
    model, (x, y) = chain(3), batch()
    stages = with_fault(model, 1, lambda layer, value: layer(Scaled.apply(value)))
    with pytest.raises(VerificationError) as caught:
        verify(stages, model, (x,), target=y, loss_fn=mse)
    found = caught.value.verification
    assert {difference.name for difference in found.wrong} - {"gradient norm"} == {"0.0.weight", "0.0.bias"}
    wrong = next(difference for difference in found.wrong if difference.name == "0.0.weight")
    assert (wrong.stage, wrong.what) == (0, "gradient")
    assert wrong.relative == pytest.approx(1e-3, rel=0.05)
    message = str(caught.value)
    assert message.startswith("the stages do not compute what the model computes.\nSequential by 1F1B with stages=3, ")
    assert "of 17 differ\nloss: " in message
    assert "tolerance: 1e-05 of the largest element, for float32" in message
    assert "note: with n_microbatches=1 the stages see the whole batch: if they agree then, " in message
    assert verify(stages, model, (x,), target=y, loss_fn=mse, check=False) == found
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    assert verify(stages, model, (x,), target=y, loss_fn=mse, rtol=0.01).ok


def test_wrong_values_are_found() -> None:
    model, (x, y) = chain(3), batch()
    stages = with_fault(model, 2, lambda layer, value: layer(value) + 0.01)
    found = verify(stages, model, (x,), target=y, loss_fn=mse, check=False)
    assert {"loss", "output"} <= {difference.what for difference in found.wrong}


def test_a_missing_gradient_is_named() -> None:
    model, (x, y) = chain(2), batch()

    def forget(layer: Any, value: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(value, layer[0].weight, layer[0].bias.detach()))

    found = verify(with_fault(model, 1, forget), model, (x,), target=y, loss_fn=mse, check=False)
    assert found.missing == ("1.0.bias",)
    assert "gradient       1.0.bias             1  missing: the uncut model has one" in str(found)


def test_a_parameter_that_no_stage_holds_is_missing() -> None:
    model, (x, y) = chain(3), batch()
    found = verify(stages_of([model[0], model[1]]), model, (x,), target=y, loss_fn=mse, check=False)
    assert found.missing == ("2.0.weight", "2.0.bias")


def test_a_tie_that_is_not_summed_is_found_in_both_stages() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)), batch()
    model[1].weight = model[0].weight
    stages = stages_of([copy.deepcopy(layer) for layer in model])
    names = {(0, "weight"): "0.weight", (1, "weight"): "1.weight"}
    found = verify(
        stages, model, (x,), target=y, loss_fn=mse, check=False, names=lambda stage, name: names[stage, name]
    )
    wrong = {(each.name, each.stage) for each in found.wrong if each.what == "gradient"}
    assert wrong == {("0.weight", 0), ("0.weight", 1)}


def test_an_extra_gradient_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.spare = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out

    model, (x, y) = nn.Sequential(nn.Linear(6, 6), Half()), batch()
    stages = with_fault(model, 1, lambda half, value: half(value) + 0 * half.spare)
    found = verify(stages, model, (x,), target=y, loss_fn=mse, check=False)
    assert found.extra == ("1.spare",)
    assert "1  extra: the uncut model has none" in str(found)


def test_a_sum_as_loss_is_recognised() -> None:
    model, (x, y) = chain(2), batch(rows=8)

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    found = verify(stages_of(model), model, (x,), target=y, loss_fn=summed, n_microbatches=4, check=False)
    assert found.notes == (
        "the loss of the uncut model is 4 times that of the stages, with 4 microbatches: if loss_fn sums over the "
        "samples, pass scale_grads=False to verify() and to the schedule",
    )
    assert verify(stages_of(model), model, (x,), target=y, loss_fn=summed, scale_grads=False).ok


# ------------------------------------------------------------------ what microbatches change


def with_dropout() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3)))


def test_dropout_draws_what_the_stages_draw() -> None:
    """Whoever has dropout had to verify in eval mode, and saw nothing of the dropout."""
    model, (x, y) = with_dropout(), batch()
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    for options in ({}, {"isolated": False}, {"n_microbatches": 1}, {"random_numbers": "as_uncut"}):
        found = verify(pipe, model, (x,), target=y, loss_fn=mse, **options)  # type: ignore[arg-type]
        assert found.notes == ()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) * len(output)

    found = verify(pipe, model, (x,), target=y, loss_fn=summed, n_microbatches=4, check=False)
    assert "if loss_fn sums over the samples, pass scale_grads=False" in found.notes[0]  # a loss of the whole batch


def test_dropout_is_told_apart() -> None:
    model, (x, y) = with_dropout(), batch()
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    found = verify(pipe, model, (x,), target=y, loss_fn=mse, random_numbers="per_process", check=False)
    assert not found.ok
    assert found.notes == (
        "the model draws random numbers (dropout in training mode?), and the stages draw others: call eval() on the "
        "model and on the stages, or pass n_microbatches=1",
    )
    few = {"n_microbatches": 1, "random_numbers": "per_process"}
    assert verify(pipe, model, (x,), target=y, loss_fn=mse, **few).notes == ()  # type: ignore[arg-type]
    model.eval()
    pipe.eval()
    assert verify(pipe, model, (x,), target=y, loss_fn=mse).notes == ()


def test_batch_normalisation_is_told_apart() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)), batch()
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    found = verify(pipe, model, (x,), target=y, loss_fn=mse, n_microbatches=2, check=False)
    assert not found.ok
    assert found.notes == (
        "'1' normalise by the batch, and have 2 microbatches instead of it: call eval() on the model and on the "
        "stages, or pass n_microbatches=1",
        "buffers that are updated in every microbatch are not compared: '1.running_mean', '1.running_var', "
        "'1.num_batches_tracked'",
    )
    assert "buffer" not in {difference.what for difference in found.differences}
    found = verify(pipe, model, (x,), target=y, loss_fn=mse, n_microbatches=1)
    buffers = {difference.name for difference in found.differences if difference.what == "buffer"}
    assert (buffers, found.notes) == ({"1.running_mean", "1.running_var", "1.num_batches_tracked"}, ())
    model.eval()
    pipe.eval()
    assert verify(pipe, model, (x,), target=y, loss_fn=mse).notes == ()


def test_a_wrong_buffer_is_found() -> None:
    model, (x, y) = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)), batch()

    def twice(layer: nn.Module, value: Tensor) -> Tensor:
        layer(value)
        out: Tensor = layer(value)
        return out

    stages = with_fault(model, 0, twice)
    found = verify(stages, model, (x,), target=y, loss_fn=mse, n_microbatches=1, check=False)
    assert {difference.name for difference in found.wrong} == {
        "0.running_mean",
        "0.running_var",
        "0.num_batches_tracked",
    }
    assert "buffer  0.num_batches_tracked         1 of 1 elements differ" in str(found)


# ------------------------------------------------------------------ which parameter is which


def test_copies_under_the_same_names_are_the_models() -> None:
    class Part(nn.Module):
        def __init__(self, net: nn.Sequential, index: int) -> None:
            super().__init__()
            self.add_module(str(index), net[index])
            self.index = str(index)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.get_submodule(self.index)(x)
            return out

    model, (x, y) = chain(2), batch()
    copied = copy.deepcopy(model)
    stages = stages_of([Part(copied, 0), Part(copied, 1)])
    found = verify(stages, model, (x,), target=y, loss_fn=mse)
    assert gradients_in(found) == {"0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"}


@pytest.mark.parametrize("wrapped", ["copy", "model"])
def test_wrapped_parts_of_copies_have_the_names_of_the_models(wrapped: str) -> None:
    """torch.compile puts `_orig_mod` into the middle of a name, which names no parameter of the other."""
    model, (x, y) = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), batch()
    copied = copy.deepcopy(model)
    changed = copied if wrapped == "copy" else model
    changed[0] = nn.Sequential(*(torch.compile(layer, backend="eager") for layer in changed[0]))
    names = {name for name, _ in model.named_parameters()}
    found = verify(stages_of([copied]), model, (x,), target=y, loss_fn=mse, n_microbatches=1)
    assert gradients_in(found) == names
    buffers = {difference.name for difference in found.differences if difference.what == "buffer"}
    assert buffers == {name for name, _ in model.named_buffers()}


def test_copies_under_other_names_need_a_function() -> None:
    model, (x, y) = chain(2), batch()
    copies = copy.deepcopy(model)
    with pytest.raises(InputError) as caught:
        verify(stages_of(copies), model, (x,), target=y, loss_fn=mse)
    assert str(caught.value) == (
        "the parameters of the stages are not those of the model:\n"
        "  stage 0: '0.weight' is not a parameter of Sequential, nor is there one named '0.weight'\n"
        "  stage 0: '0.bias' is not a parameter of Sequential, nor is there one named '0.bias'\n"
        "  stage 1: '0.weight' is not a parameter of Sequential, nor is there one named '0.weight'\n"
        "  stage 1: '0.bias' is not a parameter of Sequential, nor is there one named '0.bias'\n"
        "Give verify() the model that the stages are made of. If they hold copies under other names, pass names=, a "
        "function of (stage index, name in the stage) that gives the name in the model"
    )
    found = verify(stages_of(copies), model, (x,), target=y, loss_fn=mse, names=lambda stage, name: f"{stage}.{name}")
    assert gradients_in(found) == {"0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"}


def test_a_parameter_is_not_taken_for_another_of_the_same_name() -> None:
    """Copies of the halves of a Sequential are numbered from 0 again."""
    model, (x, y) = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), batch()
    halves = copy.deepcopy([model[:2], nn.Sequential(*model[2:])])
    with pytest.raises(InputError) as caught:
        verify(stages_of(halves), model, (x,), target=y, loss_fn=mse)
    assert "\n  stage 1: '0.weight' has other values than '0.weight' of the model\n" in str(caught.value)
    assert "stage 0" not in str(caught.value)


def test_another_shape_is_refused_and_long_lists_are_cut() -> None:
    model, (x, y) = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), batch()
    other = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    with pytest.raises(InputError) as caught:
        verify(stages_of([other]), model, (x,), target=y, loss_fn=mse)
    assert "\n  stage 0: '0.weight' is [5, 5], and '0.weight' of the model is [6, 6]\n" in str(caught.value)
    assert "\n  and 2 more\n" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "net"}, r"verify\(\) compares with the uncut model, an nn.Module, got str"),
        ({"pipe_or_stages": 3}, r"verify\(\) takes a Pipe or a list of PipelineStages, got int: see pipeline\(\)"),
        ({"pipe_or_stages": [nn.Linear(1, 1)]}, "a list of PipelineStages, got Linear: see"),
        (
            {"args": torch.ones(1)},
            r"args must be a tuple of positional arguments, got Tensor; for a single one write \(x,\)",
        ),
        ({"target": None}, r"verify\(\) got a loss_fn and no target: pass target=, the second argument of loss_fn"),
        ({"ranks": 3}, "4 stages cannot be put evenly on 3 ranks: cut the model into a multiple of 3"),
        (
            {"schedule": "ForwardOnly"},
            "ForwardOnly has no backward pass: leave out loss_fn, and the outputs are compared",
        ),
        (
            {"schedule": plan_for("1F1B", ranks=4, microbatches=2), "n_microbatches": 3},
            "=3, and the plan has 2: leave it",
        ),
        (
            {"loss_fn": lambda out, _: out},
            r"loss_fn returned a tensor of shape \[10, 6\] for the uncut model; it must return",
        ),
        ({"loss_fn": lambda out, _: 1.0}, "loss_fn returned float for the uncut model"),
        (
            {"loss_fn": lambda out, _: out.sum() / 0},
            "the loss of the uncut model is -?inf: there is nothing to compare with",
        ),
        (
            {"loss_fn": torch.ones(10, 6)},
            r"a function of \(output, target\), got Tensor: the order is verify\(pipe, model, args, target, loss_fn\), "
            "and keyword arguments of the model are passed as kwargs=",
        ),
        ({"rtol": -1}, "rtol must be a number of at least 0, or None, got -1"),
        ({"atol": "small"}, "atol must be a number of at least 0, or None, got 'small'"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    model, (x, y) = chain(4), batch()
    given = {"pipe_or_stages": stages_of(model), "model": model, "args": (x,), "target": y, "loss_fn": mse}
    with pytest.raises(InputError, match=message):
        verify(**(given | change))


def test_a_pipe_is_not_the_model() -> None:
    model, (x, y) = chain(2), batch()
    pipe = pipeline(model, (x,), num_stages=2)
    with pytest.raises(InputError, match="got Pipe: pass the model that it was made from"):
        verify(pipe, pipe, (x,), target=y, loss_fn=mse)  # type: ignore[arg-type]


def test_in_one_process_all_stages_are_needed() -> None:
    model, (x, y) = chain(4), batch()
    with pytest.raises(InputError) as caught:
        verify(stages_of(model)[1], model, (x,), target=y, loss_fn=mse)
    assert str(caught.value) == (
        "in one process verify() needs all 4 stages, and did not get [0, 2, 3]: pass them all, or call it on every "
        "rank (under torchrun, or in a function that launch() runs) with the stages of that rank"
    )


# ------------------------------------------------------------------ on ranks


def ranks_agree(results: list[Verification]) -> Verification:
    assert len(results) == 2
    assert str(results[0]) == str(results[1])
    assert results[0].differences == results[1].differences
    return results[0]


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", sampled(["1F1B", "ZBVZeroBubble"], lambda name: name == "1F1B"))
def test_a_pipe_on_ranks(schedule: str) -> None:
    split = SPLIT if schedule == "ZBVZeroBubble" else {"layers.2": SplitPoint.BEGINNING}

    def on_a_rank() -> Verification:
        torch.manual_seed(0)
        model, (x, y) = Net(), batch()
        pipe = pipeline(model, (x,), split_spec=split)
        return verify(pipe, model, (x.requires_grad_(),), target=y, loss_fn=mse, schedule=schedule)

    found = ranks_agree(launch(on_a_rank, 2, timeout=WORK))
    assert found.ok
    assert gradients_in(found) == NAMES
    assert [each.what for each in found.differences].count("loss") == 1
    assert [each.name for each in found.differences if each.what == "input gradient"] == ["args[0]"]
    norm = next(each for each in found.differences if each.what == "gradient norm")
    assert norm.ok  # the tied weight, which both ranks hold, counts once
    assert found.title == f"Net by {schedule} with stages={len(split) + 1}, ranks=2, microbatches=4"


@pytest.mark.distributed
def test_each_rank_takes_its_own_of_all_stages() -> None:
    def on_a_rank(stages: list[int]) -> Verification | str:
        torch.manual_seed(0)
        model, (x, y) = chain(2), batch()
        made = stages_of(model)
        try:
            return verify([made[index] for index in stages], model, (x,), target=y, loss_fn=mse)
        except InputError as error:
            return str(error)

    first, second = launch(on_a_rank, 2, [0, 1], timeout=WORK)
    assert isinstance(first, Verification)
    assert isinstance(second, Verification)
    assert gradients_in(ranks_agree([first, second])) == {"0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"}
    # A rank without its stage finds out before it meets the others.
    (message,) = launch(lambda: [on_a_rank([1 - dist.get_rank()])], 2, timeout=WORK)[0]
    assert message == "this rank holds stages [0] in the plan, and verify() did not get [0]"


@pytest.mark.distributed
def test_a_fault_of_one_rank_is_raised_on_all() -> None:
    def on_a_rank() -> str:
        torch.manual_seed(0)
        model, (x, y) = chain(2), batch()
        stages = with_fault(model, 1, lambda layer, value: layer(Scaled.apply(value)))
        try:
            verify(stages[dist.get_rank()], model, (x,), target=y, loss_fn=mse)
        except VerificationError as error:
            return str(error)
        return "nothing is wrong"

    first, second = launch(on_a_rank, 2, timeout=WORK)
    assert first == second
    assert "gradient       0.0.weight" in first


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["parameters of the model", "arguments", "target", "stages"])
def test_ranks_that_do_not_verify_the_same_are_refused(what: str) -> None:
    def on_a_rank() -> str:
        rank = dist.get_rank()
        torch.manual_seed(rank if what == "parameters of the model" else 0)
        model = chain(2)
        torch.manual_seed(rank if what == "arguments" else 0)
        x = torch.randn(8, 6)
        torch.manual_seed(rank if what == "target" else 0)
        y = torch.randn(8, 6)
        module = copy.deepcopy(model[rank]) if what == "stages" and rank == 1 else model[rank]
        try:
            verify(PipelineStage(module, rank, 2, "cpu"), model, (x,), target=y, loss_fn=mse)
        except InputError as error:
            return str(error)
        return "nothing is wrong"

    first, second = launch(on_a_rank, 2, timeout=WORK)
    assert first == second
    if what == "stages":
        assert first.startswith(
            "on rank 1, the parameters of the stages are not those of the model:\n  stage 1: '0.wei"
        )
    else:
        assert first == (
            f"the {what} on rank 1 are not those on rank 0, and every rank compares with the uncut model: make them in "
            "the same way on all ranks, after the same torch.manual_seed()"
        )


@pytest.mark.distributed
def test_on_ranks_one_microbatch_does_not_help_against_random_numbers() -> None:
    def on_a_rank() -> tuple[str, ...]:
        torch.manual_seed(0)
        model, (x, y) = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))), batch()
        stage = stages_of(model)[dist.get_rank()]
        return verify(stage, model, (x,), target=y, loss_fn=mse, n_microbatches=1, check=False).notes

    first, second = launch(on_a_rank, 2, timeout=WORK)
    assert first == second
    assert first[0].endswith("and the stages draw others: call eval() on the model and on the stages")


@pytest.mark.slow
@pytest.mark.distributed
def test_dropout_on_ranks() -> None:
    """Each rank has random numbers of its own, and compares with the uncut model by those of the stages."""

    def on_a_rank() -> bool:
        torch.manual_seed(0)
        model, (x, y) = with_dropout(), batch()
        pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
        torch.manual_seed(dist.get_rank())
        return verify(pipe, model, (x,), target=y, loss_fn=mse).ok

    assert launch(on_a_rank, 2, timeout=WORK) == [True, True]


# ------------------------------------------------------------------ numbers and text

EXACT = Tolerance(1e-3, 0.0, "for a test")


def difference(cut: list[float], uncut: list[float], magnitude: float | None = None) -> Difference:
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (cut, uncut))
    return compare_tensors("gradient", "w", *tensors, EXACT, magnitude)  # type: ignore[misc]


def test_differences_are_measured_by_the_largest_element() -> None:
    found = difference([10.0, 0.25], [10.0, 0.5])
    assert (found.off_by, found.magnitude, found.relative, found.allowed, found.ok) == (0.25, 10.0, 0.025, 0.01, False)
    assert difference([10.0, 0.505], [10.0, 0.5]).ok
    assert difference([1e-9], [0.0], magnitude=1.0).ok  # rounding, beside gradients of 1
    assert not difference([1e-9], [0.0]).ok


@pytest.mark.parametrize(
    ("cut", "uncut", "off_by"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], 0.0),
        ([math.nan], [1.0], math.inf),
        ([1.0], [math.nan], math.inf),
        ([math.inf], [math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([math.inf, 2.0], [math.inf, 1.0], 1.0),
        ([], [], 0.0),
    ],
)
def test_infinities_and_nans_are_equal_in_the_same_places_only(
    cut: list[float], uncut: list[float], off_by: float
) -> None:
    found = difference(cut, uncut)
    assert (found.off_by, found.ok) == (off_by, off_by == 0.0)


def test_other_kinds_of_tensors_are_compared() -> None:
    def compare(cut: Tensor, uncut: Tensor) -> Difference:
        return compare_tensors("output", "y", cut, uncut, EXACT)

    assert compare(torch.ones(2), torch.ones(3)).fault == "is float32[2], and float32[3] uncut"
    assert compare(torch.ones(2), torch.ones(2).double()).fault == "is float32[2], and float64[2] uncut"
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])).fault == "1 of 2 elements differ"
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 2])).ok
    assert compare(torch.ones(2).half(), torch.full((2,), 1.001).half()).ok
    assert not compare(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])).ok
    sparse = torch.eye(2).to_sparse()
    assert compare(sparse, sparse).ok
    assert compare(sparse, 2 * sparse).off_by == 1


def test_other_structures_and_values_are_faults() -> None:
    def compare(cut: Any, uncut: Any) -> list[str]:
        return [each.fault for each in compare_values("output", cut, uncut, EXACT)]

    assert compare((1, 2), (1,)) == ["has a tuple of 2 values, and a tuple of 1 value uncut"]
    assert compare({"a": "x", "b": None}, {"a": "y", "b": None}) == ["is 'x', and 'y' uncut"]
    assert compare([torch.ones(1)], [1.0]) == ["is tensor([1.]), and 1.0 uncut"]


def test_the_tolerance_is_that_of_the_shortest_dtype() -> None:
    def relative(*dtypes: torch.dtype) -> float:
        return tolerance_for(dtypes, "cpu", None, None).rtol

    assert relative(torch.float64) == 1e-11
    assert relative(torch.float64, torch.float32, torch.int64) == 1e-5
    assert relative(torch.float32, torch.float16) == 1e-2
    assert relative(torch.float16, torch.bfloat16) == 5e-2
    assert relative(torch.float8_e4m3fn) == 0.2
    assert relative() == 1e-5  # the default dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(torch.float32) == 5e-2
    given = tolerance_for([torch.float32], "cpu", 0.5, 2)
    assert (given.allowed(10.0), str(given)) == (7.0, "0.5 of the largest element, as asked for")


def test_the_tolerance_follows_the_precision_of_products() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = tolerance_for([torch.float32], "cpu", None, None)
    finally:
        torch.set_float32_matmul_precision(before)
    assert str(found) == "0.01 of the largest element, for float32 with 'high' matmul precision"


def test_the_table() -> None:
    differences = by_badness(
        [
            Difference("gradient", "a.weight", 1e-7, 0.5, 5e-6, stage=0),
            Difference("loss", "loss", 2e-7, 2.0, 2e-5, values=(2.0, 2.0000002)),
            Difference("gradient", "b.weight", 0.25, 0.5, 5e-6, stage=1),
            Difference("gradient", "c", fault="missing: the uncut model has one"),
        ]
    )
    assert [each.name for each in differences] == ["c", "b.weight", "a.weight", "loss"]
    found = Verification("Net by 1F1B", differences, ("think of it",), "1e-05 of the largest element, for float32")
    assert str(found) == repr(found)
    assert str(found) == (
        "Net by 1F1B: 2 of 4 differ\n"
        "loss: 2, uncut 2\n"
        "            the worst first  stage  off by  relative  allowed\n"
        "  gradient  c                       missing: the uncut model has one\n"
        "  gradient  b.weight             1    0.25       0.5    1e-05\n"
        "tolerance: 1e-05 of the largest element, for float32\n"
        "note: think of it"
    )
    assert (found.ok, found.missing, found.extra) == (False, ("c",), ())
    with pytest.raises(VerificationError, match="the stages do not compute what the model computes"):
        found.raise_if_wrong()


def test_the_table_of_a_success_shows_the_worst() -> None:
    differences = [Difference("gradient", f"w{n}", n * 1e-8, 1.0, 1e-5, stage=0) for n in range(12)]
    lines = str(Verification("Net", by_badness(differences), (), "some")).splitlines()
    assert lines[0] == "Net: all 12 as in the uncut model"
    assert lines[2].split() == ["gradient", "w11", "0", "1.1e-07", "1.1e-07", "1e-05"]
    assert lines[-2:] == ["  and 4 more, none of them worse", "tolerance: some"]
