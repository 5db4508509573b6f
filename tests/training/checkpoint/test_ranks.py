"""Ranks save one checkpoint together; one process, other ranks, replicas and shards go on from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipecut import CheckpointError, load_checkpoint
from tests.support.ranks import Ranks
from tests.training.checkpoint import rank_cases
from tests.training.checkpoint.jobs import Job, Tied, assert_same, joined, make_job

PER_RANK = ("lr", "scheduler", "generator")


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in PER_RANK}


def loaded_here(ranks: int, folder: Path, name: str = "1F1B", **options: Any) -> Job:
    job = make_job(ranks, name, **options)
    load_checkpoint(folder, job.schedule, job.optimizer, scheduler=job.scheduler)
    return job


def test_two_ranks_and_one_process_go_on_from_each_other(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks.run(rank_cases.save_here, str(tmp_path), "1F1B")
    alone = make_job(2)
    alone.train(0, 6)
    job = loaded_here(1, tmp_path)
    assert_same(job.state, joined([state for _, state in saved]))
    again = loaded_here(2, tmp_path)
    again.train(3, 6)
    assert saved[0][0] + again.losses == alone.losses
    went_on = two_ranks.run(rank_cases.go_on_here, str(tmp_path), "Interleaved1F1B")
    plain = two_ranks.run(rank_cases.train_here, "Interleaved1F1B")
    for (losses, state, step, place, rank), (all_losses, all_state), number in zip(went_on, plain, (0, 1), strict=True):
        assert (step, place, rank) == (3, 30, number)
        assert losses == all_losses[3:]
        assert_same(state, all_state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_four_ranks_go_on_where_two_stopped(name: str, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(rank_cases.save_here, str(tmp_path), name)
    went_on = four_ranks.run(rank_cases.go_on_here, str(tmp_path), name)
    plain = four_ranks.run(rank_cases.train_here, name)
    for (losses, state, *_), (all_losses, all_state) in zip(went_on, plain, strict=True):
        assert losses == all_losses[3:]
        assert_same(state, all_state)


def test_a_tied_parameter_is_saved_once_and_loaded_by_all_that_hold_it(two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks.run(rank_cases.save_here, str(tmp_path), "1F1B", Tied)
    together = joined([state for _, state in saved])
    assert_same(loaded_here(3, tmp_path, kind=Tied).state, together)
    went_on = two_ranks.run(rank_cases.go_on_here, str(tmp_path), "1F1B", Tied)
    plain = two_ranks.run(rank_cases.train_here, "1F1B", Tied)
    for (losses, state, *_), (all_losses, all_state) in zip(went_on, plain, strict=True):
        assert losses == all_losses[3:]
        assert_same(state, all_state)


def test_schedulers_over_the_second_of_two_optimizers_have_the_groups_of_that(two_ranks: Ranks, tmp_path: Path) -> None:
    """They were put together by the groups of the first optimizer, and one in extra= not at all."""
    two_ranks.run(rank_cases.save_two_optimizers, str(tmp_path))
    job, optimizers, (of_first, of_second) = rank_cases.two_optimizers(1)
    name = "of\\first's"
    loaded = load_checkpoint(tmp_path, job.schedule, optimizers, scheduler=of_second, extra={name: of_first})
    assert loaded.extra.keys() == {name, "a\nb"}
    assert (of_first.base_lrs, of_second.base_lrs) == ([0.3], [0.1, 0.2])
    assert of_second.get_last_lr() == [0.05, 0.1]
    assert [group["lr"] for each in optimizers for group in each.param_groups] == [0.15, 0.05, 0.1]

    class Wrapped:
        """A scheduler that does not say which optimizer it is over."""

        state_dict, load_state_dict = of_second.state_dict, of_second.load_state_dict

    with pytest.raises(CheckpointError, match="not known which of 2 optimizers it is over.*give it that attribute"):
        load_checkpoint(tmp_path, job.schedule, optimizers, scheduler=Wrapped())


def test_a_list_of_a_scheduler_that_is_not_by_group_stays(two_ranks: Ranks, tmp_path: Path) -> None:
    """Milestones [5, 10] became [5, 5] where two ranks with a group each were loaded as two groups of one rank."""
    two_ranks.run(rank_cases.save_milestones, str(tmp_path))
    job, scheduler = rank_cases.milestones_job(1, milestones=[3, 4])
    load_checkpoint(tmp_path, job.schedule, job.optimizer, scheduler=scheduler)
    state = scheduler.state_dict()
    assert state["_milestones"] == [5, 10]
    assert [each["base_lrs"] for each in state["_schedulers"]] == [[0.1, 0.2]] * 3
    assert state["_last_lr"] == [0.05, 0.1]


def test_ranks_that_have_lost_each_other_do_not_meet_out_of_step(two_ranks: Ranks) -> None:
    """A message that was given up met that of the next call: gloo aborted one process, and the other read garbage."""
    for late, closed, different, also_closed in two_ranks.run(rank_cases.lose_each_other):
        assert "did not come to the checkpoint within 0.2 s" in late
        assert "call: save_checkpoint on rank 0; load_checkpoint on rank 1" in different
        for told in (closed, also_closed):
            assert re.search("lost each other in an earlier (save|load)_checkpoint.*make theirs anew", told)


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "other"), [("ddp", "fsdp"), pytest.param("fsdp", "ddp", marks=pytest.mark.slow)])
def test_copies_and_shards_are_saved_whole(wrapper: str, other: str, two_ranks: Ranks, tmp_path: Path) -> None:
    saved = two_ranks.run(rank_cases.save_hybrid, str(tmp_path), wrapper)
    loaded = two_ranks.run(rank_cases.load_hybrid, str(tmp_path), other)
    for one, two in zip(saved, loaded, strict=True):
        assert_same(one, two)
    job = loaded_here(3, tmp_path)
    assert_same(tensors(job.state), tensors(saved[0]))


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "other"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")])
def test_two_pipelines_go_on_as_one_or_as_two(
    wrapper: str, other: str, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    saved = joined(list(map(tensors, four_ranks.run(rank_cases.save_hybrid, str(tmp_path), wrapper))))
    for ranks in (four_ranks, two_ranks):
        states = ranks.run(rank_cases.load_hybrid, str(tmp_path), other)
        assert_same(joined(list(map(tensors, states))), saved)
    assert_same(tensors(loaded_here(3, tmp_path).state), saved)
