"""Progress of a training: what rank 0 shows, writes and logs, and what it does not take."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from pipecut import PipelineStage, Schedule1F1B
from pipecut.errors import InputError, PipeWarning
from pipecut.training import Progress
from tests.support.ranks import Ranks


def made_schedule(tokens: int = 0) -> Schedule1F1B:
    stages = [PipelineStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2)]
    schedule = Schedule1F1B(stages, 2, loss_fn=lambda output: output.square().mean())
    schedule.count_tokens = lambda x: tokens
    return schedule


def plain() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def train(schedule: Schedule1F1B, progress: Progress, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        schedule.step(torch.ones(4, 4))
        progress.update(norm=torch.tensor(0.5), lr=1e-3)
        losses.append(schedule.mean_loss())
    return losses


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_of_json_for_each_step_also_after_the_training_goes_on(tmp_path: Path) -> None:
    path, schedule = tmp_path / "metrics.jsonl", made_schedule(tokens=32)
    with Progress(4, schedule, file=path, console=plain()) as progress:
        losses = train(schedule, progress, 2)
        progress.log(perplexity=12.5)
    with Progress(4, schedule, file=path, console=plain(), start=2) as progress:
        losses += train(schedule, progress, 2)
        assert progress.step == 4
    steps = [line for line in lines_of(path) if "loss" in line]
    assert [(line["step"], line["loss"]) for line in steps] == list(zip([1, 2, 3, 4], losses, strict=True))
    assert all((line["norm"], line["lr"], line["samples"], line["tokens"]) == (0.5, 1e-3, 4, 32) for line in steps)
    assert all(line["tokens_per_second"] == pytest.approx(32 / line["seconds"]) for line in steps)
    assert all(0 < line["step_seconds"] <= line["seconds"] for line in steps)
    (evaluated,) = (line for line in lines_of(path) if "perplexity" in line)
    assert (evaluated["step"], evaluated["perplexity"]) == (2, 12.5)


def test_a_line_that_a_crash_left_unfinished_does_not_swallow_the_next(tmp_path: Path) -> None:
    path, schedule = tmp_path / "metrics.jsonl", made_schedule()
    path.write_text('{"step": 1}\n{"step": 2, "lo', encoding="utf-8")
    with Progress(3, schedule, file=path, console=plain(), start=2) as progress:
        train(schedule, progress, 1)
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["step"] == 3


def test_what_json_has_no_word_for_is_null(tmp_path: Path) -> None:
    path, schedule = tmp_path / "metrics.jsonl", made_schedule()
    with Progress(1, schedule, file=path, console=plain()) as progress:
        schedule.step(torch.ones(4, 4))
        progress.update(norm=math.inf)
    (line,) = lines_of(path)
    assert line["norm"] is None


def test_without_a_terminal_the_first_and_the_last_step_are_lines(tmp_path: Path) -> None:
    console, schedule = plain(), made_schedule(tokens=32)
    with Progress(5, schedule, console=console, every=3600) as progress:
        train(schedule, progress, 5)
    first, last = shown(console).splitlines()
    assert first.startswith(f"step 1/5: loss {schedule.mean_loss():.4g}, norm 0.5, lr 0.001, ")
    assert last.startswith("step 5/5: ")
    assert last.endswith("%, 0:00:00 left")
    assert "tokens/s, bubble " in last


def test_a_line_comes_every_so_many_seconds() -> None:
    console, schedule = plain(), made_schedule()
    with Progress(5, schedule, console=console, every=0) as progress:
        train(schedule, progress, 4)
        progress.log(perplexity=7.25)
    assert [line.split(":")[0] for line in shown(console).splitlines()] == [
        "step 1/5", "step 2/5", "step 3/5", "step 4/5", "step 4/5",
    ]  # fmt: skip
    assert shown(console).splitlines()[-1] == "step 4/5: perplexity 7.25"
    assert "samples/s" in shown(console)


def test_on_a_terminal_there_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    schedule = made_schedule(tokens=32)
    with Progress(5, schedule, console=console, start=3) as progress:
        train(schedule, progress, 2)
    assert "5/5" in shown(console)
    assert f"loss {schedule.mean_loss():.4g}, norm 0.5, lr 0.001, " in shown(console)


class Logger:
    """As wandb and trackio are used."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((metrics, step))


