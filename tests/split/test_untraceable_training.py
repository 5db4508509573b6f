"""Models with blocks that cannot be traced train as they do uncut, under every kind of schedule."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipecut import Pipe, PipeWarning, PlannedSchedule, Schedule1F1B, pipeline
from pipecut.schedule import plan_for
from tests.split.untraceable_models import BLOCKS, WIDTH, Branching, Counting, Experts, Tangled, sequential
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.support.training import TIGHT, assert_same_gradients, gradients_of

SCHEDULES = {"GPipe": 4, "1F1B": 4, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}


def cut(model: nn.Module, *args: Tensor, stages: int = 4, **kwargs: Any) -> Pipe:
    """A model in four stages, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pipeline(model, args, kwargs or None, num_stages=stages, tracer="fx")


def cut_blocks(block: str) -> Pipe:
    """Blocks in a row; those that count set attributes while they run, which is told, and nothing else."""
    model, x = sequential(BLOCKS[block]), torch.randn(4, WIDTH, dtype=torch.double)
    if block != "count":
        return cut(model, x)
    with pytest.warns(PipeWarning) as told:
        pipe = pipeline(model, (x,), num_stages=4, tracer="fx")
    assert [str(warning.message).partition(". ")[0] for warning in told] == [
        "2.calls, 2.diary, 5.calls, 5.diary of Sequential are set while a module runs that stays as it is"
    ]
    return pipe


def uncut_by_microbatches(model: nn.Module, loss_fn: Any, parts: list[dict[str, Tensor]], targets: list[Tensor]) -> Any:
    """Gradients and loss of a copy of the model: what decides by values, decides for each microbatch."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    total = sum(len(target) for target in targets)
    loss = 0.0
    for part, target in zip(parts, targets, strict=True):
        share = loss_fn(model(**part), target) * (len(target) / total)
        share.backward()
        loss += share.item()
    return gradients_of(model), loss, model


def assert_trains(pipe: Pipe, name: str, inputs: dict[str, Tensor], target: Tensor, loss_fn: Any, count: int) -> None:
    """A step under a schedule against the uncut model; afterwards both hold the same buffers."""
    model = pipe.traced.model
    pieces = {key: value.tensor_split(count) for key, value in inputs.items()}
    parts = [{key: pieces[key][nth] for key in pieces} for nth in range(count)]
    expected, loss, reference = uncut_by_microbatches(model, loss_fn, parts, list(target.tensor_split(count)))
    model.zero_grad(set_to_none=True)
    ranks = SCHEDULES[name]
    plan = plan_for(name, ranks=ranks, chunks=4 // ranks, microbatches=count)
    stages = [pipe.build_stage(index, "cpu") for index in range(4)]
    schedule = PlannedSchedule(stages, plan, loss_fn)
    schedule.step(target=target, **cast("dict[str, Any]", inputs))
    assert abs(schedule.mean_loss() - loss) <= TIGHT
    assert_same_gradients(gradients_of(model), expected, TIGHT)
    for key, buffer in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(key), buffer, rtol=0, atol=TIGHT)


@pytest.mark.parametrize("block", sampled(BLOCKS, lambda block: block in ("branch", "numpy")))
def test_blocks_in_a_row(block: str) -> None:
    pipe = cut_blocks(block)
    assert [item.path for item in pipe.traced.fallbacks] == ["2", "5"]
    for name, samples in itertools.product(SCHEDULES, (10, 7)):  # uneven microbatches: 3, 3, 2, 2 and 2, 2, 2, 1
        torch.manual_seed(samples)
        x, y = torch.randn(2, samples, WIDTH, dtype=torch.double)
        assert_trains(pipe, name, {"input": x}, y, nn.functional.mse_loss, 4)


def tangled_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean over samples; all of what the model returns counts."""
    return nn.functional.cross_entropy(output["logits"], target) + output["weight"].mean()


@pytest.mark.slow
def test_a_tangled_model() -> None:
    torch.manual_seed(0)
    model = Tangled().double()
    pipe = cut(model, torch.randint(12, (4,)), scale=torch.rand(4, dtype=torch.double))
    assert [item.path for item in pipe.traced.fallbacks] == ["opaque"]
    assert [tie.names for tie in pipe.tied_parameters] == [("embed.weight", "head.weight")]
    for name, samples in itertools.product(SCHEDULES, (9, 8)):
        inputs = {"ids": torch.randint(12, (samples,)), "scale": torch.randn(samples, dtype=torch.double)}
        assert_trains(pipe, name, inputs, torch.randint(12, (samples,)), tangled_loss, 4)


def test_the_stages_run_the_users_own_code() -> None:
    pipe = cut_blocks("count")
    original: Any = pipe.traced.model.get_submodule("2")
    assert (original.calls, original.diary, original.rows.item()) == (0, [], 0)  # the trace ran on copies
    pipe(torch.randn(3, WIDTH, dtype=torch.double))
    pipe(torch.randn(5, WIDTH, dtype=torch.double))
    stage = next(stage for stage in pipe.stages if "2.rows" in stage.state_dict())
    kept = cast("Counting", stage.get_submodule("2"))
    assert type(kept) is Counting
    assert (kept.calls, len(kept.diary), kept.rows.item()) == (2, 2, 8)


def train_on_a_rank(rank: int) -> dict[str, Tensor | None]:
    """One step of 1F1B on this rank, with a model that all ranks make alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Branching(), nn.Linear(WIDTH, WIDTH), Experts()).double()
    x, y = torch.randn(2, 7, WIDTH, dtype=torch.double)
    pipe = cut(model, x[:3], stages=2)
    parts = [{"input": part} for part in x.tensor_split(3)]
    expected, _, _ = uncut_by_microbatches(model, nn.functional.mse_loss, parts, list(y.tensor_split(3)))
    stage = pipe.build_stage(rank, "cpu")
    schedule = Schedule1F1B(stage, n_microbatches=3, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    names = set(dict(stage.submod.named_parameters()))
    assert_same_gradients(
        {name: gradient for name, gradient in gradients_of(model).items() if name in names},
        {name: gradient for name, gradient in expected.items() if name in names},
        TIGHT,
    )
    return gradients_of(stage.submod)


@pytest.mark.slow
def test_on_two_ranks() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(train_on_a_rank)
    assert {name.split(".")[0] for name in (*first, *second)} == {"0", "1", "2", "3"}
    assert any(gradient is not None for gradient in second.values())


def test_train_and_eval() -> None:
    torch.manual_seed(0)
    model = Tangled().double()
    ids, scale = torch.randint(12, (5,)), torch.rand(5, dtype=torch.double)
    pipe = cut(model, ids[:4], scale=scale[:4])
    for mode in (True, False):
        pipe.train(mode)
        model.train(mode)
        expected = model(ids, scale=scale)
        actual = pipe(ids, scale=scale)
        assert actual.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(actual[key], expected[key], rtol=0, atol=0)
