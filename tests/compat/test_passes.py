"""The lowering passes give the lists that upstream's own functions give, and files written by one load in the other."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut.compat import PipelineStage
from pipecut.compat import schedules as ours
from pipecut.compat._schedule_visualizer import get_schedule_ops
from pipecut.schedule import Placement

GRID = [
    (name, ranks, chunks, microbatches)
    for name, choices in (
        ("Interleaved1F1B", (2, 3)),
        ("LoopedBFS", (2, 4)),
        ("InterleavedZeroBubble", (2, 3)),
        ("ZBVZeroBubble", (2,)),
        ("DualPipeV", (2,)),
    )
    for ranks in (1, 2, 4)
    for chunks in choices
    for microbatches in (2, 4, 8)
    if name != "DualPipeV" or microbatches >= 2 * ranks
]
SAMPLED_GRID = [each if each[3] == 4 else pytest.param(each, marks=pytest.mark.slow) for each in GRID]


def texts(rows: Any) -> Any:
    if isinstance(rows, dict):
        return {rank: texts(row) for rank, row in rows.items()}
    return [repr(action) for action in rows]


def placement(name: str, ranks: int, chunks: int) -> Placement:
    return Placement.v(ranks) if name in ("ZBVZeroBubble", "DualPipeV") else Placement.loop(ranks, chunks)


def order(texts: Iterable[str]) -> dict[int, list[Any]]:
    return {rank: [ours._Action.from_str(cell) for cell in row.split(" ")] for rank, row in enumerate(texts)}


@pytest.mark.upstream
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_every_pass_gives_what_upstreams_gives(setting: tuple[str, int, int, int]) -> None:
    from torch.distributed.pipelining import schedules as upstream

    name, ranks, chunks, microbatches = setting
    mine = dict(enumerate(get_schedule_ops(name, ranks, microbatches, chunks)))
    theirs = {rank: [upstream._Action.from_str(repr(each)) for each in row] for rank, row in mine.items()}
    where, stages = placement(name, ranks, chunks).rank_of.__getitem__, ranks * chunks

    def same(function: str, *args: Any) -> Any:
        """Call a function of both, and compare; upstream's changes what it gets."""
        results = []
        for module, row in ((ours, args[0]), (upstream, args[1])):
            copied = {key: list(value) for key, value in row.items()} if isinstance(row, dict) else list(row)
            results.append(getattr(module, function)(copied, *args[2:]))
        assert texts(results[0]) == texts(results[1]), function
        return results

    for rank in mine:
        same("_merge_bw", mine[rank], theirs[rank])
        for held in (1, 2, 3):
            same("_add_unshard_reshard", mine[rank], theirs[rank], held)
        same("_add_reduce_grad", mine[rank], theirs[rank], microbatches)
    bare = same("_add_send_recv", mine, theirs, where, stages)
    same("_defer_recv_ops", *bare, where)
    if name != "DualPipeV":  # upstream's simulator does not know overlaps
        same("_simulate_comms_compute", *bare, where, stages)
    sharded = [
        {
            rank: module._add_reduce_grad(module._add_unshard_reshard(list(row)), microbatches)
            for rank, row in rows.items()
        }
        for module, rows in ((ours, mine), (upstream, theirs))
    ]
    same("_defer_recv_ops", *same("_add_send_recv", *sharded, where, stages), where)
    for step in (None, 1):
        assert ours._format_pipeline_order(mine, step) == upstream._format_pipeline_order(theirs, step)
    assert ours._validate_schedule(mine, ranks, stages, microbatches) == upstream._validate_schedule(
        theirs, ranks, stages, microbatches
    )


@pytest.mark.upstream
@pytest.mark.parametrize("setting", SAMPLED_GRID, ids=str)
def test_the_orders_of_built_in_schedules_are_upstreams(setting: tuple[str, int, int, int]) -> None:
    from torch.distributed.pipelining import _schedule_visualizer as upstream

    name, ranks, chunks, microbatches = setting
    theirs = upstream.get_schedule_ops(name, ranks, microbatches, chunks)
    without_bubbles = [[action for action in row if action is not None] for row in theirs]
    assert [texts(row) for row in get_schedule_ops(name, ranks, microbatches, chunks)] == [
        texts(row) for row in without_bubbles
    ]
    with_comms = upstream.get_schedule_ops(name, ranks, microbatches, chunks, with_comms=True)
    mine = get_schedule_ops(name, ranks, microbatches, chunks, with_comms=True)
    assert [texts(row) for row in mine] == [texts(row) for row in with_comms]


