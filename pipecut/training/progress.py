"""Progress of a training: a bar on the terminal, JSON lines in a file, and the user's loggers, all on rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import rich.progress
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ..errors import InputError, warn
from ..run import PipelineSchedule, StepMetrics
from ..stage import is_initialized

_RECENT = 20  # steps over which the speed that is shown is a mean
_OWN_NAMES = ("step", "time")
_HOW_TO_LOG = "a logger has log(metrics, step), as wandb and trackio do, or add_scalar(name, value, step)"


class Progress:
    """Shows, writes and logs the figures of a training, on rank 0; on the others it only counts steps.

    Make one on every rank, and call `update()` after each step. It takes the figures of `schedule.last_step()` and adds
    those that are passed: numbers, or tensors of one element, such as the norm that `clip_grad_norm_` returned.

    - On a terminal there is a bar with the loss, what was passed, tokens per second, the bubble rate and the time
      left. Where stderr is none, a line is printed after the first step, after the last, and every `every` seconds.
    - `file` gets a JSON object in a line of its own for each step. A training that goes on (`start=`) adds to the file;
      if steps are run again after a crash, the last line of a step counts.
    - Each of `loggers` gets `log(metrics, step)`, as wandb, a run of wandb, and trackio have it. An object with
      `add_scalar(name, value, step)`, such as a SummaryWriter of TensorBoard, gets that for every number.

    Steps are counted from 1: `start` is the number of steps that were run before, such as the step of a checkpoint.

    >>> from torch import nn, ones
    >>> from pipecut import Schedule1F1B, pipeline
    >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ones(4, 2)
    >>> pipe = pipeline(model, (x,), num_stages=2)
    >>> stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    >>> schedule = Schedule1F1B(stages, n_microbatches=2, loss_fn=lambda output: output.square().mean())
    >>> class Printer:
    ...     def log(self, metrics: dict, step: int) -> None:
    ...         print(step, metrics["loss"] > 0, metrics["norm"], metrics["samples"])
    >>> with Progress(4, schedule, loggers=[Printer()], start=2) as progress:
    ...     while progress.step < 4:
    ...         output = schedule.step(x)
    ...         progress.update(norm=1.5)
    3 True 1.5 4
    4 True 1.5 4
    """

    def __init__(
        self,
        total_steps: int,
        schedule: PipelineSchedule,
        *,
        file: str | os.PathLike[str] | None = None,
        loggers: Sequence[Any] = (),
        start: int = 0,
        every: float = 10.0,
        console: Console | None = None,
    ) -> None:
        _check_steps(total_steps, start)
        for logger in loggers:
            _check_logger(logger)
        self.step = start  # the number of the last step that was run
        self._total, self._start = total_steps, start
        self._schedule = schedule
        self._is_shown = not is_initialized() or dist.get_rank() == 0
        self._loggers = loggers if self._is_shown else ()
        self._file: TextIO | None = None
        if file is not None and self._is_shown:
            with schedule.agreement.reporting("when it opened the file of Progress"):
                self._file = _opened(Path(file))
        self._display = _Display(total_steps, start, every, console) if self._is_shown else None
        self._recent: deque[tuple[float, StepMetrics]] = deque(maxlen=_RECENT)
        self._before = time.perf_counter()

    def __enter__(self) -> Progress:
        self._before = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def update(self, **metrics: Any) -> None:
        """Count a step that was run, and show, write and log its figures and these."""
        _check_metrics(metrics)
        last = self._schedule.last_step()
        self.step += 1
        if self._display is None:
            return
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        self._recent.append((seconds, last))
        given = _as_numbers(metrics)
        figures = {**_figures_of(last, seconds), **given}
        self._write(figures)
        shown = {"loss": figures["loss"], **given}
        self._display.step(self.step, f"{_in_words(shown)}, {self._speed()}, bubble {last.bubble_rate:.0%}")

    def log(self, **metrics: Any) -> None:
        """Show, write and log figures that do not belong to every step, such as those of an evaluation."""
        _check_metrics(metrics)
        if self._display is not None:
            figures = _as_numbers(metrics)
            self._write(figures)
            self._display.say(f"step {self.step}/{self._total}: {_in_words(figures)}")

    def _write(self, figures: Mapping[str, Any]) -> None:
        if self._file is not None:
            written = {name: None if _is_not_finite(value) else value for name, value in figures.items()}
            try:
                self._file.write(json.dumps({"step": self.step, "time": time.time(), **written}) + "\n")
                self._file.flush()
            except OSError as error:  # a full disk is no reason to lose the training
                warn(f"the figures of step {self.step} and later are not written to {self._file.name}: {error}")
                self._file = None
        for logger in self._loggers:
            if hasattr(logger, "log"):
                logger.log(dict(figures), self.step)
            else:
                for name, value in figures.items():
                    if isinstance(value, int | float):
                        logger.add_scalar(name, value, self.step)

    def _speed(self) -> str:
        """Return the speed of the last steps in words, with all that came between them."""
        seconds = sum(seconds for seconds, _ in self._recent)
        tokens = sum(last.tokens or 0 for _, last in self._recent)
        samples = sum(last.samples for _, last in self._recent)
        return f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{samples / seconds:,.1f} samples/s"


class _Display:
    """Bar on a terminal, or lines now and then where there is none."""

    def __init__(self, total: int, start: int, every: float, console: Console | None) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._total, self._start, self._every = total, start, every
        self._begin = self._said = time.perf_counter()
        self._bar: rich.progress.Progress | None = None
        if self._console.is_terminal:
            columns = (
                rich.progress.BarColumn(bar_width=20),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[figures]}", markup=False),
                rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task("", total=total, completed=start, figures="")
            self._bar.start()

    def step(self, step: int, figures: str) -> None:
        """Show the figures of a step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures)
            return
        now = time.perf_counter()
        if step in (self._start + 1, self._total) or now - self._said >= self._every:
            self._said = now
            left = (now - self._begin) / (step - self._start) * max(self._total - step, 0)
            self.say(f"step {step}/{self._total}: {figures}, {_duration(left)} left")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def _figures_of(last: StepMetrics, seconds: float) -> dict[str, Any]:
    """Return the figures of a step; the speed is that of the training, with all that came between two steps."""
    return {
        "loss": last.loss,
        "samples": last.samples,
        "tokens": last.tokens,
        "seconds": seconds,
        "samples_per_second": last.samples / seconds,
        "tokens_per_second": None if last.tokens is None else last.tokens / seconds,
        "step_seconds": last.seconds,
        "bubble_rate": last.bubble_rate,
        "peak_memory": last.peak_memory,
    }


