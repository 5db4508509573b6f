"""Published models, unmodified, cut and trained with their own loss: gradients equal the uncut model's, by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, get_schedule_class, pipeline
from pipecut.schedule.registry import FAMILIES
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.support.transformers_models import ROWS, make

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def uncut_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    uncut = copy.deepcopy(model)
    uncut(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in uncut.named_parameters()}


def check(model: nn.Module, expected: dict[str, Tensor | None], held: set[str] | None = None) -> None:
    for name, parameter in model.named_parameters():
        if held is not None and name not in held:
            continue
        got, wanted = parameter.grad, expected[name]
        if wanted is None or got is None:
            assert not (got if wanted is None else wanted).any() if (got, wanted) != (None, None) else True, name
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def train(pipe: Pipe, schedule: str, microbatches: int, batch: dict[str, Tensor]) -> Any:
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    made: Any = get_schedule_class(schedule)
    chunks = FAMILIES[schedule].chunks
    options = {"ranks": pipe.num_stages // chunks} if chunks > 1 else {}
    return made(stages, microbatches, **options).step(**batch)


CASES = [
    ("gpt2", 2), ("mistral", 2), ("mixtral", 2), ("t5", 2), ("vit", 2), ("bart", 3), ("llama", 4), ("bert", 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "stages"), sampled(CASES, lambda case: case[0] == "llama"))
def test_cut_anywhere(name: str, stages: int) -> None:
    model, batch = make(name)
    expected = uncut_gradients(model, batch)
    uncut_keys = set(model.state_dict())
    pipe = pipeline(model, (), batch, num_stages=stages)
    keys: set[str] = set().union(*(pipe.get_stage_module(index).state_dict() for index in range(stages)))
    assert keys == uncut_keys
    for schedule in SCHEDULES if stages == 4 else SCHEDULES[1:2]:
        model.zero_grad(set_to_none=True)
        train(pipe, schedule, 3, batch)
        check(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_other_batch_sizes_and_outputs(name: str) -> None:
    """One trace, and the output in the model's own class."""
    model, batch = make(name)
    pipe = pipeline(model, (), batch, num_stages=2)
    for rows, microbatches in ((ROWS, 4), (4, 2), (1, 1)):
        part = {key: value[:rows] for key, value in batch.items()}
        expected = uncut_gradients(model, part)
        uncut = model(**part)
        model.zero_grad(set_to_none=True)
        output = train(pipe, "1F1B", microbatches, part)
        assert type(output) is type(uncut)
        torch.testing.assert_close(output.logits, uncut.logits.detach(), rtol=1e-4, atol=1e-5)
        check(model, expected)


def train_on_ranks(rank: int, name: str, schedule: str) -> None:
    model, batch = make(name)
    expected = uncut_gradients(model, batch)
    chunks = FAMILIES[schedule].chunks
    pipe = pipeline(model, (), batch, num_stages=2 * chunks)
    held = [0, 1][rank : rank + 1] if chunks == 1 else [[0, 2], [1, 3]][rank]
    stages = [pipe.build_stage(index, "cpu") for index in held]
    made: Any = get_schedule_class(schedule)
    runner = made(stages if chunks > 1 else stages[0], 3)
    runner.step(**(batch if rank == 0 else {}))
    mine = {id(parameter) for stage in stages for parameter in stage.submod.parameters()}
    names = {key for key, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in mine}
    check(model, expected, names)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "schedule"), [("llama", "1F1B"), ("gpt2", "Interleaved1F1B"), ("t5", "GPipe")])
def test_on_gloo_ranks(two_ranks: Ranks, name: str, schedule: str) -> None:
    two_ranks.run(train_on_ranks, name, schedule)
