"""Errors that name what does not fit, before anything is changed."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import CheckpointError, InputError, PipeWarning, latest_checkpoint, load_checkpoint, save_checkpoint
from tests.run.distributed.test_failures import SHORT
from tests.run.distributed.test_failures import outcomes as outcomes_of
from tests.support.ranks import Ranks
from tests.support.sampling import sampled
from tests.training.checkpoint import rank_cases
from tests.training.checkpoint.jobs import Job, Net, Tied, assert_same, make_job


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = self.blocks
        del self.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.block:
            x = block(x)
        return x


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.layer = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))  # type: ignore[assignment]


class OtherShapes(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.layer = nn.Linear(6, 1)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    job = make_job(2)
    job.train(0, 1)
    save_checkpoint(path, job.schedule, job.optimizer, step=1, scheduler=job.scheduler, extra={"epoch": 3})
    return path


def assert_refused(job: Job, message: str, load: Callable[[], Any]) -> None:
    """An error with this message, and a job that is as it was."""
    before = job.state
    with pytest.raises((CheckpointError, InputError), match=re.compile(message, re.DOTALL)):
        load()
    assert_same(before, job.state)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Renamed,
            r"is of another model, a Net: it does not have 36 of 36 names:.*block\.0\.layer\.weight\. Did you mean "
            r"'blocks\.0\.layer\.weight'.*and 16 more\nit has 36 names that the model does not:",
        ),
        (
            OtherShapes,
            r"other shapes or dtypes, 24 of 36:.*blocks\.0\.layer\.weight is float32\[6, 6\] there, and flo",
        ),
    ],
)
def test_another_model(kind: type[nn.Module], message: str, folder: Path) -> None:
    job = make_job(1, kind=kind)
    assert_refused(job, message, lambda: load_checkpoint(folder, job.schedule))


def test_another_dtype(folder: Path) -> None:
    job = make_job(1)
    for stage in job.schedule.stages:
        stage.submod.double()
    with pytest.raises(CheckpointError, match=r"0\.layer\.weight is float32\[6, 6\] there, and float64\[6, 6\]"):
        load_checkpoint(folder, job.schedule)


def test_an_optimizer_of_another_kind(folder: Path) -> None:
    job = make_job(1, optimizer=torch.optim.SGD)
    message = r"was saved with a torch\.optim\.adamw\.AdamW, and the optimizer now is a torch\.optim\.sgd\.SGD: make"
    assert_refused(job, message, lambda: load_checkpoint(folder, job.schedule, job.optimizer))
    assert load_checkpoint(folder, job.schedule).step == 1  # the remedy


def test_an_optimizer_over_other_parameters(folder: Path) -> None:
    job = make_job(1)
    some = torch.optim.AdamW([p for name, p in job.schedule.named_parameters() if "blocks.3." not in name], lr=0.05)
    message = r"over other parameters .*blocks\.3\.layer\.bias, which only the saved one held"
    assert_refused(job, message, lambda: load_checkpoint(folder, job.schedule, some))


def test_groups_that_mix_saved_settings(tmp_path: Path) -> None:
    job = make_job(1)
    named = list(job.schedule.named_parameters())
    decayed = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    save_checkpoint(tmp_path, job.schedule, torch.optim.AdamW(groups, lr=0.01), step=1)
    message = r"group 0 .* settings, blocks\.0\.layer\.weight and blocks\.0\.layer\.bias \(weight_decay=0\.1 and 0\.0"
    assert_refused(job, message, lambda: load_checkpoint(tmp_path, job.schedule, job.optimizer))
    swapped = torch.optim.AdamW([{**groups[1]}, {**groups[0], "lr": 3.0}], lr=0.5)  # groups in another order
    load_checkpoint(tmp_path, job.schedule, swapped)
    assert [(group["weight_decay"], group["lr"]) for group in swapped.param_groups] == [(0.0, 0.01), (0.1, 0.01)]


def test_parameters_that_the_schedule_does_not_have(tmp_path: Path, folder: Path) -> None:
    job = make_job(1)
    stray = torch.optim.SGD([*job.schedule.parameters(), nn.Parameter(torch.ones(2, 3))], lr=0.1)
    message = r"the SGD holds 1 parameter .*parameter 24 of group 0, float32\[2, 3\]\nMake it from schedule\.parameters"
    with pytest.raises(CheckpointError, match=re.compile(message, re.DOTALL)):
        save_checkpoint(tmp_path, job.schedule, stray, step=1)
    assert not list(tmp_path.iterdir())
    assert_refused(job, message, lambda: load_checkpoint(folder, job.schedule, stray))


class Listing(torch.optim.SGD):
    """An optimizer with a list in its state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = [1.0]
        return super().step(closure)


