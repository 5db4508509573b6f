"""The loss that a model makes itself, from labels among its arguments; and losses that are functions of the output."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, PipeWarning, PlannedSchedule, Schedule1F1B, SplitPoint, pipeline
from pipecut.errors import PipeError
from pipecut.run.schedule import PipelineSchedule
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.nested_values import assert_same
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

WORDS, WIDTH, LAYERS = 7, 6, 4
SCHEDULES = ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]


@dataclass
class Answer:
    """What a model may return: a loss if it got labels."""

    loss: Tensor | None
    logits: Tensor


FORMS: dict[str, Callable[[Tensor | None, Tensor], Any]] = {
    "dataclass": Answer,
    "dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "tuple": lambda loss, logits: (logits,) if loss is None else (loss, logits),
    "number": lambda loss, logits: logits if loss is None else loss,
}


class Reader(nn.Module):
    """Makes its own loss from labels, those of -100 left out, in one of the forms."""

    def __init__(self, form: str, reduction: str = "mean") -> None:
        super().__init__()
        self.form = form
        self.reduction = reduction
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return FORMS[self.form](loss, logits)


def own(output: Any) -> Tensor:
    """The loss in an output of any form."""
    loss: Tensor = {Answer: lambda: output.loss, dict: lambda: output["loss"], tuple: lambda: output[0]}.get(
        type(output), lambda: output
    )()
    return loss


def reader(form: str = "dataclass", reduction: str = "mean") -> Reader:
    torch.manual_seed(0)
    return Reader(form, reduction).double()


def batch(samples: int, ignored: bool = False) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(WORDS, (samples, 3), generator=numbers) for _ in range(2))
    if ignored:  # as many in some rows as there are in no other
        labels[0, :] = -100
        labels[1, 1:] = -100
    return {"ids": ids, "labels": labels}


class First(nn.Module):
    """The beginning of a Reader."""

    def __init__(self, model: Reader) -> None:
        super().__init__()
        self.embed = model.embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)  # type: ignore[no-any-return]


class Inner(nn.Module):
    """A layer of a Reader."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Last(nn.Module):
    """The end of a Reader, which takes the labels."""

    def __init__(self, model: Reader) -> None:
        super().__init__()
        self.layers, self.head, self.form, self.reduction = model.layers[2:], model.head, model.form, model.reduction

    def forward(self, x: Tensor, *, labels: Tensor | None = None) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return FORMS[self.form](loss, logits)