def _as_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


def _in_words(figures: Mapping[str, Any]) -> str:
    """Return figures as text.

    >>> _in_words({"loss": 2.34567, "lr": 3e-4, "epoch": 2, "best": None})
    'loss 2.346, lr 0.0003, epoch 2'
    """
    known = {name: value for name, value in figures.items() if value is not None}
    return ", ".join(f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in known.items())


def _duration(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> _duration(3725.4), _duration(59.6)
    ('1:02:05', '0:01:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)  # JSON has no word for it


def _opened(path: Path) -> TextIO:
    """Open a file of JSON lines to add to; a line that a crash left unfinished is ended."""
    try:
        file = path.open("a", encoding="utf-8")
        if path.stat().st_size:
            with path.open("rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    file.write("\n")
    except OSError as error:
        raise InputError(
            f"Progress cannot write to {path}: {error.strerror or error}. Give file= in a folder that is there, and "
            "that this process may write to; or leave it out"
        ) from error
    return file


def _check_steps(total: Any, start: Any) -> None:
    for name, value in (("total_steps", total), ("start", start)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name}={value!r}: Progress takes a number of steps, an int that is not negative")
    if start > total:
        raise InputError(f"start={start} and total_steps={total}: total_steps counts those that were run before, too")


def _check_logger(logger: Any) -> None:
    if not callable(getattr(logger, "log", None)) and not callable(getattr(logger, "add_scalar", None)):
        raise InputError(f"{logger!r} in loggers= is no logger: {_HOW_TO_LOG}")


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise on what is no number, on every rank."""
    for name, value in metrics.items():
        if name in _OWN_NAMES:
            raise InputError(f"{name}= is a name that Progress writes itself: pass {name}={value!r} under another one")
        one = value.numel() == 1 if isinstance(value, Tensor) else getattr(value, "size", 1) == 1
        if not isinstance(value, int | float | str | None) and not (one and hasattr(value, "item")):
            what = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(f"{name}= is {what}: Progress takes numbers, texts and tensors of one element")
