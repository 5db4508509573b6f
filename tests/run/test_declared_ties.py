"""Modules cut by hand that share a parameter: declared with ties=, its gradient is the sum over the stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipeError, PipelineStage, PlannedSchedule, Schedule1F1B, pipeline
from pipecut.schedule import Plan, plan_for
from pipecut.schedule.rules import Dataflow
from tests.support.training import Gradients, assert_same_gradients, gradients_of

WORDS, WIDTH, SAMPLES = 7, 4, 10
TIES = [{0: "weight", 2: "head.weight"}]


class Head(nn.Module):
    """The last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def language_model() -> nn.Sequential:
    """An embedding and a head that are one parameter, and a layer between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), Head()).double()
    model[2].head.weight = model[0].weight
    return model


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    ids, target = torch.randint(WORDS, (2, SAMPLES), generator=numbers)
    return ids, target


def uncut(model: nn.Module, steps: int = 1) -> Gradients:
    """The gradients of a copy that was not cut, in which the parameters are one."""
    whole, (ids, target) = copy.deepcopy(model), batch()
    for _ in range(steps):
        F.cross_entropy(whole(ids), target).backward()
    return gradients_of(whole)


def stages_of(parts: Any) -> list[PipelineStage]:
    return [PipelineStage(part, index, len(parts), "cpu") for index, part in enumerate(parts)]


def apart(model: nn.Sequential) -> nn.Sequential:
    """The same layers, each copied for itself, as on ranks: the tied parameters are two objects."""
    return nn.Sequential(*(copy.deepcopy(part) for part in model))


@pytest.mark.parametrize("ties", [TIES, []])
def test_one_parameter_in_two_stages_of_a_process_is_not_summed_twice(ties: list[dict[int, str]]) -> None:
    model, (ids, target) = language_model(), batch()
    expected = uncut(model)
    Schedule1F1B(stages_of(model), 4, F.cross_entropy, ties=ties).step(ids, target=target)
    assert_same_gradients(gradients_of(model), expected, 1e-10)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_copies_of_a_parameter_get_the_sum(name: str) -> None:
    model, (ids, target) = language_model(), batch()
    expected, copies = uncut(model, steps=2), apart(model)
    plan = plan_for(name, ranks=3, microbatches=4)
    schedule = PlannedSchedule(stages_of(copies), plan, F.cross_entropy, ties=TIES)
    for _ in range(2):  # the second step is added to the first, which has been summed
        schedule.step(ids, target=target)
    assert_same_gradients(gradients_of(copies), expected, 1e-10)
    assert torch.equal(copies[0].weight.grad, copies[2].head.weight.grad)
    assert copies[0].weight.grad.data_ptr() != copies[2].head.weight.grad.data_ptr()


def test_without_a_declaration_copies_stay_apart() -> None:
    """What the declaration is for: nobody can know that two objects are one parameter."""
    model, (ids, target) = language_model(), batch()
    expected, copies = uncut(model), apart(model)
    Schedule1F1B(stages_of(copies), 4, F.cross_entropy).step(ids, target=target)
    assert not torch.allclose(copies[0].weight.grad, expected["0.weight"])


def test_names_behind_a_wrapper() -> None:
    """torch.compile puts a level of its own in front of the names."""
    model, (ids, target) = language_model(), batch()
    expected, copies = uncut(model), apart(model)
    parts = [torch.compile(copies[0], backend="eager"), copies[1], copies[2]]
    Schedule1F1B(stages_of(parts), 2, F.cross_entropy, ties=TIES).step(ids, target=target)
    assert_same_gradients(gradients_of(copies), expected, 1e-10)


def test_frozen_in_all_stages() -> None:
    model, (ids, target) = language_model(), batch()
    model[0].weight.requires_grad_(False)
    expected, copies = uncut(model), apart(model)
    Schedule1F1B(stages_of(copies), 4, F.cross_entropy, ties=TIES).step(ids, target=target)
    assert copies[0].weight.grad is None
    assert_same_gradients(gradients_of(copies), expected, 1e-10)


def test_frozen_in_one_stage_only_is_refused_and_nothing_has_changed() -> None:
    copies, (ids, target) = apart(language_model()), batch()
    schedule = Schedule1F1B(stages_of(copies), 4, F.cross_entropy, ties=TIES)
    schedule.step(ids, target=target)
    before = gradients_of(copies)
    copies[0].weight.requires_grad_(False)
    with pytest.raises(
        PipeError,
        match="the tied parameter weight of stage 0 is frozen in stage 0 and trained in stage 2, and the holders of "
        r"one parameter have to stay the same: call requires_grad_\(\) on it in all of these stages",
    ):
        schedule.step(ids, target=target)
    assert_same_gradients(gradients_of(copies), before, 0.0)
    copies[0].weight.requires_grad_(True)
    schedule.step(ids, target=target)
    assert_same_gradients(gradients_of(copies), uncut(language_model(), steps=2), 1e-10)


class Unused(nn.Linear):
    """A layer whose weight takes no part in its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_parameter_that_no_stage_uses_gets_no_gradient() -> None:
    parts = nn.Sequential(Unused(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Unused(WIDTH, WIDTH))
    parts[2].weight = nn.Parameter(parts[0].weight.detach().clone())
    x = torch.randn(SAMPLES, WIDTH)
    Schedule1F1B(stages_of(parts), 2, F.mse_loss, ties=[{0: "weight", 2: "weight"}]).step(x, target=x)
    assert parts[0].weight.grad is None
    assert parts[2].weight.grad is None
    assert parts[1].weight.grad is not None


def test_values_that_differ_are_refused_at_the_first_step() -> None:
    copies, (ids, target) = apart(language_model()), batch()
    schedule = Schedule1F1B(stages_of(copies), 4, F.cross_entropy, ties=TIES)
    with torch.no_grad():
        copies[2].head.weight[3, 1] += 1e-9
    with pytest.raises(
        InputError,
        match="the tied parameter weight of stage 0 has other values in stage 2 than in stage 0: let both hold the "
        "same nn.Parameter, or copy its values before the first step",
    ):
        schedule.step(ids, target=target)


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([{0: "weight", 2: "heed.weight"}], r"ties\[0\]: stage 2 has no parameter 'heed.weight'. Did you mean 'head."),
        (
            [{0: "weight", 1: "weight"}],
            r"ties\[0\] cannot be one parameter: weight of stage 0 is float64\[7, 4\], weight ",
        ),
        ([{0: "weight", 3: "weight"}], r"ties\[0\] has stage 3, and the stages are 0 to 2"),
        ([{0: "weight"}], r"ties\[0\] is \{0: 'weight'\}: a tie is a dict .*, with two stages at least"),
        (
            [("weight", "head.weight")],
            r"ties\[0\] is \('weight', 'head.weight'\): a tie is a dict from stage to the name",
        ),
        ([{"embed": "weight", "head": "weight"}], r"such as \{0: \"embed.weight\", 3: \"head.weight\"\}"),
        ({0: "weight", 2: "head.weight"}, r"ties must be a list, got dict: a tie is a dict"),
        (TIES * 2, r"weight of stage 0 is in ties\[0\] and in ties\[1\]: put all that is one parameter in one tie"),
    ],
)
def test_ties_that_make_no_sense(ties: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Schedule1F1B(stages_of(language_model()), 2, F.cross_entropy, ties=ties)


def test_two_dtypes_are_not_one_parameter() -> None:
    copies = apart(language_model())
    copies[2].float()
    with pytest.raises(InputError, match=r"stage 0 is float64\[7, 4\], head.weight of stage 2 is float32\[7, 4\]"):
        Schedule1F1B(stages_of(copies), 2, F.cross_entropy, ties=TIES)


def test_one_parameter_under_two_names_in_two_ties() -> None:
    """Each tie would sum it: the name tells nothing, the object does."""
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    first[1].weight = first[0].weight
    parts = [first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    with pytest.raises(InputError, match=r"1.weight of stage 0 is in ties\[0\] and in ties\[1\]"):
        Schedule1F1B(stages_of(parts), 2, F.mse_loss, ties=[{0: "0.weight", 1: "weight"}, {0: "1.weight", 2: "weight"}])


def test_a_traced_model_knows_its_ties() -> None:
    x = torch.randn(4, WIDTH)
    pipe = pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), (x,), num_stages=2)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    with pytest.raises(
        InputError, match="ties= is for modules that were cut by hand; those of a traced model are known"
    ):
        Schedule1F1B(stages, 2, F.mse_loss, ties=[{0: "0.weight", 1: "1.weight"}])


def test_a_plan_that_has_ties_of_its_own() -> None:
    rows = {0: ["0F0", "0B0", "0REDUCE_TIES0"], 1: ["1F0", "1B0"], 2: ["2F0", "2B0", "2REDUCE_TIES0"]}
    plan = Plan.from_actions(rows, dataflow=Dataflow.chain(3, ties=[{0, 2}]))
    model, (ids, target) = language_model(), batch()
    with pytest.raises(
        InputError, match=r"ties between the stages \[\[0, 2\]\], and the schedule got \[\]: pass ties="
    ):
        PlannedSchedule(stages_of(model), plan, F.cross_entropy)
    expected, copies = uncut(model), apart(model)
    PlannedSchedule(stages_of(copies), plan, F.cross_entropy, ties=TIES).step(ids, target=target)
    assert_same_gradients(gradients_of(copies), expected, 1e-10)
