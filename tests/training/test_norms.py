"""The norm of a pipeline's gradients, and clipping by it, beside torch.nn.utils on the uncut model: the same bits."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, Schedule1F1B, clip_grad_norm_, get_total_norm, pipeline
from pipecut.errors import InputError, NonFiniteNormError
from pipecut.run import PipelineSchedule
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training.exact_models import Case

QUICK, ALL = 6, 200


def clip(case: Case, schedule: PipelineSchedule) -> Tensor:
    return clip_grad_norm_(schedule, case.max_norm, case.norm_type, foreach=case.foreach)


def check_in_one_process(number: int) -> None:
    case = Case.random(number)
    schedule = case.schedule()
    schedule.step(case.x, target=case.target)
    case.step_uncut()
    case.check_gradients(schedule.stages)
    for _ in range(2):
        norm = get_total_norm(schedule, case.norm_type, foreach=case.foreach)
        clipped, expected = clip(case, schedule), case.expected()
        assert torch.equal(norm, clipped)
        assert torch.equal(clipped, expected), f"case {number}: {clipped} and {expected}"
        case.check_gradients(schedule.stages)
        case.change_gradients(schedule)


@pytest.mark.parametrize("number", range(QUICK))
def test_random_models_have_the_bits_of_the_uncut_ones(number: int) -> None:
    check_in_one_process(number)


@pytest.mark.slow
def test_many_random_models_have_the_bits_of_the_uncut_ones() -> None:
    for number in range(QUICK, ALL):
        check_in_one_process(number)


def check_on_ranks(rank: int, numbers: list[int]) -> list[float]:
    norms = []
    for number in numbers:
        case = Case.random(number, ranks=2)
        schedule = case.schedule(rank)
        schedule.step(*((case.x,) if rank == 0 else ()), **({"target": case.target} if rank else {}))
        case.step_uncut()
        case.check_gradients(schedule.stages)
        for _ in range(2):
            norm, expected = clip(case, schedule), case.expected()
            assert torch.equal(norm, expected), f"case {number}: {norm} and {expected}"
            case.check_gradients(schedule.stages)
            norms.append(norm.item())
            case.change_gradients(schedule)
    return norms


@pytest.mark.distributed
def test_random_models_on_ranks(two_ranks: Ranks) -> None:
    first, last = two_ranks.run(check_on_ranks, list(range(QUICK)))
    assert first == last


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("begin", sampled(range(QUICK, ALL, 20), lambda begin: begin < QUICK + 60, lambda begin: True))
def test_many_random_models_on_ranks(two_ranks: Ranks, begin: int) -> None:
    first, last = two_ranks.run(check_on_ranks, list(range(begin, min(begin + 20, ALL))))
    assert first == last


# Some parameters only, kinds of models, and what does not work.


class Tied(nn.Module):
    """A table that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(tokens)).tanh())  # type: ignore[no-any-return]


TOKENS = torch.arange(8).reshape(4, 2)


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def trained(model: nn.Module, *args: Tensor, stages: int = 3) -> Schedule1F1B:
    """A schedule after a step, and the gradients are those of the model."""
    pipe = pipeline(model, args, num_stages=stages)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(stages)], 2, mean_square)
    schedule.step(*args)
    return schedule


