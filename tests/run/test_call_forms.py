"""Calls of another form than the example: without an optional argument, with another flag, number or structure.

Each form is traced when it is first needed, cut at the same places, and runs on the stages that are there.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pipecut import (
    InputError,
    Pipe,
    PipeWarning,
    Schedule1F1B,
    SplitPoint,
    StepError,
    build_stage,
    pipeline,
    verify,
)
from tests.run.form_models import Tagger, batch
from tests.support.nested_values import assert_same
from tests.support.training import TIGHT, Problem, assert_same_gradients, gradients_of, uncut_step

AT = {"blocks.2": SplitPoint.BEGINNING}


def tagger_pipe(**example: Any) -> tuple[Tagger, Pipe]:
    torch.manual_seed(0)
    model = Tagger().double()
    return model, pipeline(model, mb_kwargs=example, split_spec=AT)


def schedule_of(pipe: Pipe, microbatches: int = 2) -> Schedule1F1B:
    return Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)], microbatches)


def detached(output: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in output.items()}


def assert_trains(schedule: Schedule1F1B, model: nn.Module, **call: Any) -> None:
    problem = Problem(model, (), None, lambda output, _: output["loss"], call)
    expected = uncut_step(problem)
    model.zero_grad(set_to_none=True)
    output = schedule.step(**call)
    assert_same(output, detached(expected.output), "output", TIGHT)
    assert_same_gradients(gradients_of(model), expected.gradients, TIGHT)


def assert_evaluates(schedule: Schedule1F1B, model: nn.Module, **call: Any) -> None:
    with torch.no_grad():
        assert_same(schedule.eval(**call), model(**call), "output", TIGHT)


def test_a_pipe_traced_with_labels_evaluates_without_them() -> None:
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    for _ in range(2):
        assert_trains(schedule, model, **batch())
        assert_evaluates(schedule, model, ids=batch()["ids"])
        assert_evaluates(schedule, model, ids=batch(5)["ids"])
        assert_evaluates(schedule, model, **batch())
    assert len(pipe.variants) == 2  # each form was traced once


def test_stages_of_which_one_did_not_get_a_form_run_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage was left with the new form if the second failed to get it, and ran it for the example's."""
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    install = type(pipe.variants).install

    def fail_once(self: Any, number: int, stage: int, *rest: Any) -> None:
        if stage == 1:
            monkeypatch.undo()
            raise MemoryError("on purpose")
        install(self, number, stage, *rest)

    monkeypatch.setattr(type(pipe.variants), "install", fail_once)
    with pytest.raises(MemoryError):
        schedule.eval(ids=batch()["ids"])
    assert_trains(schedule, model, **batch())
    assert_evaluates(schedule, model, ids=batch()["ids"])


@pytest.mark.slow
def test_a_pipe_traced_without_labels_trains_with_them() -> None:
    model, pipe = tagger_pipe(ids=batch()["ids"])
    schedule = schedule_of(pipe)
    assert_evaluates(schedule, model, ids=batch()["ids"])
    assert_trains(schedule, model, **batch())


def test_other_numbers_and_flags_train_and_are_kept() -> None:
    """`smooth` calls a module, and reads a buffer, that the stages had no use for."""
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    names = [list(stage.submod.state_dict()) for stage in schedule.stages]
    for _ in range(2):
        assert_trains(schedule, model, **batch(), scale=2.5)
        assert_trains(schedule, model, **batch(), smooth=True)
        assert_trains(schedule, model, **batch())
    assert len(pipe.variants) == 3
    assert [list(stage.submod.state_dict()) for stage in schedule.stages] == names


@pytest.mark.slow
def test_another_nested_structure() -> None:
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    factor = torch.full((6, 1, 1), 0.5, dtype=torch.double)
    assert_trains(schedule, model, **batch(), options={"factor": factor})
    assert_trains(schedule, model, **batch(), options={"factor": 3})
    assert_trains(schedule, model, **batch())


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modules_that_stay_whole_in_one_form_and_not_in_the_other(first: bool) -> None:
    """Blocks that hand out what they have inside become generated code, beside their own, which other calls run."""
    model, pipe = tagger_pipe(**batch(), inside=first)
    schedule = schedule_of(pipe)
    for inside in (first, not first, first, not first):
        assert_trains(schedule, model, **batch(), inside=inside)


def test_parts_that_the_user_has_wrapped_stay_wrapped() -> None:
    model, pipe = tagger_pipe(**batch())
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    runs = []
    for stage, index in zip(stages, (1, 3), strict=True):
        stage.submod.blocks[index] = checkpoint_wrapper(stage.submod.blocks[index])  # type: ignore[index,operator]
        stage.submod.blocks[index].register_forward_hook(lambda *_: runs.append(1))  # type: ignore[index,union-attr]
    schedule = Schedule1F1B(stages, 2)
    for call in ({"scale": 0.5}, {"inside": True}, {}):
        runs.clear()
        assert_trains(schedule, model, **batch(), **call)  # type: ignore[arg-type]
        assert len(runs) == 4  # two microbatches in two stages


def test_a_model_without_values() -> None:
    """The stages were given values of their own: the model that is traced again has none."""
    torch.manual_seed(0)
    full = Tagger().double()
    with torch.device("meta"):
        model = Tagger().double()
    pipe = pipeline(model, mb_kwargs=batch(), split_spec=AT)
    state = {**full.state_dict(), "offset": full.offset}
    stages = [pipe.build_stage(index, "cpu", checkpoint=state) for index in range(2)]
    schedule = Schedule1F1B(stages, 2)
    for _ in range(2):
        assert_same(
            schedule.eval(ids=batch()["ids"], scale=2.0), detached(full(batch()["ids"], scale=2.0)), "output", TIGHT
        )
        assert_same(schedule.eval(**batch()), detached(full(**batch())), "output", TIGHT)


