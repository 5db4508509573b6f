"""In a training step stages send what later ones use; outputs that only the caller reads stay where they are made."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipecut
from pipecut import InputError, PipeError, Replicate, Schedule1F1B, StepError, pipe_split, pipeline
from pipecut.errors import UnsentOutputError
from pipecut.pipe import Pipe
from pipecut.run.schedule import PipelineSchedule
from tests.support.ranks import Ranks


class Store:
    """Keeps tensors, as a key/value cache does."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


@dataclass
class Result:
    loss: Tensor | None
    logits: Tensor
    store: Store
    states: tuple[Tensor, ...]
    size: Tensor


class Block(nn.Module):
    """A layer whose own code leaves a tensor in what it is called with, or returns one more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inner(x)
        return self.outer(torch.tanh(hidden)) + x, hidden


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Result:
        store, states, size = Store(), [x], x.new_zeros(())
        for index, block in enumerate(self.blocks):
            x, kept = block(x)
            store.kept.append(kept.exp())
            states.append(x)
            size = x.mean() if index == 0 else size
            if index < 2:
                pipe_split()
        loss = None if labels is None else F.mse_loss(x, labels)
        return Result(loss, x, store, tuple(states), size)


def batch(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, 8), "labels": torch.randn(rows, 8)}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def pipe() -> Pipe:
    torch.manual_seed(0)
    return pipeline(Model(), (), batch())


def schedule_of(pipe: Pipe, microbatches: int = 2, **options: Any) -> PipelineSchedule:
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    return Schedule1F1B(stages, n_microbatches=microbatches, **options)  # type: ignore[arg-type]


def assert_whole(output: Result, model: nn.Module) -> None:
    expected = model(**batch())
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.store.kept, expected.store.kept)
    torch.testing.assert_close(output.states, expected.states)


def test_a_training_step_sends_what_is_used(pipe: Pipe) -> None:
    assert {(edge.name, edge.source, edge.target) for edge in pipe.edges if edge.kind == "activation"} == {
        ("blocks_0_0", 0, 1), ("blocks_1_0", 1, 2), ("mean", 0, 2),
    }  # fmt: skip
    assert {(each.name, each.stage) for each in pipe.unsent} == {
        ("states[0]", 0), ("store.kept[0]", 0), ("states[1]", 0), ("store.kept[1]", 1),
    }  # fmt: skip


class Hiding(nn.Module):
    """Leaves a tensor in a list of its caller's, beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, made: list[Tensor]) -> Tensor:
        made.append(torch.tanh(x))
        return self.linear(made[-1])


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Hiding(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Tensor] = []
        x = self.first(x, made)
        pipe_split()
        return self.last(x), made[0]


def test_a_module_stays_whole_if_only_the_caller_would_read_what_it_hides() -> None:
    whole, cut = (pipeline(Hidden(), (torch.ones(2, 8),), outputs=outputs) for outputs in ("used", "all"))
    assert whole.stage_infos[0].modules == ("first",)
    assert cut.stage_infos[0].modules == ("first.linear",)
    x = torch.randn(2, 8)
    torch.testing.assert_close(whole(x), whole.traced.model(x))


def test_gradients_are_those_of_the_uncut_model(model: nn.Module) -> None:
    model(**batch()).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    cut = copy.deepcopy(model)
    cut.zero_grad()
    output = schedule_of(pipeline(cut, (), batch())).step(**batch())
    for name, parameter in cut.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    torch.testing.assert_close(output.logits, model(**batch()).logits)
    torch.testing.assert_close(output.states[3], output.logits)


def test_evaluations_and_calls_of_the_pipe_return_everything(pipe: Pipe) -> None:
    schedule = schedule_of(pipe)
    schedule.step(**batch())
    for output in (pipe(**batch()), schedule.eval(**batch()), schedule.eval(**batch())):
        assert_whole(output, pipe.traced.model)
    assert "not sent by stage 0" in repr(schedule.step(**batch()).states[0])


SUMS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda value: value.sum(),
    "shape": lambda value: value.shape,
    "torch.sum": lambda value: torch.sum(value),
    "torch.stack": lambda value: torch.stack([torch.ones(2), value]),
    "plus": lambda value: 1 + value,
    "minus": lambda value: value - torch.ones(1),
    "index": lambda value: value[0],
    "for": lambda value: list(value),
    "if": lambda value: bool(value),
    "equal": lambda value: value == 1,
    "isinstance": lambda value: isinstance(value, Tensor),
    "hasattr": lambda value: hasattr(value, "mean"),
    "numpy": lambda value: numpy.asarray(value),
    "float": lambda value: float(value),
    "text": lambda value: f"{value:.3f}",
}


@pytest.mark.parametrize("use", SUMS)
def test_a_use_of_an_output_that_was_not_sent_raises_with_the_remedy(pipe: Pipe, use: str) -> None:
    output = schedule_of(pipe).step(**batch())
    with pytest.raises(UnsentOutputError, match=r"store\.kept\[0\] was not sent: stage 0 made it.*outputs=\['store'\]"):
        SUMS[use](output.store.kept[0])


