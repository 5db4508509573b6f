"""Plans of several pipelines side by side: their number, collectives and memory; built and run on four ranks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecut
from pipecut import InputError, Machine, PlanError
from pipecut.planning.replicas import Layout, layouts
from pipecut.schedule import Costs, Op, Plan, simulate
from tests.planning import replica_cases as cases
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

MACHINE = dataclasses.replace(cases.MACHINE, link_latency=1e-6)
HOSTS = dataclasses.replace(MACHINE, network_bandwidth=1e8, ranks_per_host=2)


def test_collectives_in_the_simulation() -> None:
    """Gathers pass beside what the rank waits for; averages take the time of their rank, beside other ranks."""
    rows = {
        0: ["0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD", "0RESHARD"],
        1: ["1UNSHARD", "1F0", "1B0", "1REDUCE_GRAD", "1RESHARD"],
    }
    costs = Costs(forward=2, backward_input=2, backward_weight=1, unshard=[1, 4], reduce_grad=[5, 2])
    report = simulate(Plan.from_actions(rows), costs)
    spans = {str(span.action): (span.start, span.end) for span in report.timeline}
    assert spans == {
        "0F0": (1, 3), "1F0": (4, 6), "1B0": (6, 9), "1REDUCE_GRAD": (9, 11), "0B0": (9, 12), "0REDUCE_GRAD": (12, 17),
    }  # fmt: skip
    assert report.makespan == 17


def test_gathers_of_one_rank_follow_each_other() -> None:
    rows = [["0UNSHARD", "1UNSHARD", "0F0", "1F0", "1B0", "0B0"]]
    report = simulate(Plan.from_actions(rows), Costs(forward=[1, 1], unshard=[3, 3]))
    assert [span.start for span in report.timeline][:2] == [3, 6]


@pytest.mark.parametrize(
    ("inner", "pipeline", "copies"), [("dp", 1e8, MACHINE.link_bandwidth), ("pp", MACHINE.link_bandwidth, 1e8)]
)
def test_links_within_and_between_hosts(inner: Any, pipeline: float, copies: float) -> None:
    """Two hosts of two ranks: neighbours have the link within a host, the other dim the network."""
    layout = Layout(4, 2, "ddp", inner)
    assert layout.machine(HOSTS).link_bandwidth == pipeline
    assert layout.copy_link(HOSTS).bandwidth == copies


def test_layouts_with_the_same_links_are_tried_once() -> None:
    assert [layout.inner for layout in layouts(4, 2, ["ddp"], HOSTS)] == ["dp", "pp"]
    assert [layout.inner for layout in layouts(4, 2, ["ddp"], MACHINE)] == ["dp"]
    assert [layout.wrapper for layout in layouts(4, 1, ["ddp", "fully_shard"], MACHINE)] == [""]


@pytest.mark.parametrize("inner", ["dp", "pp"])
def test_every_rank_has_one_place(inner: Any) -> None:
    layout = Layout(12, 3, "ddp", inner)
    ranks = {layout.rank(place, copy): place for place in range(layout.depth) for copy in range(3)}
    assert sorted(ranks) == list(range(12))
    assert all(layout.place(rank) == place for rank, place in ranks.items())
    assert layout.least([10.0 + rank for rank in range(12)]) == [
        10.0 + min(rank for rank, at in ranks.items() if at == place) for place in range(layout.depth)
    ]


def test_the_times_of_collectives_are_those_of_rings() -> None:
    """An all-reduce of n bytes over r ranks sends 2 (r - 1) parts of n / r bytes one after the other."""
    found = cases.planned(schedules=["1F1B"], wrapper="ddp", microbatch=2, machine=MACHINE, recompute=False)
    parameters = sum(parameter.nbytes for parameter in cases.model().parameters())
    times = found.report.costs.collective_times(found.schedule_plan)
    assert sum(times[Op.UNSHARD]) == 0
    expected = 2 * (parameters / 2 / MACHINE.link_bandwidth + 2 * MACHINE.link_latency)
    assert sum(times[Op.REDUCE_GRAD]) == pytest.approx(expected)
    sharded = cases.planned(schedules=["1F1B"], wrapper="fully_shard", microbatch=2, machine=MACHINE, recompute=False)
    both = sharded.report.costs.collective_times(sharded.schedule_plan)
    assert sum(map(sum, both.values())) == pytest.approx(expected)


def test_shards_need_less_memory_than_copies() -> None:
    """While it computes, a rank has all parameters and gradients of its stages, and a part of what Adam keeps."""
    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options: dict[str, Any] = {"ranks": 8, "batch": 8, "replicas": 4, "machine": MACHINE, "time_budget": 0.0}
    options |= {"schedules": ["1F1B"], "microbatch": 1, "recompute": False}
    copied, sharded = (
        pipecut.plan(wide, torch.ones(1, 64), wrapper=wrapper, **options).memory[0]
        for wrapper in ("ddp", "fully_shard")
    )
    held = 2 * (64 * 64 + 64) * 4
    assert copied - sharded == pytest.approx((4 - (2 + 4 / 4)) * held)
    limit = (copied + sharded) / 2
    assert pipecut.plan(wide, torch.ones(1, 64), memory=limit, **options).layout.wrapper == "fully_shard"
    with pytest.raises(PlanError, match=r"Nothing fits memory=.* on each rank"):
        pipecut.plan(wide, torch.ones(1, 64), memory=limit, wrapper="ddp", **options)


def test_the_best_number_of_pipelines_is_found() -> None:
    """With free collectives many pipelines win, having no bubble; with dear ones a single one."""
    free = dataclasses.replace(MACHINE, link_latency=0.0, link_bandwidth=1e15)
    dear = dataclasses.replace(MACHINE, link_latency=0.0, link_bandwidth=1e6)
    options: dict[str, Any] = {"replicas": "auto", "schedules": ["1F1B", "GPipe"], "recompute": False}
    assert cases.planned(machine=free, microbatch=1, **options).replicas == 4
    found = cases.planned(machine=dear, microbatch=[3, 6], **options)
    assert found.replicas == 1
    assert found.layout.wrapper == ""
    assert [each.choice.layout.replicas for each in found.factorisations] == [1, 2, 4]
    text = str(found)
    assert "pipelines side by side, the best plan for each number of them" in text
    assert "1 x 4" in text
    assert "4 x 1, ddp" in text


def test_no_choice_that_is_left_out_would_be_better() -> None:
    """Choices whose work alone takes longer than the best plan are not tried: all of them, tried alone, are slower."""
    options: dict[str, Any] = {"batch": 24, "schedules": ["1F1B", "ZB-H1"], "machine": MACHINE}
    found = cases.planned(replicas="auto", **options)
    alone = {count: cases.planned(replicas=count, **options) for count in (1, 2, 4)}
    assert found.step_time == pytest.approx(min(each.step_time for each in alone.values()))
    skipped = [each for each in found.alternatives if "its work alone takes" in each.reason]
    assert skipped
    tried = {each.choice: each.step_time for plan in alone.values() for each in plan.alternatives}
    assert all((tried.get(each.choice) or found.step_time) >= found.step_time for each in skipped)


def test_a_batch_that_cannot_be_divided() -> None:
    found = cases.planned(replicas="auto", batch=6, schedules=["1F1B"])
    assert found.left_out == ("4 pipelines: a batch of 6 cannot be divided evenly among 4 pipelines",)
    assert "not tried: 4 pipelines" in str(found)
    with pytest.raises(InputError, match=r"replicas=4: 4 ranks and a batch of 6 .* give a number that divides both"):
        cases.planned(replicas=4, batch=6)
    with pytest.raises(InputError, match="replicas must be 'auto' or an integer of at least 1, got 0"):
        cases.planned(replicas=0)
    with pytest.raises(InputError, match=r"wrapper='fsdp' is not known.*Give auto, ddp, fully_shard"):
        cases.planned(wrapper="fsdp")
    with pytest.raises(InputError, match="speeds has 2 values, and there are 4 ranks: give one for each rank"):
        cases.planned(speeds=[1.0, 2.0])


def test_one_pipeline_in_this_process() -> None:
    """Without a rank it is one of the pipelines, without copies."""
    found = cases.planned(schedules=["1F1B"])
    x, y = cases.batch()
    half = len(x) // 2
    found.build(loss_fn=nn.functional.mse_loss).step(x[:half], target=y[:half])


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", sampled(["ddp", "fully_shard"], lambda wrapper: wrapper == "ddp"))
def test_gradients_on_two_pipelines_of_two_ranks(four_ranks: Ranks, tmp_path: Path, wrapper: str) -> None:
    _check_gradients(four_ranks, tmp_path, {"wrapper": wrapper, "schedules": ["1F1B"], "recompute": False})


SCHEDULES = ("GPipe", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble")
KINDS = list(itertools.product(SCHEDULES, ("ddp", "fully_shard"), (False, True), (MACHINE, HOSTS)))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("schedule", "wrapper", "recompute", "machine"),
    sampled(KINDS, lambda kind: False, lambda kind: kind[2] == (kind[3] is MACHINE)),
)
def test_gradients_under_every_kind_of_schedule(
    four_ranks: Ranks, tmp_path: Path, schedule: str, wrapper: str, recompute: bool, machine: Machine
) -> None:
    options = {"wrapper": wrapper, "schedules": [schedule], "recompute": recompute, "machine": machine}
    _check_gradients(four_ranks, tmp_path, options)


def _check_gradients(ranks: Ranks, folder: Path, options: dict[str, Any]) -> None:
    """Every parameter is on both pipelines, and its gradient there is that of the whole batch in the uncut model."""
    found = ranks.run(cases.gradients_as_planned, str(folder), options)
    for part in range(2):
        off = {name: far for place, each in found if place == part for name, far in each.items()}
        assert sorted(off) == sorted(name for name, _ in cases.model().named_parameters())
        assert max(off.values()) < 1e-6


@pytest.mark.slow
@pytest.mark.distributed
def test_the_plan_makes_its_groups_itself(four_ranks: Ranks) -> None:
    for text in four_ranks.run(cases.refuses_a_group):
        assert "a plan of 2 pipelines makes the groups of all its 4 ranks" in text
        assert "call build(rank, device) without a group" in text


def test_a_plan_says_how_its_times_were_got_and_what_they_were_worth(tmp_path: Path) -> None:
    net, x = cases.model(), torch.ones(2, cases.WIDTH)
    found = pipecut.plan(net, x, ranks=2, batch=4, schedules=["1F1B"], machine="a100", time_budget=0.0)
    assert "times: computed from operations and bytes, for a100: matrix products" in str(found)
    assert "source: NVIDIA A100 80GB" in str(found)
    assert "no executed step was compared with them yet (pipecut.compare)" in str(found)
    pipecut.schedule.compare(found, found.report.timeline)
    found.note_executed(1.5)
    assert "2 steps took 1.00 to 1.50 of the predicted time, 1.25 at the median" in str(found)
    found.save(tmp_path / "plan.json")
    assert pipecut.TrainingPlan.load(tmp_path / "plan.json", net, x).executed == [1.0, 1.5]


def test_a_schedule_for_the_link_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """On two hosts the messages go over the network, which is nine times as slow."""
    costs = Costs(forward=1e-3, backward_input=1e-3, backward_weight=1e-3, message_bytes=4.5e6)
    times = {}
    for ranks in (2, 16):
        linked = costs.on(Machine.named("h100"), ranks)
        times[ranks] = linked.transfer.time(4.5e6) - 1e-5  # type: ignore[union-attr]
    assert times[16] == pytest.approx(9 * times[2])
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "placement": "loop", "chunks": 1, "time_budget": 0.0}
    plan = pipecut.schedule.auto_schedule(costs=costs, machine=Machine.named("h100"), **options)
    assert plan == pipecut.schedule.auto_schedule(costs=costs.on(Machine.named("h100"), 2), **options)
    with pytest.raises(PlanError, match=r"machine='h100': give a pipecut.Machine, such as pipecut.Machine.named"):
        pipecut.schedule.auto_schedule(costs=costs, machine="h100", **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="give message_bytes too"):
        pipecut.schedule.auto_schedule(machine=Machine.named("h100"), **options)
