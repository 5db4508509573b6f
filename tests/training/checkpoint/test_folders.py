"""A folder of checkpoints: each is complete or not there, the last ones stay, and some are written beside the steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import pipecut.training.checkpoint.save as saving
from pipecut import CheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training.checkpoint import rank_cases
from tests.training.checkpoint.jobs import Block, assert_same, make_job


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_ones_stay(tmp_path: Path) -> None:
    job = make_job(1)
    for step in range(1, 6):
        save_checkpoint(tmp_path, job.schedule, step=step)
        assert latest_checkpoint(tmp_path) == tmp_path / f"step-0000000{step}"
    assert names(tmp_path) == [f"step-0000000{step}" for step in (3, 4, 5)]
    save_checkpoint(tmp_path, job.schedule, step=6, keep=1)
    assert names(tmp_path) == ["step-00000006"]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    job = make_job(1)
    save_checkpoint(tmp_path, job.schedule, step=1, extra={"which": 1})
    save_checkpoint(tmp_path, job.schedule, step=1, extra={"which": 2})
    save_checkpoint(tmp_path, job.schedule, step=1, extra={"which": 3})
    assert names(tmp_path) == ["step-00000001"]
    assert load_checkpoint(tmp_path, job.schedule).extra == {"which": 3}


def test_a_job_that_went_back_goes_on_from_where_it_was_last(tmp_path: Path) -> None:
    """A job that is loaded from step 2, and killed at step 3, must not go on from step 4 of the time before."""
    job = make_job(1)
    for step in (2, 4, 3):
        save_checkpoint(tmp_path, job.schedule, step=step)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    save_checkpoint(tmp_path, job.schedule, step=4)
    assert load_checkpoint(tmp_path, job.schedule).step == 4


def test_a_generator_of_the_user_goes_on(tmp_path: Path) -> None:
    """That of a data loader, for instance, which has no state_dict()."""
    job, generator = make_job(1), torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    save_checkpoint(tmp_path, job.schedule, step=1, extra={"loader": generator})
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    load_checkpoint(tmp_path, job.schedule, extra={"loader": other})
    assert torch.equal(torch.rand(3, generator=other), expected)


@pytest.mark.parametrize("failing", ["_write_objects", "_save_tensors", "_complete", "commit"])
def test_a_save_that_fails_leaves_the_older_one_and_nothing_else(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(1)
    save_checkpoint(tmp_path, job.schedule, step=1)
    with monkeypatch.context() as patched:
        patched.setattr(saving, failing, fail)
        with pytest.raises((CheckpointError, RuntimeError), match="it failed here"):
            save_checkpoint(tmp_path, job.schedule, step=2)
    assert names(tmp_path) == ["step-00000001"]
    save_checkpoint(tmp_path, job.schedule, step=3)
    assert load_checkpoint(tmp_path, job.schedule).step == 3


def fail(*args: Any) -> None:
    raise RuntimeError("it failed here")


def test_a_folder_that_cannot_be_written_to() -> None:
    job = make_job(1)
    with pytest.raises(
        CheckpointError, match=r"was not saved: /sys/checkpoints is read-only here .*pass a folder that"
    ):
        save_checkpoint("/sys/checkpoints", job.schedule, step=1)


@pytest.mark.parametrize("asynchronous", sampled([False, True], lambda asynchronous: asynchronous))
def test_a_full_disk_is_an_error_on_every_rank(asynchronous: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    for text in two_ranks.run(rank_cases.fill_the_disk_of_one, str(tmp_path), asynchronous):
        assert "on rank 1: the checkpoint was not saved: the disk of" in text
        assert "is full" in text
        assert "Checkpoints that were complete before still are" in text
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_save_beside_the_steps_has_the_bytes_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(2)
    job.train(0, 2)
    then, go_on, write = job.state, threading.Event(), saving._write

    def slow(*args: Any) -> None:
        go_on.wait()
        write(*args)

    monkeypatch.setattr(saving, "_write", slow)
    save = save_checkpoint(tmp_path, job.schedule, job.optimizer, step=2, scheduler=job.scheduler, asynchronous=True)
    job.train(2, 4)
    assert not save.done()
    assert latest_checkpoint(tmp_path / "nothing yet") is None
    with pytest.raises(CheckpointError, match=r"the save of step 2 is not complete after 0\.01 s"):
        save.wait(0.01)
    go_on.set()
    assert save.wait() == tmp_path / "step-00000002"
    again = make_job(3)
    load_checkpoint(tmp_path, again.schedule, again.optimizer, scheduler=again.scheduler)
    assert_same(again.state, then)


def test_states_and_settings_beside_the_steps_are_of_their_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process an extra state, and a learning rate that is a tensor, were saved as they were later."""
    seen = [1]
    monkeypatch.setattr(Block, "get_extra_state", lambda block: seen, raising=False)
    monkeypatch.setattr(Block, "set_extra_state", lambda block, state: seen.extend(state), raising=False)
    job = make_job(2)
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(job.schedule.parameters(), lr=rate)
    may_write = threading.Event()
    write = saving._write
    monkeypatch.setattr(saving, "_write", lambda *args: (may_write.wait(), write(*args)))
    save = save_checkpoint(tmp_path, job.schedule, optimizer, step=1, asynchronous=True)
    seen[:], _ = [2], rate.fill_(0.5)
    may_write.set()
    save.wait()
    load_checkpoint(tmp_path, job.schedule, optimizer)
    assert set(seen[1:]) == {1}
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def test_the_error_of_a_save_beside_the_steps_comes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(1)
    with monkeypatch.context() as patched:
        patched.setattr(saving, "_complete", fail)
        save = save_checkpoint(tmp_path, job.schedule, step=1, asynchronous=True)
        with pytest.raises(CheckpointError, match="the asynchronous save of step 1 failed: .*it failed here"):
            save_checkpoint(tmp_path, job.schedule, step=2)
    assert names(tmp_path) == []
    with pytest.raises(CheckpointError, match="the asynchronous save of step 1 failed"):
        save.wait()
    save_checkpoint(tmp_path, job.schedule, step=2)
    assert names(tmp_path) == ["step-00000002"]


def test_ranks_save_beside_their_steps(two_ranks: Ranks, tmp_path: Path) -> None:
    outcomes = two_ranks.run(rank_cases.save_beside, str(tmp_path))
    first, second, _ = outcomes[0]
    assert [first, second] == [str(tmp_path / "step-00000002"), str(tmp_path / "step-00000004")]
    job = make_job(1)
    load_checkpoint(first, job.schedule, job.optimizer)
    for _, _, state in outcomes:
        assert_same(
            {name: job.state[name] for name in state if ":" in name or "blocks" in name},
            {name: value for name, value in state.items() if ":" in name or "blocks" in name},
        )


def test_a_stage_is_built_from_the_checkpoint_of_a_job(tmp_path: Path) -> None:
    job = make_job(2)
    job.train(0, 2)
    path = save_checkpoint(tmp_path, job.schedule, job.optimizer, step=2).path
    from tests.training.checkpoint.jobs import cut

    stage = cut(3).build_stage(1, "cpu", checkpoint=path)
    expected = job.schedule.state_dict()
    for name, value in stage.submod.state_dict().items():
        assert torch.equal(value, expected[name])