def test_an_output_that_was_not_sent_can_be_printed_copied_and_saved(pipe: Pipe) -> None:
    value = schedule_of(pipe).step(**batch()).states[0]
    for same in (
        value,
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
        {value: value}[value],
    ):
        assert repr(same) == str(same) == "<states[0], not sent by stage 0>"


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output: output.logits.mean() + output.states[1].mean(),
        lambda output: sum(each.mean() for each in output.states if isinstance(each, Tensor)),
    ],
)
def test_a_loss_that_reads_one_raises_before_there_are_gradients(model: nn.Module, loss_fn: Any) -> None:
    pipe = pipeline(model, (batch()["x"],))
    schedule = schedule_of(pipe, loss_fn=loss_fn)
    with pytest.raises(StepError, match=r"in loss_fn.*states\[\d\] was not sent.*outputs=\['states'\]"):
        schedule.step(batch()["x"])
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_fn(model(batch()["x"])).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    schedule_of(pipeline(model, (batch()["x"],), outputs=["states"]), loss_fn=loss_fn).step(batch()["x"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize(("outputs", "left"), [("all", 0), (["store"], 2), ("store", 2), (["states[1]", "store"], 1)])
def test_outputs_that_are_asked_for_are_sent(model: nn.Module, outputs: Any, left: int) -> None:
    assert len(pipeline(model, (), batch(), outputs=outputs).unsent) == left


def test_outputs_of_a_tuple_are_asked_for_by_number() -> None:
    pipe = pipeline(Hidden(), (torch.ones(2, 8),), outputs=[1])
    assert not pipe.unsent
    schedule = schedule_of(pipeline(Hidden(), (torch.ones(2, 8),)), loss_fn=lambda output: output[0].sum())
    with pytest.raises(UnsentOutputError, match=r"the output \[1\] was not sent.*outputs=\[1\]\)"):
        schedule.step(torch.ones(2, 8))[1].sum()


class Flat(Hidden):
    """The output is a dict, with keys that are no names of Python's."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        result, hidden = super().forward(x)
        return {"out": result, "layer.0": hidden}


def test_the_remedy_for_a_key_that_is_no_name() -> None:
    schedule = schedule_of(pipeline(Flat(), (torch.ones(2, 8),)), loss_fn=lambda output: output["out"].sum())
    with pytest.raises(UnsentOutputError, match=r"the output \['layer.0'\] was not sent.*outputs=\['layer.0'\]\)"):
        schedule.step(torch.ones(2, 8))["layer.0"].sum()
    assert not pipeline(Flat(), (torch.ones(2, 8),), outputs=["layer.0"]).unsent
    with pytest.raises(InputError, match=r"outputs has 'layer', and the output of Flat has out, layer.0"):
        pipeline(Flat(), (torch.ones(2, 8),), outputs=["layer"])


def test_an_output_that_there_is_not(model: nn.Module) -> None:
    with pytest.raises(InputError, match=r"outputs has 'cache', and the output of Model has loss, logits, store"):
        pipeline(model, (), batch(), outputs=["cache"])
    with pytest.raises(InputError, match=r'outputs must be "used", "all", or a list of names.*got 3'):
        pipeline(model, (), batch(), outputs=3)  # type: ignore[arg-type]


def test_what_was_left_out_is_reported(pipe: Pipe, model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    line = "not sent in training: states, store, 4 values of 512 B per microbatch that only the caller would read"
    assert line in str(pipe)
    assert line in pipe.explain()["not sent"][0]
    with caplog.at_level(logging.INFO, "pipecut"):
        pipeline(model, (), batch())
    assert line in caplog.text


def test_a_merge_spec_is_for_what_was_sent(pipe: Pipe) -> None:
    output = schedule_of(pipe, output_merge_spec=Replicate()).step(**batch())
    assert len(output.logits) == 2
    with pytest.raises(PipeError, match="was not sent"):
        output.states[0].sum()


def test_an_evaluation_without_the_pipe_says_so_where_it_is_read(model: nn.Module) -> None:
    schedule = schedule_of(pipeline(model, (), batch()))
    gc.collect()
    output = schedule.eval(**batch())
    torch.testing.assert_close(output.logits, model(**batch()).logits)
    with pytest.raises(UnsentOutputError, match="was not sent"):
        output.states[0].sum()


def test_verify_compares_all_outputs(pipe: Pipe, model: nn.Module) -> None:
    call: dict[str, Any] = {"kwargs": batch(), "target": torch.zeros(4)}
    found = pipecut.verify(pipe, pipe.traced.model, (), loss_fn=lambda output, target: output.loss, **call)
    names = {each.name for each in found.differences if each.what == "output"}
    assert {"output.store.kept[0]", "output.states[1]", "output.logits"} <= names
    assert found.ok


class Counting(nn.Module):
    """A model that counts its calls, and returns what its first part makes of that."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(1)
        x = self.first(x) * self.count
        kept = x.exp()
        pipe_split()
        return self.last(x), kept


@pytest.mark.parametrize("isolated", [False, True])
def test_verify_runs_for_the_outputs_that_are_not_sent_from_the_same_state(isolated: bool) -> None:
    """The evaluation that fills them in went on from the buffers after the step: a right cut was reported as wrong."""
    model, x = Counting(), torch.ones(4, 8)
    pipe = pipeline(model, (x,))
    options: dict[str, Any] = {"isolated": isolated, "n_microbatches": 1}
    assert pipecut.verify(pipe, model, (x,), x, lambda output, target: F.mse_loss(output[0], target), **options).ok
    assert model.count == 0


def on_a_rank(rank: int, rows: int) -> Any:
    torch.manual_seed(0)
    model = Hidden()
    pipe = pipeline(copy.deepcopy(model), (torch.ones(rows, 8),))
    schedule = Schedule1F1B(pipe.build_stage(rank, "cpu"), 2, lambda output: output[0].square().mean())
    x = torch.arange(8.0 * rows).reshape(rows, 8) / 8
    schedule.step(*([x] if rank == 0 else []))
    output = schedule.eval(*([x] if rank == 0 else []))
    model(x)[0].square().mean().backward()
    if rank == 1:
        torch.testing.assert_close(output, model(x))
    for name, parameter in pipe.stages[rank].named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    return len(pipe.unsent)


def test_ranks_train_and_evaluate(two_ranks: Ranks) -> None:
    assert two_ranks.run(on_a_rank, 4) == [1, 1]
