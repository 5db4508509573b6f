"""plan(): what it chooses, that it trains as the uncut model, and what it refuses."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import InputError, PipeError, PlanError, TrainingPlan
from pipecut.planning.choices import _default_counts, in_flight
from pipecut.schedule import plan_for, simulate
from pipecut.split.cost.machine import Machine
from pipecut.text import parse_memory
from tests.support.sampling import sampled

MACHINE = Machine(matmul_flops={torch.float32: 1e9}, memory_bandwidth=1e9, overhead=0.0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(8) for _ in range(8)))


def planned(ranks: int = 2, batch: int = 12, **options: Any) -> TrainingPlan:
    options = {"machine": MACHINE, "time_budget": 0.0} | options
    return pipecut.plan(model(), torch.ones(4, 8), ranks=ranks, batch=batch, **options)


@pytest.fixture(scope="module")
def saved_plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    planned(schedules=["1F1B"], microbatch=3).save(path)
    return path.read_text()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"schedules": ["1F1B"]}, marks=pytest.mark.slow),
        {"schedules": ["ZBVZeroBubble"], "microbatch": 3},
        {"schedules": ["1F1B"], "recompute": True},
        pytest.param({"schedules": ["1F1B", "ZB-H1"], "microbatch": 2, "time_budget": 0.3}, marks=pytest.mark.slow),
        pytest.param({"schedules": ["1F1B"], "microbatch": [2, 5]}, marks=pytest.mark.slow),
        {"schedules": ["Interleaved1F1B"], "batch": 13, "microbatch": 4},
        {"schedules": ["1F1B"], "batch": 251},
    ],
)
def test_a_plan_trains_as_the_uncut_model(options: dict[str, Any]) -> None:
    found = planned(**options)
    assert found.source is not None
    net, x, y = found.source[0], torch.randn(found.batch, 8), torch.randn(found.batch, 8)
    nn.functional.mse_loss(net(x), y).backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    schedule = found.build(loss_fn=nn.functional.mse_loss)
    schedule.tracing = True
    schedule.step(x, target=y)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    assert len(pipecut.compare(found, schedule.trace()).ranks) == 2


def test_the_chosen_one_is_the_fastest_and_the_table_says_why_others_lost() -> None:
    found = planned(memory="60kB")
    times = [each.step_time for each in found.alternatives if each.step_time is not None and "slower" in each.reason]
    assert times
    assert found.step_time <= min(times)
    assert max(found.memory) <= 60e3
    text = str(found)
    assert "why it lost" in text
    assert "slower" in text
    assert "microbatches of" in text


def test_recomputation_is_chosen_where_memory_is_short() -> None:
    """Long microbatches and little memory: keeping activations does not fit, computing them again does."""
    wide = nn.Sequential(*(Block(4) for _ in range(12)))
    example = torch.ones(512, 4)
    options: dict[str, Any] = {"ranks": 2, "batch": 4096, "microbatch": 512, "schedules": ["GPipe"], "machine": MACHINE}
    free = pipecut.plan(wide, example, **options, time_budget=0.0)
    again = pipecut.plan(wide, example, **options, recompute=True, time_budget=0.0)
    assert not free.recompute
    assert max(again.memory) < max(free.memory)
    limit = 1.02 * max(again.memory)
    tight = pipecut.plan(wide, example, **options, memory=limit, time_budget=0.0)
    assert tight.recompute
    assert tight.step_time > free.step_time


def test_uneven_ranks_get_uneven_stages() -> None:
    even, uneven = planned(schedules=["1F1B"]), planned(schedules=["1F1B"], speeds=[1.0, 3.0])
    pipes = [each.pipe() for each in (even, uneven)]
    counts = [sum(p.numel() for p in pipe.get_stage_module(1).parameters()) for pipe in pipes]
    assert counts[1] > counts[0]


def test_saved_and_loaded(tmp_path: Path) -> None:
    found = planned(schedules=["ZBVZeroBubble"])
    found.save(tmp_path / "plan.json")
    loaded = TrainingPlan.load(tmp_path / "plan.json", model(), torch.ones(4, 8))
    assert loaded.cuts == found.cuts
    assert loaded.schedule_plan.actions == found.schedule_plan.actions
    assert loaded.step_time == pytest.approx(found.step_time)
    assert loaded.memory == found.memory
    loaded.build(loss_fn=nn.functional.mse_loss).step(torch.ones(12, 8), target=torch.ones(12, 8))


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(schedules=["1F1B"]).save(path)
    with pytest.raises(InputError, match=r"was made for a Sequential with other parameters than this Linear has"):
        TrainingPlan.load(path, nn.Linear(8, 8), torch.ones(4, 8))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"version": 99}))
    with pytest.raises(InputError, match=r"has version 99 of the format, and this pipecut reads version 3"):
        TrainingPlan.load(path, model(), torch.ones(4, 8))
    for version in (True, 3.0, 2):
        path.write_text(json.dumps(content | {"version": version}))
        with pytest.raises(InputError, match=rf"has version {version!r} of the format, and this pipecut reads"):
            TrainingPlan.load(path, model(), torch.ones(4, 8))
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "cuts"}))
    with pytest.raises(InputError, match=r"is damaged \(KeyError: 'cuts'\): make the plan again"):
        TrainingPlan.load(path, model(), torch.ones(4, 8))
    path.write_text("{}")
    with pytest.raises(InputError, match=r"is not a training plan: write one with plan.save\(\)"):
        TrainingPlan.load(path, model(), torch.ones(4, 8))
    path.write_text("not json")
    with pytest.raises(InputError, match="is not a training plan: Expecting value"):
        TrainingPlan.load(path, model(), torch.ones(4, 8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory": []}, "'memory' is [] and not a list with the bytes of each rank"),
        ({"memory": ["a", "b"]}, "'memory' is ['a', 'b'] and not a list with the bytes of each rank"),
        ({"memory": [1.0, float("nan")]}, "'memory' is [1.0, nan] and not a list with the bytes of each rank"),
        ({"recompute": "no"}, "'recompute' is 'no' and not true or false"),
        ({"batch": "16"}, "'batch' is '16' and not a number of samples"),
        ({"batch": True}, "'batch' is True and not a number of samples"),
        ({"microbatch": None}, "'microbatch' is None and not a number of samples"),
        ({"microbatch": 0}, "'microbatch' is 0 and not a number of samples"),
        ({"version": 3, "inputs": [3]}, "'inputs' is [3] and not the shapes of the example by the names of arguments"),
        ({"inputs": {"input": [None, "8"]}}, "and not the shapes of the example by the names of arguments, with null"),
        ({"model": {"class": 5}}, "'class' is 5 and not a text"),
        ({"model": {"fingerprint": None}}, "'fingerprint' is None and not a text"),
        ({"schedule": {"name": 5}}, "'name' is 5 and not a text"),
        ({"batch": 3, "microbatch": 1}, "3 samples in microbatches of 1 are not the schedule's 4"),
        ({"batch": 99, "microbatch": 3}, "99 samples in microbatches of 3 are not the schedule's 4"),
        ({"cuts": []}, "'cuts' is [] and not a list with the name of each cut between the stages"),
        ({"cuts": "a"}, "'cuts' is 'a' and not a list with the name of each cut between the stages"),
        ({"cuts": [1]}, "'cuts' is [1] and not a list with the name of each cut between the stages"),
        ({"model": []}, "TypeError: list indices must be integers"),
        ({"costs": {"message_bytes": [[0, 1]]}}, "ValueError: not enough values to unpack"),
        ({"costs": {"forward": ["a", "b"]}}, "PlanError: forward[0]='a' is not a number"),
        ({"costs": {"link": {"latency": -1, "bandwidth": 1}}}, "PlanError: latency=-1 is negative"),
        ({"schedule": {"actions": [["x"], ["y"]]}}, "PlanError: Rank 0, slot 0: 'x' is not an action"),
        ({"schedule": {"rank of each stage": [0, 7]}}, "PlanError: The placement has no rank 1"),
    ],
)
def test_files_that_are_damaged(tmp_path: Path, saved_plan: str, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "plan.json"
    content = json.loads(saved_plan)
    for name, value in change.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        TrainingPlan.load(path, model(), torch.ones(4, 8))
    said = str(caught.value)
    assert said.startswith(f"{path} is damaged (")
    assert text in said
    assert said.endswith("): make the plan again with pipecut.plan()")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"memory": "1kB", "schedules": ["1F1B"]},
            PlanError,
            r"Nothing fits memory=1 kB on each rank: the least that would do is about \d",
        ),
        ({"memory": "1.2.3GB"}, InputError, "memory='1.2.3GB': write it as 24GB"),
        ({"memory": True}, InputError, "memory=True: write it as 24GB"),
        ({"memory": ["1GB"]}, InputError, "give one size for all ranks, such as '24GB', or one for each of 2"),
        ({"schedules": []}, PlanError, r"schedules=\[\]: give a list of names"),
        ({"schedules": "1F1B"}, PlanError, "schedules='1F1B': give a list of names"),
        ({"recompute": "always"}, InputError, "recompute must be True, False or 'auto', got 'always'"),
        ({"time_budget": -1}, InputError, "time_budget must be seconds, 0 or more, got -1"),
        ({"speeds": 2.0}, InputError, "speeds must be a list with a number for each rank, got 2.0"),
        ({"microbatch": 2.0}, InputError, "microbatch=2.0: give sizes from 1 to the batch, 12"),
        ({"memory": "much"}, InputError, "memory='much': write it as 24GB"),
        ({"memory": -1}, InputError, "give the bytes that a rank has, more than 0"),
        ({"ranks": 0}, InputError, "ranks must be an integer of at least 1, got 0"),
        ({"batch": 1}, InputError, r"a batch of 1 has fewer samples than there are ranks \(2\)"),
        ({"ranks": 64, "batch": 64, "schedules": ["1F1B"]}, PipeError, "can be cut into"),
        ({"schedules": ["Nope"]}, PlanError, "There is no schedule 'Nope' that trains"),
        ({"microbatch": 13}, InputError, "microbatch=13: give sizes from 1 to the batch, 12"),
        ({"speeds": [1.0, 0.0]}, PipeError, r"speeds\[1\] is 0.0: rank 1 would never finish"),
        ({"cost": "guessed"}, InputError, "cost must be 'analytic' or 'measured', got 'guessed'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        planned(**options)


def test_a_file_is_for_inputs_of_the_shapes_that_it_was_made_with(tmp_path: Path) -> None:
    """The samples may be any number; everything else was planned for."""
    path = tmp_path / "plan.json"
    planned(schedules=["1F1B"]).save(path)
    assert json.loads(path.read_text())["inputs"] == {"input": [None, 8]}
    TrainingPlan.load(path, model(), torch.ones(3, 8))
    TrainingPlan.load(path, model(), (), {"input": torch.ones(3, 8)})
    with pytest.raises(
        InputError,
        match=r"plan.json was made with an example whose input is a tensor of shape \(any, 8\), and here it is a "
        r"tensor of shape \(any, 3, 8\): load it with an example like that, or make the plan again with ",
    ):
        TrainingPlan.load(path, model(), torch.ones(2, 3, 8))


@pytest.mark.parametrize("rank", [2, -1, "0", True])
def test_a_rank_that_is_not_there(rank: Any) -> None:
    with pytest.raises(InputError, match=f"rank {rank!r} is not one of the plan's ranks, 0 to 1"):
        planned(schedules=["1F1B"]).build(rank)


def test_another_model_than_the_planned_one() -> None:
    with pytest.raises(InputError, match="this plan was made for a Sequential with other parameters than this Linear"):
        planned(schedules=["1F1B"]).pipe(nn.Linear(8, 8))


def test_measured_costs() -> None:
    found = planned(schedules=["1F1B"], cost="measured", microbatch=4)
    assert found.step_time > 0


@pytest.mark.parametrize(("text", "size"), [("24GB", 24e9), ("1 MiB", 2.0**20), ("7", 7.0), (8, 8.0)])
def test_sizes_of_memory(text: Any, size: float) -> None:
    assert parse_memory(text, 2) == [size, size]
    assert parse_memory([text, 1], 2) == [size, 1.0]
    assert parse_memory(None, 2) is None


def test_a_memory_for_each_rank() -> None:
    roomy = planned(schedules=["1F1B"])
    tight = planned(schedules=["1F1B"], memory=[0.8 * roomy.memory[0], "1GB"])
    assert tight.memory[0] <= 0.8 * roomy.memory[0]


def test_the_least_memory_that_would_do_does() -> None:
    with pytest.raises(PlanError) as caught:
        planned(schedules=["1F1B"], memory="1kB", recompute=False)
    kilobytes = float(re.search(r"about ([0-9.]+) kB", str(caught.value))[1])  # type: ignore[index]
    planned(schedules=["1F1B"], memory=1.001 * kilobytes * 1e3, recompute=False)
    with pytest.raises(PlanError):
        planned(schedules=["1F1B"], memory=0.98 * kilobytes * 1e3, recompute=False)


@pytest.mark.parametrize("rows", sampled([4, 256], lambda rows: rows == 4))
def test_the_least_memory_that_would_do_with_activations_computed_again(rows: int) -> None:
    """All activations of one microbatch are there for a while, and the inputs of those in flight."""

    def fits(memory: float) -> TrainingPlan:
        return pipecut.plan(
            model(), torch.ones(rows, 8), ranks=2, batch=4 * rows, microbatch=rows, schedules=["1F1B"],
            recompute=True, machine=MACHINE, time_budget=0.0, memory=memory,
        )  # fmt: skip

    with pytest.raises(PlanError) as caught:
        fits(1e3)
    kilobytes = float(re.search(r"about ([0-9.]+) kB", str(caught.value))[1])  # type: ignore[index]
    assert max(fits(1.001 * kilobytes * 1e3).memory) == pytest.approx(kilobytes * 1e3, rel=1e-3)
    with pytest.raises(PlanError):
        fits(0.98 * kilobytes * 1e3)


@pytest.mark.parametrize(
    ("norm", "changed"),
    [
        (nn.BatchNorm1d(4), "num_batches_tracked"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "running_mean"),
    ],
)
def test_a_forward_that_only_reads_its_statistics_may_run_twice(norm: nn.Module, changed: str) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), copy.deepcopy(norm)) for _ in range(4))).eval()
    x = torch.randn(4, 4, 4)
    options: dict[str, Any] = {"ranks": 2, "batch": 8, "schedules": ["1F1B"], "machine": MACHINE, "time_budget": 0.0}
    found = pipecut.plan(net, x, recompute=True, **options)
    assert found.recompute
    assert {each.choice.recompute for each in pipecut.plan(net, x, **options).alternatives} == {False, True}
    before = copy.deepcopy(net.state_dict())
    y = torch.randn(8, 4, 4)
    expected = copy.deepcopy(net)
    nn.functional.mse_loss(expected(y), y).backward()
    found.build(loss_fn=nn.functional.mse_loss).step(y, target=y)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).grad, parameter.grad, msg=lambda text, name=name: name)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    net.train()
    with pytest.raises(
        InputError,
        match="this plan recomputes activations, and the forward of the model, in its current mode, changes "
        rf"'0.1.{changed}': it would be changed twice; put the model in evaluation mode, or make "
        "the plan again with the model in the mode in which it trains",
    ):
        found.build()


def test_a_forward_that_changes_buffers_is_not_run_twice() -> None:
    """The running statistics of a batch norm would count every microbatch twice."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
    options: dict[str, Any] = {"ranks": 2, "batch": 8, "schedules": ["1F1B"], "machine": MACHINE, "time_budget": 0.0}
    with pytest.raises(
        InputError, match=r"recompute=True runs forwards twice, and this model's forward changes '0.1.num"
    ):
        pipecut.plan(net, torch.ones(4, 4), recompute=True, **options)
    assert not any(each.choice.recompute for each in pipecut.plan(net, torch.ones(4, 4), **options).alternatives)