def test_a_state_that_is_not_of_each_parameter(tmp_path: Path) -> None:
    job = make_job(1, optimizer=Listing)
    job.train(0, 1)
    with pytest.raises(CheckpointError, match=r"the Listing keeps 'history' of blocks\.0\.layer\.weight as a list"):
        save_checkpoint(tmp_path, job.schedule, job.optimizer, step=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step is the number of steps done so far, got -1"),
        ({"step": 1, "keep": 0}, "keep is the number of checkpoints that stay, from 1 on, or None for all; got 0"),
        ({"step": 1, "extra": [3]}, r"extra is a dict from names to values, got \[3\]"),
        ({"step": 1, "extra": {"hook": print}}, r"extra\['hook'\] cannot be saved, since it could not be read again"),
        ({"step": 1, "optimizer": "adam"}, "optimizer is a str: pass a torch.optim.Optimizer or a list of them"),
    ],
)
def test_arguments_that_cannot_be_saved(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    job = make_job(1)
    with pytest.raises((CheckpointError, InputError), match=message):
        save_checkpoint(tmp_path, job.schedule, **arguments)
    assert not list(tmp_path.iterdir())


def test_extras_that_are_not_there(folder: Path) -> None:
    job = make_job(1)
    given = {"epochs": rank_cases.Position(0)}
    message = r"has no extra 'epochs'\. Did you mean 'epoch'\? It has 'epoch'"
    assert_refused(job, message, lambda: load_checkpoint(folder, job.schedule, extra=given))
    wrong: Any = {"epoch": 3}
    assert_refused(
        job, r"extra\['epoch'\] is a int without", lambda: load_checkpoint(folder, job.schedule, extra=wrong)
    )


def test_no_checkpoint(tmp_path: Path) -> None:
    job = make_job(1)
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
        load_checkpoint(tmp_path, job.schedule)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere: no such directory"):
        load_checkpoint(tmp_path / "nowhere", job.schedule)


def copied(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    shutil.copytree(folder / "step-00000001", path)
    return path


def truncated(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def without_file(path: Path) -> None:
    (path / "job.pt").unlink()


def half_written(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def newer(path: Path) -> None:
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest |= {"format": 2, "versions": {"pipecut": "9.1"}}
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def no_json(path: Path) -> None:
    (path / "checkpoint.json").write_text("{")


def harmful(path: Path) -> None:
    content = pickle.dumps(Harm())
    size = (path / ".metadata").stat().st_size
    (path / ".metadata").write_bytes(content + b"\0" * (size - len(content)))


class Harm:
    """A pickle of this would call a function when it is read."""

    def __reduce__(self) -> Any:
        return shutil.rmtree, ("/nowhere",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncated,
            r"is damaged: __0_0\.distcp has \d+ of \d+ bytes\. Nothing was loaded; copy it anew, or load",
        ),
        (without_file, r"is damaged: job\.pt is missing"),
        (half_written, r"was not written to the end: it has no checkpoint\.json\. Load another one"),
        (newer, r"has the format 2, and this version of pipecut reads format 1: .*newer one \(pipecut 9\.1\); update"),
        (no_json, r"checkpoint\.json is not a manifest, so that .* is damaged; copy it anew, or remove it"),
        (harmful, r"it names shutil\.rmtree, which is no part of a checkpoint's description.*No code is run"),
    ],
)
def test_damaged_files(damage: Callable[[Path], None], message: str, folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    damage(path)
    job = make_job(1)
    assert_refused(job, message, lambda: load_checkpoint(path, job.schedule, job.optimizer))


def test_an_object_that_would_run_code_is_not_read(folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    file = path / "rank-00000.pt"
    torch.save(Harm(), file)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"]["rank-00000.pt"] = file.stat().st_size
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    job = make_job(1)
    assert_refused(job, r"rank-00000\.pt cannot be read", lambda: load_checkpoint(path, job.schedule))


def test_an_interrupted_one_is_named_and_left_alone(tmp_path: Path) -> None:
    job = make_job(1)
    save_checkpoint(tmp_path, job.schedule, step=1)
    left = tmp_path / ".step-00000002.unfinished-1234"
    left.mkdir()
    with pytest.warns(PipeWarning, match=r"1 save into .* did not come to the end: \.step-00000002\.unfinished-12"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    save_checkpoint(tmp_path, job.schedule, step=2)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    assert left.exists()
    with pytest.raises(CheckpointError, match="was not written to the end"):
        load_checkpoint(left, job.schedule)


MESSAGES = {
    "folder": r"the ranks disagree on what to save:\n  folder: .*of rank 0 on rank 0; .*of rank 1 on rank 1",
    "step": r"the ranks disagree on what to save:\n  step: 0 on rank 0; 1 on rank 1\nCall save_checkpoint with the sa",
    "load": r"the ranks ask for different checkpoints: .*step-00000000 on rank 0; .*step-00000001 on rank 1",
}


def assert_all_fail(outcomes: list[Any], message: str) -> None:
    for outcome in outcomes:
        assert outcome.failed
        assert re.search(message, str(outcome), re.DOTALL), str(outcome)


@pytest.mark.parametrize("what", sampled(MESSAGES, lambda what: what == "folder"))
def test_ranks_that_ask_for_different_things(what: str, two_ranks: Ranks, tmp_path: Path) -> None:
    assert_all_fail(two_ranks.outcomes(rank_cases.disagree, str(tmp_path), what), MESSAGES[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("extra", r"on rank 1: extra\['clock'\] cannot be saved"),
        pytest.param(
            "step", r"on rank 1: InputError: step is the number of steps done so far, got -2", marks=pytest.mark.slow
        ),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(what: str, message: str, two_ranks: Ranks, tmp_path: Path) -> None:
    assert_all_fail(two_ranks.outcomes(rank_cases.fail_on_one, str(tmp_path), what), message)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_schedule_says(tmp_path: Path) -> None:
    found = outcomes_of(2, rank_cases.stay_away, str(tmp_path), SHORT)[0]
    assert_all_fail([found], rf"did not come to the checkpoint within {SHORT:g} s: rank 1 did not take part")
    assert latest_checkpoint(tmp_path) is None


def test_a_model_in_place_of_the_schedule(tmp_path: Path) -> None:
    for call in (lambda: save_checkpoint(tmp_path, Net(), step=1), lambda: load_checkpoint(tmp_path, Net())):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="got a Net as the schedule: pass the schedule that trains the stages"):
            call()


def test_a_tied_parameter_with_two_settings(two_ranks: Ranks, tmp_path: Path) -> None:
    outcomes = two_ranks.outcomes(rank_cases.different_settings, str(tmp_path), Tied)
    message = r"the tied parameter first\.weight is in two parameter groups .*lr=0\.1 and 0\.2 \(on rank 0"
    assert_all_fail(outcomes, message)


@pytest.mark.slow
def test_two_models_in_one_checkpoint(four_ranks: Ranks, tmp_path: Path) -> None:
    outcomes = four_ranks.outcomes(rank_cases.two_models, str(tmp_path))
    assert_all_fail(outcomes, r"ranks 0, 2 all hold stage 0, and rank 2 not as a copy or shard of that of rank 0")
    assert latest_checkpoint(tmp_path / "0") is not None
    assert latest_checkpoint(tmp_path / "1") is not None