class Writer:
    """As TensorBoard's SummaryWriter is used."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value


def test_loggers_get_the_figures_of_every_step() -> None:
    schedule, logger, writer = made_schedule(), Logger(), Writer()
    with Progress(2, schedule, loggers=[logger, writer], console=plain()) as progress:
        losses = train(schedule, progress, 2)
    assert [(metrics["loss"], metrics["norm"], step) for metrics, step in logger.logged] == [
        (losses[0], 0.5, 1),
        (losses[1], 0.5, 2),
    ]
    assert (writer.scalars["loss", 2], writer.scalars["lr", 1]) == (losses[1], 1e-3)
    assert ("tokens", 1) not in writer.scalars  # there are none, and None is no number


def test_a_full_disk_does_not_end_the_training() -> None:
    schedule = made_schedule()
    with Progress(2, schedule, file="/dev/full", console=plain()) as progress:
        schedule.step(torch.ones(4, 4))
        with pytest.warns(PipeWarning, match="figures of step 1 and later are not written to /dev/full: .*No space"):
            progress.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.step(torch.ones(4, 4))
            progress.update()


def test_a_file_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    message = r"Progress cannot write to .*missing/metrics.jsonl: No such file or directory. Give file= in a folder"
    with pytest.raises(InputError, match=message):
        Progress(2, made_schedule(), file=tmp_path / "missing" / "metrics.jsonl")
    with pytest.raises(InputError, match=r"Progress cannot write to .*: Is a directory"):
        Progress(2, made_schedule(), file=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 2.5}, "total_steps=2.5: Progress takes a number of steps, an int that is not negative"),
        ({"start": -1}, "start=-1: Progress takes a number of steps"),
        ({"start": 11}, "start=11 and total_steps=10: total_steps counts those that were run before, too"),
        (
            {"loggers": [print]},
            r"<built-in function print> in loggers= is no logger: a logger has log",
        ),
    ],
)
def test_bad_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Progress(**{"total_steps": 10, "schedule": made_schedule(), **options})


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"norm": torch.ones(3)}, "norm= is a tensor of 3 elements: Progress takes numbers, texts and tensors of one"),
        ({"norms": [1.0]}, "norms= is a list: Progress takes numbers"),
        ({"step": 3}, "step= is a name that Progress writes itself: pass step=3 under another one"),
    ],
)
def test_figures_that_are_no_numbers_are_errors(metrics: dict[str, Any], message: str) -> None:
    schedule = made_schedule()
    with Progress(2, schedule, console=plain()) as progress:
        schedule.step(torch.ones(4, 4))
        with pytest.raises(InputError, match=message):
            progress.update(**metrics)
        with pytest.raises(InputError, match=message):
            progress.log(**metrics)


def test_update_before_a_step_says_so() -> None:
    with (
        Progress(2, made_schedule(), console=plain()) as progress,
        pytest.raises(InputError, match=r"call step\(\)|no step"),
    ):
        progress.update()


def train_on_ranks(rank: int, folder: str) -> tuple[int, str, float]:
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, "cpu")
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    console, logger = plain(), Logger()
    with Progress(2, schedule, file=f"{folder}/{rank}.jsonl", loggers=[logger], console=console) as progress:
        for _ in range(2):
            schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step(target=torch.ones(4, 4))
            progress.update(norm=torch.tensor(1.0))
    return len(logger.logged), shown(console), schedule.mean_loss()


@pytest.mark.distributed
def test_on_ranks_rank_0_alone_shows_writes_and_logs(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(train_on_ranks, str(tmp_path))
    assert (first[0], second[0], second[1]) == (2, 0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["0.jsonl"]
    assert [line["loss"] for line in lines_of(tmp_path / "0.jsonl")][-1] == first[2] == second[2]


def open_a_missing_folder(rank: int) -> None:
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, "cpu")
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    with Progress(2, schedule, file="/missing/metrics.jsonl", console=plain()):
        schedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step(target=torch.ones(4, 4))


@pytest.mark.distributed
def test_a_file_that_rank_0_cannot_write_is_an_error_on_every_rank() -> None:
    with Ranks(2) as ranks:
        for outcome in ranks.outcomes(open_a_missing_folder):
            assert outcome.failed
            assert "rank 0 failed when it opened the file of Progress: " in str(outcome)
            assert "Progress cannot write to /missing/metrics.jsonl: No such file or directory" in str(outcome)