def stages_of(model: Reader, traced: bool, labels: bool = True) -> list[PipelineStage]:
    if traced:
        call = batch(3) if labels else {"ids": batch(3)["ids"]}
        spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, LAYERS)}
        pipe = pipeline(model, (), dict(call), split_spec=spec)
        return [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    parts = [First(model), Inner(model.layers[0]), Inner(model.layers[1]), Last(model)]
    return [PipelineStage(part, index, LAYERS, "cpu") for index, part in enumerate(parts)]


def scheduled(name: str, stages: list[PipelineStage], microbatches: int, **options: Any) -> PipelineSchedule:
    chunks = FAMILIES[name].chunks
    plan = plan_for(name, ranks=LAYERS // chunks, chunks=chunks, microbatches=microbatches)
    return PlannedSchedule(stages, plan, **options)


def assert_as_uncut(schedule: PipelineSchedule, model: Reader, call: dict[str, Tensor]) -> Any:
    uncut = copy.deepcopy(model)
    uncut.zero_grad(set_to_none=True)
    expected = own(uncut(**call))
    expected.backward()
    model.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    output = schedule.step(**call, losses=losses)
    assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)
    assert schedule.mean_loss() == pytest.approx(expected.item(), rel=1e-12)
    assert own(output).item() == pytest.approx(expected.item(), rel=1e-12)
    assert len(losses) == schedule.n_microbatches
    return output


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_in_an_output(form: str, traced: bool) -> None:
    model, call = reader(form), batch(7)
    stages = stages_of(model, traced)
    names = SCHEDULES if form == "dataclass" else ["1F1B"]
    for name in names:
        output = assert_as_uncut(scheduled(name, stages, 4), model, call)
        assert type(output) is type(model(**call))
    with torch.no_grad():
        assert_same(output, model(**call), "output", TIGHT)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_in_an_output(form: str, traced: bool) -> None:
    model = reader(form, "sum")
    schedule = scheduled("ZB-H1", stages_of(model, traced), 3, scale_grads=False)
    assert_as_uncut(schedule, model, batch(7))


@pytest.mark.parametrize("traced", [True, False])
def test_functions_of_the_output(traced: bool) -> None:
    model, call = reader(), batch(6)
    stages = stages_of(model, traced)

    class Module(nn.Module):
        def forward(self, output: Answer) -> Tensor:
            assert output.loss is not None
            return output.loss * 1.0

    functions: list[tuple[Any, dict[str, Any]]] = [
        (lambda output: output.loss, {}),
        (lambda output, scale=1.0: output.loss * scale, {}),
        (lambda output, scale: output.loss * scale, {"scale": 1.0}),
        (Module(), {}),
    ]
    uncut = copy.deepcopy(model)
    uncut(**call).loss.backward()
    for function, loss_kwargs in functions:
        model.zero_grad(set_to_none=True)
        schedule = scheduled("1F1B", stages, 3, loss_fn=function)
        schedule.step(**call, loss_kwargs=loss_kwargs)
        assert_same_gradients(gradients_of(model), gradients_of(uncut), TIGHT)


@pytest.mark.parametrize("loss_fn", [None, lambda output: output.loss])
def test_evaluations_with_and_without_labels(loss_fn: Any) -> None:
    model, call = reader(), batch(6)
    schedule = scheduled("1F1B", stages_of(model, traced=False), 3, loss_fn=loss_fn)
    schedule.eval(**call)
    assert schedule.mean_loss() == pytest.approx(model(**call).loss.item(), rel=1e-12)
    output = schedule.eval(ids=call["ids"])
    assert output.loss is None
    torch.testing.assert_close(output.logits, model(call["ids"]).logits)
    with pytest.raises(InputError, match="there is no loss yet"):
        schedule.mean_loss()


WAYS = r"make the schedule with loss_fn=, a function of \(output, target\) or of the output only; or use a model"
LACKS = {
    "dataclass": "of type Answer, has None as its loss .were the labels passed",
    "dict": "of type dict, has None as its loss .were the labels passed",
    "tuple": "the output of the model, of type tuple, holds none",
    "number": r"the output of the model is a tensor of shape \[2, 3, 7\]",
}


@pytest.mark.parametrize(
    ("form", "traced"),
    sampled(
        [(form, traced) for form in FORMS for traced in (True, False)],
        lambda case: case[0] == "number" or case == ("dict", True),
    ),
)
def test_an_output_without_a_loss(form: str, traced: bool) -> None:
    """A step runs forwards only, and says so; the gradients that were there stay as they were."""
    ids = batch(4)["ids"]
    for name in SCHEDULES:
        model = reader(form)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        schedule = scheduled(name, stages_of(model, traced, labels=False), 4)
        for _ in range(2):
            with pytest.warns(
                PipeWarning, match=rf"run forwards only, and no gradients were computed.*eval\(\).*{WAYS}"
            ):
                output = schedule.step(ids=ids)
            with torch.no_grad():
                assert_same(output, model(ids), name, TIGHT)
        assert all(
            torch.equal(each.grad, torch.ones_like(each)) for each in model.parameters() if each.grad is not None
        )
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_no_loss_after_steps_that_had_one(form: str) -> None:
    """Somebody who trains has forgotten the labels."""
    model = reader(form)
    schedule = scheduled("1F1B", stages_of(model, traced=False), 2)
    assert_as_uncut(schedule, model, batch(4))
    with pytest.raises(PipeError, match=rf"a training step needs a loss, and .*{LACKS[form]}.*{WAYS}"):
        schedule.step(ids=batch(4)["ids"])


def test_labels_after_steps_without_them() -> None:
    model = reader()
    schedule = scheduled("DualPipeV", stages_of(model, traced=False), 4)
    with pytest.warns(PipeWarning, match="run forwards only"):
        schedule.step(ids=batch(4)["ids"])
    assert_as_uncut(schedule, model, batch(4))


def test_a_loss_in_the_output_that_is_no_number() -> None:
    model = reader(reduction="none")
    schedule = scheduled("1F1B", stages_of(model, traced=False), 2)
    with pytest.raises(
        PipeError, match=r"the loss in the output of the model is a tensor of shape \[6\] for microbatch 0"
    ):
        schedule.step(**batch(4))


def test_a_target_that_nobody_takes() -> None:
    model, call = reader(), batch(4)
    stages = stages_of(model, traced=False)
    with pytest.raises(InputError, match="There is a target, and no loss_fn to take it"):
        scheduled("1F1B", stages, 2).step(**call, target=call["labels"])
    with pytest.raises(InputError, match="got a target, and loss_fn takes one argument, the output: leave out target="):
        scheduled("1F1B", stages, 2, loss_fn=lambda output: output.loss).step(**call, target=call["labels"])
    with pytest.raises(InputError, match="got no target.*a loss_fn that needs none takes one argument"):
        scheduled("1F1B", stages, 2, loss_fn=F.mse_loss).step(**call)


def tokens(given: Any) -> Tensor:
    """How many labels count."""
    return (given["labels"] != -100).sum()


@pytest.mark.filterwarnings("ignore:labels has .* labels that count")
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("loss_fn", [None, lambda output: output.loss])
def test_microbatches_weigh_as_many_labels_as_they_have(traced: bool, loss_fn: Any) -> None:
    model, call = reader(), batch(7, ignored=True)
    stages = stages_of(model, traced)
    for name in SCHEDULES:
        assert_as_uncut(scheduled(name, stages, 4, loss_fn=loss_fn, loss_weight=tokens), model, call)
    # By samples it is another loss.
    by_samples = scheduled("1F1B", stages, 4, loss_fn=loss_fn)
    by_samples.step(**call)
    assert by_samples.mean_loss() != pytest.approx(model(**call).loss.item(), rel=1e-3)


@pytest.mark.parametrize("traced", [True, False])
def test_a_microbatch_without_any_label(traced: bool) -> None:
    model, call = reader(), batch(8, ignored=True)
    call["labels"][:2] = -100
    stages = stages_of(model, traced)
    for name in SCHEDULES:
        assert_as_uncut(scheduled(name, stages, 4, loss_weight=tokens), model, call)


def test_weights_by_the_target() -> None:
    model, call = reader(), batch(7, ignored=True)
    stages = stages_of(model, traced=True, labels=False)
    expected = copy.deepcopy(model)
    expected(**call).loss.backward()

    def loss_fn(output: Answer, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    schedule = scheduled("1F1B", stages, 4, loss_fn=loss_fn, loss_weight=lambda target: (target != -100).sum())
    schedule.step(call["ids"], target=call["labels"])
    assert_same_gradients(gradients_of(model), gradients_of(expected), TIGHT)
    schedule.eval(call["ids"], target=call["labels"])
    assert schedule.mean_loss() == pytest.approx(expected(**call).loss.item(), rel=1e-12)
    assert schedule.eval(call["ids"]).logits.shape == (7, 3, WORDS)


@pytest.mark.parametrize("traced", [True, False])
def test_weights_of_an_evaluation(traced: bool) -> None:
    model, call = reader(), batch(7, ignored=True)
    schedule = scheduled("1F1B", stages_of(model, traced), 4, loss_weight=tokens)
    output = schedule.eval(**call)
    assert schedule.mean_loss() == pytest.approx(model(**call).loss.item(), rel=1e-12)
    assert output.loss.item() == pytest.approx(model(**call).loss.item(), rel=1e-12)
    if not traced:
        assert schedule.eval(ids=call["ids"]).loss is None


def test_weights_that_are_refused() -> None:
    model, call = reader(), batch(6)
    stages = stages_of(model, traced=True)

    def refused(loss_weight: Any, text: str) -> None:
        with pytest.raises(InputError, match=text):
            scheduled("1F1B", stages, 3, loss_weight=loss_weight).step(**call)

    refused(lambda given: -1, "loss_weight returned -1 for microbatch 0; it must return a number that is not negative")
    refused(lambda given: "many", "loss_weight returned 'many' for microbatch 0")
    refused(lambda given: torch.ones(2), "loss_weight returned tensor.*for microbatch 0")
    refused(lambda given: 0, "loss_weight is 0 for every microbatch")
    refused(lambda given: given["label"], "loss_weight asked for 'label' in the arguments.*there is 'ids', 'labels'")
    with pytest.raises(InputError, match="loss_weight weighs losses that are means, and with scale_grads=False"):
        scheduled("1F1B", stages, 3, loss_weight=tokens, scale_grads=False)
    by_target = scheduled("1F1B", stages, 3, loss_fn=lambda output, target=None: output.loss, loss_weight=len)
    with pytest.raises(InputError, match="loss_weight is a function of the target here, and step.. got none"):
        by_target.step(**call)
    with pytest.raises(InputError, match="there is a loss, and loss_weight did not find what it asks for"):
        scheduled("1F1B", stages, 3, loss_weight=lambda given: given["label"]).eval(**call)


def weigh_on_rank(rank: int, traced: bool) -> None:
    model, call = reader(), batch(7, ignored=True)
    expected = copy.deepcopy(model)
    loss = expected(**call).loss
    loss.backward()
    plan = plan_for("Interleaved1F1B", ranks=2, chunks=2, microbatches=4)
    held = plan.placement.stages_of[rank]
    stages = [stages_of(model, traced)[index] for index in held]
    schedule = PlannedSchedule(stages, plan, loss_weight=tokens)
    names = {0: ["ids", "labels"], 1: []} if traced else {0: ["ids"], 1: ["labels"]}
    output = schedule.step(**{name: call[name] for name in names[rank]})
    mine = {id(parameter) for stage in stages for parameter in stage.submod.parameters()}
    wanted = gradients_of(expected)
    for name, parameter in model.named_parameters():
        if id(parameter) in mine:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=TIGHT, atol=TIGHT, msg=name)
    assert schedule.mean_loss() == pytest.approx(loss.item(), rel=1e-12)
    assert (output is None) == (rank == 0)


@pytest.mark.distributed
@pytest.mark.parametrize("traced", [True, False])
def test_weights_on_ranks(two_ranks: Ranks, traced: bool) -> None:
    two_ranks.run(weigh_on_rank, traced)


def weigh_on_one_rank_only(rank: int) -> str:
    stages = stages_of(reader(), traced=False)
    plan = plan_for("Interleaved1F1B", ranks=2, chunks=2, microbatches=4)
    mine = [stages[index] for index in plan.placement.stages_of[rank]]
    schedule = PlannedSchedule(mine, plan, loss_weight=tokens if rank == 1 else None)
    with pytest.raises(PipeError) as caught:
        schedule.step(**{name: value for name, value in batch(7).items() if (name == "ids") == (rank == 0)})
    return str(caught.value)


@pytest.mark.distributed
def test_all_ranks_weigh_alike(two_ranks: Ranks) -> None:
    for message in two_ranks.run(weigh_on_one_rank_only):
        assert "loss_weight: no on rank 0; by the keywords on rank 1" in message


def test_labels_that_count_unevenly_are_warned_of() -> None:
    """The mean of the microbatches' means is another loss than the mean over all labels."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.embed(ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    ids = torch.randint(0, 8, (4, 3))
    labels = ids.clone()
    labels[0, 1:] = -100
    pipe = pipeline(Counts(), (ids, labels), split_spec={"head": SplitPoint.BEGINNING})
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    with pytest.warns(PipeWarning, match=r"labels has \[4, 6\] labels that count \(-100 does not\)"):
        Schedule1F1B(stages, 2).step(ids, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Schedule1F1B(stages, 2).step(ids, ids)
        Schedule1F1B(stages, 2, loss_weight=lambda inputs: (inputs["labels"] != -100).sum()).step(ids, labels)