@pytest.mark.upstream
def test_files_written_by_one_load_in_the_other(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules as upstream
    from torch.distributed.pipelining.stage import _PipelineStageBase

    def on_paper(base: Any) -> list[Any]:
        names = ("_create_grad_recv_info", "_prepare_forward_infra", "_prepare_backward_infra")
        kind = type("OnPaper", (base,), {"__init__": lambda self: None, **dict.fromkeys(names, lambda self: None)})
        made = [kind(), kind()]
        for stage in made:
            stage.num_stages, stage.group_size, stage.group_rank, stage.group, stage.submod = 4, 2, 0, None, None
        return made

    from pipecut.compat.stage import _PipelineStageBase as own_base

    for kind in ("compute_only", "compute_comms"):
        one = ours.ScheduleInterleaved1F1B(on_paper(own_base), 4)
        other = upstream.ScheduleInterleaved1F1B(on_paper(_PipelineStageBase), 4)
        one._dump_csv(str(tmp_path / "ours.csv"), kind)
        other._dump_csv(str(tmp_path / "theirs.csv"), kind)
        ours_again = ours._PipelineScheduleRuntime(on_paper(own_base), 4)
        ours_again._load_csv(str(tmp_path / "theirs.csv"), kind)
        theirs_again = upstream._PipelineScheduleRuntime(on_paper(_PipelineStageBase), 4)
        theirs_again._load_csv(str(tmp_path / "ours.csv"), kind)
        assert texts(ours_again.pipeline_order_with_comms) == texts(other.pipeline_order_with_comms)
        assert {
            rank: [text for text in row if text != "None"]
            for rank, row in texts(theirs_again.pipeline_order_with_comms).items()
        } == texts(one.pipeline_order_with_comms)


def test_the_caller_s_order_stays_as_it_is() -> None:
    given = order(["0F0 0B0", "1F0 1B0"])
    ours._add_send_recv(given, lambda stage: stage, 2)
    assert texts(given) == {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}


def test_an_action_is_a_named_tuple_with_text() -> None:
    for text in ("1F0", "2I1", "0W3", "0B3", "1UNSHARD", "2SEND_B2", "(1F1;2B0)OVERLAP_F_B"):
        assert repr(ours._Action.from_str(text)) == text
    stage, kind, microbatch, parts = ours._Action(1, ours.F, 0)
    assert (stage, kind, microbatch, parts) == (1, ours.FORWARD, 0, None)
    assert ours._Action.from_str("  ") is None
    assert ours._Action(1, ours.F, 0) == ours._Action.from_str("1F0") != ours._Action(1, ours.F, 1)
    assert ours._Action(0, ours.OVERLAP_F_B).is_compute_op
    assert not ours._Action(0, ours.SEND_F, 0).is_compute_op
    with pytest.raises(RuntimeError, match="Invalid action string: '1F0garbage' is not an action"):
        ours._Action.from_str("1F0garbage")
    with pytest.raises(RuntimeError, match="Invalid computation type Q. Known are F, I"):
        ours._ComputationType.from_str("Q")


def test_a_bad_schedule_is_an_assertion_error_with_every_fault() -> None:
    with pytest.raises(AssertionError, match="expected 2, actual 1"):
        ours._validate_schedule(order(["0F0 0B0"]), 2, 2, 1)
    with pytest.raises(AssertionError, match="The schedule cannot run:"):
        ours._validate_schedule(order(["0B0 0F0", "1F0 1B0"]), 2, 2, 1)
    with pytest.raises(AssertionError, match="The schedule cannot run:"):
        ours._validate_schedule(order(["0F0", "1F0 1B0"]), 2, 2, 1)


@pytest.mark.parametrize(
    "rows",
    [
        ["0F0 0SEND_F0 0B0", "1F0 1B0"],
        ["0UNSHARD 0F0 0RECV_B0 0B0 0RESHARD 0REDUCE_GRAD", "1RECV_F0 1F0 1B0 1SEND_B0"],
    ],
)
def test_only_computations_are_validated(rows: list[str]) -> None:
    assert ours._validate_schedule(order(rows), 2, 2, 1) == {0: 0, 1: 1}


def test_messages_of_a_bad_schedule_are_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="0B0"):
        ours._add_send_recv(order(["0B0", "1F0 1B0"]), lambda stage: stage, 2)
    with pytest.raises(AssertionError, match="has transfers already"):
        ours._add_send_recv(order(["0F0 0SEND_F0 0B0", "1F0 1B0"]), lambda stage: stage, 2)