def test_a_trace_for_one_size_only() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).reshape(3, 4))

    options: dict[str, Any] = {"ranks": 2, "schedules": ["1F1B"], "machine": MACHINE, "time_budget": 0.0}
    assert pipecut.plan(Fixed(), torch.ones(3, 4), batch=6, **options).microbatch == 3
    with pytest.raises(InputError, match="microbatch=2: the trace holds for microbatches of 3 samples only"):
        pipecut.plan(Fixed(), torch.ones(3, 4), batch=6, microbatch=2, **options)
    with pytest.raises(InputError, match="a batch of 7 is not a multiple of that"):
        pipecut.plan(Fixed(), torch.ones(3, 4), batch=7, **options)


def test_a_batch_that_cannot_be_divided_evenly() -> None:
    """A batch of 257 was planned as 257 microbatches of 1, as only its divisors were tried."""
    overhead = Machine(matmul_flops={torch.float32: 1e9}, memory_bandwidth=1e9, overhead=1e-5)
    found = planned(4, 257, schedules=["1F1B"], machine=overhead)
    assert found.microbatches < 64
    assert found.microbatch == -(-257 // found.microbatches)
    schedule = found.build(loss_fn=nn.functional.mse_loss)
    assert schedule.n_microbatches == found.microbatches
    tried = {(each.choice.microbatches, each.choice.microbatch) for each in found.alternatives}
    assert (257, 1) in tried
    # So are those that a user asks for: 13 samples in microbatches of at most 5.
    uneven = planned(2, 13, schedules=["1F1B"], microbatch=6)
    assert (uneven.microbatches, uneven.microbatch) == (3, 5)


def test_sizes_of_microbatches() -> None:
    assert _default_counts(12, 2) == [2, 4, 6, 12]
    assert _default_counts(7, 4) == [4, 7]
    assert _default_counts(1, 1) == [1]
    assert len(_default_counts(2**12, 2)) == 6


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble"])
def test_microbatches_in_flight_agree_with_the_simulator(name: str) -> None:
    plan = plan_for(name, ranks=3, microbatches=7)
    for stage in range(plan.stages):
        costs = pipecut.schedule.Costs(
            memory_forward=[float(index == stage) for index in range(plan.stages)],
            memory_backward_weight=[-float(index == stage) for index in range(plan.stages)],
        )
        assert max(simulate(plan, costs).peak_memory) == in_flight(plan)[stage]


def test_stages_that_compute_activations_again_keep_what_they_receive() -> None:
    """The inputs of every small block were counted, and recomputation seemed to cost memory."""
    net = nn.Sequential(*(Block(16) for _ in range(8)))
    options: dict[str, Any] = {"ranks": 4, "batch": 512, "microbatch": 64, "schedules": ["GPipe"], "machine": MACHINE}
    without, again = (
        pipecut.plan(net, torch.ones(64, 16), recompute=recompute, time_budget=0.0, **options)
        for recompute in (False, True)
    )
    for rank in range(4):
        assert again.memory[rank] < without.memory[rank]


class ReturnsItsStates(nn.Module):
    """A model whose caller gets wide states of its layers, which nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x.repeat(1, 50))
        return x, states


def test_a_plan_sends_what_its_stages_will_send() -> None:
    """It counted outputs that a training step leaves where they are: 17 times the bytes."""
    found = pipecut.plan(ReturnsItsStates(), torch.randn(8, 8), ranks=2, batch=8, microbatch=4, schedules=["1F1B"])
    edges = found.pipe().edges
    assert len(edges) == 1
    planned = found.report.costs.message_bytes
    assert isinstance(planned, dict)
    assert planned[0, 1] == 4 * 8 * 4