def grads_of(parameters: Iterator[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def test_parameters_may_be_a_group_parameters_or_names() -> None:
    model = Tied()
    schedule = trained(model, TOKENS)
    biases = [parameter for name, parameter in schedule.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": biases}, {"params": [model.embed.weight, model.hidden.weight]}], lr=1.0)
    expected = torch.nn.utils.get_total_norm([each.grad for each in (model.hidden.bias, model.head.bias)])
    for chosen in (biases, iter(biases), optimizer.param_groups[0], ["hidden.bias", "head.bias"]):
        assert torch.equal(get_total_norm(schedule, parameters=chosen), expected)
    alone = torch.linalg.vector_norm(model.embed.weight.grad)  # type: ignore[arg-type]
    for one in (model.embed.weight, "embed.weight", "head.weight", ["head.weight", "embed.weight"]):
        assert torch.equal(get_total_norm(schedule, parameters=one), alone)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    clip_grad_norm_(schedule, 1e-3, parameters=optimizer.param_groups[1])
    changed = [name for name, each in model.named_parameters() if not torch.equal(before[name], each.grad)]  # type: ignore[arg-type]
    assert changed == ["embed.weight", "hidden.weight"]
    assert get_total_norm(schedule, parameters=optimizer.param_groups[1]).item() == pytest.approx(1e-3)
    assert get_total_norm(schedule, parameters=[]).item() == 0.0


@pytest.mark.parametrize("norm_type", sampled([2, 1, 0, 2.5, "inf", -math.inf], lambda kind: kind in (2, 0, "inf")))
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_gradients_of_several_dtypes(norm_type: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    class Cast(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).tanh()

    model = nn.Sequential(*(Cast(4, 4, dtype=dtypes[index % 2]) for index in range(6)))
    schedule = trained(model, torch.randn(4, 4))
    expected = torch.nn.utils.get_total_norm(grads_of(model.parameters()), norm_type)
    norm = get_total_norm(schedule, norm_type)
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)


def by_hand(*modules: nn.Module, **options: Any) -> Schedule1F1B:
    stages = [PipelineStage(module, index, len(modules), "cpu") for index, module in enumerate(modules)]
    return Schedule1F1B(stages, 2, mean_square, **options)


def test_modules_cut_by_hand_with_the_same_names_and_a_frozen_stage() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    layers[1].requires_grad_(False)
    whole = copy.deepcopy(layers)
    schedule = by_hand(*layers)
    x = torch.randn(4, 4)
    schedule.step(x)
    for part in x.split(2):
        (mean_square(whole(part)) / 2).backward()
    assert torch.equal(clip_grad_norm_(schedule, 0.1), torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    for mine, other in zip(layers.parameters(), whole.parameters(), strict=True):
        assert mine.grad is other.grad is None or torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    layers[3].weight.grad.fill_(math.inf)  # type: ignore[union-attr]
    with pytest.raises(NonFiniteNormError, match="order 2 of the gradients is inf: that of weight of stage 3 is not"):
        get_total_norm(schedule, error_if_nonfinite=True)


def test_a_declared_tie_counts_once_even_if_its_holders_are_copies() -> None:
    first, last = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    last.weight = nn.Parameter(first.weight.detach().clone())
    schedule = by_hand(first, nn.Linear(6, 6), last, ties=[{0: "weight", 2: "weight"}])
    schedule.step(TOKENS)
    assert torch.equal(first.weight.grad, last.weight.grad)  # type: ignore[arg-type]
    hidden = schedule.stages[1].submod
    grads: list[Any] = [first.weight.grad, *grads_of(hidden.parameters())]
    expected = torch.nn.utils.get_total_norm(grads)
    assert torch.equal(clip_grad_norm_(schedule, 1e-2), expected)
    assert torch.equal(first.weight.grad, last.weight.grad)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match=r"the tied parameter weight of stage 0 of stages 0, 2 is among .* 1 holder of"
    ):
        clip_grad_norm_(schedule, 1.0, parameters=first.weight)


def test_adapters_that_come_later_count() -> None:
    model = Tied()
    schedule = trained(model, TOKENS)
    before = get_total_norm(schedule)
    added = nn.Parameter(torch.ones(2))
    added.grad = torch.full((2,), 1e3)
    schedule.stages[1].submod.get_submodule("hidden").adapter = added
    assert get_total_norm(schedule) > before
    grads = grads_of(schedule.parameters())
    assert any(grad is added.grad for grad in grads)
    assert torch.equal(get_total_norm(schedule), torch.nn.utils.get_total_norm(grads))
    del schedule.stages[1].submod.get_submodule("hidden").adapter
    assert torch.equal(get_total_norm(schedule), before)


def test_a_norm_that_is_not_finite_names_the_gradients() -> None:
    model = Tied()
    schedule = trained(model, TOKENS)
    model.hidden.bias.grad[0] = math.nan  # type: ignore[index]
    before = model.head.bias.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(
        NonFiniteNormError,
        match="order 2 of the gradients is nan: that of hidden.bias is not finite. Nothing was clipped; error_if_nonf",
    ):
        clip_grad_norm_(schedule, 1.0, error_if_nonfinite=True)
    assert torch.equal(model.head.bias.grad, before)  # type: ignore[arg-type]
    assert clip_grad_norm_(schedule, 1.0).isnan()
    assert model.head.bias.grad.isnan().all()  # type: ignore[union-attr]


def test_calls_that_do_not_work() -> None:
    model = Tied()
    schedule = trained(model, TOKENS)
    with pytest.raises(
        InputError, match=r"takes the schedule first, and got generator: .* torch.nn.utils.clip_grad_norm_"
    ):
        clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_norm must be a number, got 'much'"):
        clip_grad_norm_(schedule, "much")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="norm_type must be a number, or 'inf', got 'two'"):
        get_total_norm(schedule, "two")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no parameter of the pipeline is named 'hiden.bias'.*hidden.bias"):
        clip_grad_norm_(schedule, 1.0, parameters=["hiden.bias"])
    with pytest.raises(
        InputError, match=r"parameters= has a float32\[6, 6\] that no stage of this rank holds: pass some"
    ):
        clip_grad_norm_(schedule, 1.0, parameters=copy.deepcopy(model).hidden.parameters())
    schedule.step(TOKENS)
    model.zero_grad()
    with pytest.raises(
        InputError, match=r"no parameter .* has a gradient: call clip_grad_norm_\(\) after schedule.step"
    ):
        clip_grad_norm_(schedule, 1.0)
    schedule.step(TOKENS)
    assert clip_grad_norm_(schedule, 1.0) > 0


def test_before_the_first_step() -> None:
    with pytest.raises(
        InputError, match=r"no parameter .* has a gradient: call get_total_norm\(\) after schedule.step"
    ):
        get_total_norm(by_hand(nn.Linear(4, 4), nn.Linear(4, 4)))