def test_a_parameter_that_another_stage_has() -> None:
    """`early` uses a parameter in the first stage that nobody used before, and that was put into the last."""
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    message = r"early was False .*\n.*for this call stage 0 needs extra.weight, .*\(extra.weight is in stage 1\)"
    with pytest.raises(InputError, match=message):
        schedule.step(**batch(), early=True)
    assert_trains(schedule, model, **batch())


def test_a_step_without_labels_is_no_training() -> None:
    model, pipe = tagger_pipe(**batch())
    with pytest.warns(PipeWarning, match=r"step\(\) has run forwards only"):
        schedule_of(pipe).step(ids=batch()["ids"])
    schedule = schedule_of(pipe)
    assert_trains(schedule, model, **batch())
    with pytest.raises(StepError, match="a training step needs a loss"):
        schedule.step(ids=batch()["ids"])


@pytest.mark.slow
def test_sequence_lengths_stay_dynamic() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    pipe = pipeline(model, (), batch(), split_spec=AT, dynamic={"ids": {1: "seq"}, "labels": {1: "seq"}})
    schedule = schedule_of(pipe)
    for length in (3, 5, 4):
        assert_evaluates(schedule, model, ids=batch(6, length)["ids"])
        assert_trains(schedule, model, **batch(6, length), scale=0.5)
    assert len(pipe.variants) == 3


@pytest.mark.slow
def test_marks_and_automatic_cuts_are_found_again() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    pipe = pipeline(model, (), batch(), num_stages=3)
    schedule = schedule_of(pipe)
    assert_trains(schedule, model, **batch(), scale=0.5)
    assert_evaluates(schedule, model, ids=batch()["ids"])


def test_the_pipe_itself_and_verify() -> None:
    model, pipe = tagger_pipe(**batch())
    assert_same(pipe(ids=batch()["ids"]), model(ids=batch()["ids"]), "output", TIGHT)
    assert_same(pipe(**batch(), inside=True), model(**batch(), inside=True), "output", TIGHT)
    assert pipe.sizes(ids=batch(5)["ids"]) == {"batch": 5}
    assert verify(pipe, model, (), None, None, kwargs={**batch(), "scale": 0.25}).ok
    assert len(pipe.variants) == 4


@pytest.mark.slow
def test_two_schedules_on_the_same_stages() -> None:
    model, pipe = tagger_pipe(**batch())
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    one = Schedule1F1B(stages, 2)
    assert_evaluates(one, model, ids=batch()["ids"])
    other = Schedule1F1B(stages, 3)
    assert_trains(other, model, **batch())
    assert_evaluates(one, model, ids=batch()["ids"])
    assert_trains(other, model, **batch(), scale=0.5)
    assert_trains(one, model, **batch())


@pytest.mark.slow
def test_a_number_that_changes_in_every_call_is_warned_of() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale  # type: ignore[no-any-return]

    model, x = Net(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(2, 2)
    pipe = pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipeWarning)
        for nth in range(2, 9):
            torch.testing.assert_close(pipe(x, float(nth)), model(x, float(nth)))
    with pytest.warns(PipeWarning, match="traced for 8 forms of calls besides the example.* as a tensor"):
        pipe(x, 9.0)


def test_objects_and_stages_without_their_pipe_are_errors_as_before() -> None:
    _, pipe = tagger_pipe(**batch())
    with pytest.raises(InputError, match=r"options was None when the model was traced.*got <object"):
        pipe(**batch(), options=object())
    stages = [build_stage(pipe.get_stage_module(index), index, pipe.info(), "cpu") for index in range(2)]
    with pytest.raises(InputError, match="scale was 1.0 when the model was traced.*got 2.0"):
        Schedule1F1B(stages, 2).step(**batch(), scale=2.0)


def test_a_stage_keeps_neither_its_pipe_nor_the_model() -> None:
    """A rank needs the memory of its own stage only. What was traced by then runs on."""
    model, pipe = tagger_pipe(**batch())
    schedule = schedule_of(pipe)
    words = batch()["ids"]
    expected = detached(model(words, scale=2.0))
    schedule.eval(words, scale=2.0)
    known = weakref.ref(pipe), weakref.ref(model)
    del pipe, model
    gc.collect()
    assert [each() for each in known] == [None, None]
    assert_same(schedule.eval(words, scale=2.0), expected, "output", TIGHT)
    with pytest.raises(InputError, match=r"scale was 1.0 .*got 3.0.*\n.*its pipe .* was dropped: keep it"):
        schedule.eval(words, scale=3.0)


def test_a_hook_on_a_module_that_is_cut_in_one_form_only() -> None:
    """The hook would run by itself, and once more in the generated code."""
    torch.manual_seed(0)
    model = Tagger().double()
    model.blocks[1].register_forward_hook(lambda *_: None)
    pipe = pipeline(model, (), batch(), split_spec=AT)
    message = "'blocks.1' has a forward hook, and is generated code for this call"
    with pytest.warns(PipeWarning, match="has a forward hook and is cut"), pytest.raises(InputError, match=message):
        pipe(**batch(), inside=True)
    assert_same(pipe(**batch()), model(**batch()), "output", TIGHT)


@pytest.mark.slow
def test_a_cut_that_is_not_there_in_the_other_form() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: torch.Tensor, short: bool = False) -> torch.Tensor:
            x = self.first(x)
            return self.third(x if short else self.second(x))  # type: ignore[no-any-return]

    x = torch.ones(2, 2)
    pipe = pipeline(Skips(), (x,), split_spec={"second": SplitPoint.BEGINNING})
    with pytest.raises(InputError, match=r"traced again .*: split_spec names 'second', which the model does not call"):
        pipe(x, short=True)