def test_a_simulation_without_messages_does_not_go_on() -> None:
    with pytest.raises(ValueError, match="Schedule is not progressing: rank 0 at 0B0, rank 1 at 1F0"):
        ours._simulate_comms_compute(order(["0F0 0B0", "1F0 1B0"]), lambda stage: stage, 2)
    with pytest.raises(ValueError, match="Unsupported action type UNSHARD"):
        ours._simulate_comms_compute(order(["0UNSHARD 0F0 0B0"]), lambda stage: stage, 1)


OLD = ["0F0 0F1 0B0 0W0 0B1 0W1", "1F0 1B0 1F1 1W0 1B1 1W1"]
OLD_WITH_MESSAGES = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0W0 0RECV_B1 0B1 0W1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1W0 1B1 1SEND_B1 1W1",
]


def test_a_b_that_a_w_follows_goes_through_all_passes() -> None:
    """Orders were once written with B for the input gradients alone, which `_add_send_recv` refused."""
    given = order(OLD)
    lowered = ours._add_send_recv(given, lambda stage: stage, 2)
    assert texts(lowered) == texts(order(OLD_WITH_MESSAGES))
    assert texts(ours._simulate_comms_compute(lowered, lambda stage: stage, 2)[0])[:5] == [
        "0F0", "0SEND_F0", "0F1", "0SEND_F1", "None"
    ]  # fmt: skip
    assert texts(ours._defer_recv_ops(lowered, lambda stage: stage)[0]) == texts(order(OLD_WITH_MESSAGES)[0])
    assert ours._validate_schedule(given, 2, 2, 2) == {0: 0, 1: 1}
    for row in given.values():
        assert texts(ours._merge_bw(row)) == texts(row)
        assert [text for text in texts(ours._add_unshard_reshard(row)) if "SHARD" not in text] == texts(row)
    assert texts(ours._add_reduce_grad(given[0], 4))[-2:] == ["0W1", "0REDUCE_GRAD"]


@pytest.mark.upstream
def test_upstreams_passes_over_the_old_notation_give_the_same() -> None:
    from torch.distributed.pipelining import schedules as upstream

    given = {rank: [upstream._Action.from_str(text) for text in row.split(" ")] for rank, row in enumerate(OLD)}
    lowered = upstream._add_send_recv(given, lambda stage: stage, 2)
    assert texts(lowered) == texts(order(OLD_WITH_MESSAGES))
    slots = upstream._simulate_comms_compute(lowered, lambda stage: stage, 2)
    assert texts(slots) == texts(ours._simulate_comms_compute(order(OLD_WITH_MESSAGES), lambda stage: stage, 2))


@pytest.mark.parametrize("rows", [OLD, OLD_WITH_MESSAGES])
def test_a_b_that_a_w_follows_runs_as_an_i(rows: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    stages = [PipelineStage(module, index, 2, "cpu") for index, module in enumerate(model)]
    schedule = ours._PipelineScheduleRuntime(stages, 2, nn.functional.mse_loss)
    schedule._prepare_schedule_with_comms(order(rows), "compute_only" if rows is OLD else "compute_comms")
    schedule.step(x, target=y)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
    if rows is OLD:
        assert texts(schedule.pipeline_order_with_comms)[1][-3:] == ["1W1", "1REDUCE_GRAD", "1RESHARD"]


def test_faults_across_ranks_are_found_though_each_rank_is_in_order() -> None:
    with pytest.raises(AssertionError, match="The schedule cannot run:"):
        ours._validate_schedule(order(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"]), 2, 2, 2)
    for rows in (["0F0 0B0 0B0", "1F0 1B0"], ["0F0 0B0 1F0", "1B0"], ["0F0 0B0", "1F0 1B0 1W0 1W0"], ["0F3 0B3", ""]):
        with pytest.raises(AssertionError, match=r"\d[FBW]\d|microbatch|stage"):
            ours._validate_schedule(order(rows), 2, 2, 1)


def test_what_the_tables_do_not_know_is_named() -> None:
    with pytest.raises(AssertionError, match="Rank 1 has 2F0: the stages are 0 to 1, on ranks 0, 1"):
        ours._add_send_recv(order(["0F0", "2F0"]), lambda stage: stage, 2)
    with pytest.raises(AssertionError, match="Rank 0 has 0F0: the stages are 0 to 1, on ranks 0. Add what is missing"):
        ours._add_send_recv(order(["0F0"]), lambda stage: stage, 2)
    with pytest.raises(ValueError, match="2F0 is of no stage: there are 2"):
        ours._simulate_comms_compute(order(["0F0", "2F0"]), lambda stage: stage, 2)
    with pytest.raises(AssertionError, match="Rank 1 receives what nothing on it uses: 1RECV_F0"):
        ours._defer_recv_ops(order(["0F0 0SEND_F0", "1RECV_F0"]), lambda stage: stage)
