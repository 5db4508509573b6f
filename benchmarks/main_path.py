"""Counts what the main path goes through: files of pipecut that are entered, and calls of their functions.

`python -m benchmarks.main_path` cuts 4 Linears into 2 stages, builds them, and trains two steps of Schedule1F1B with 4
microbatches in this process, under sys.setprofile. Comprehensions and generators count as calls, as Python runs them;
imports do not, nor does anything outside of pipecut.

A steady microbatch is what one more microbatch adds to the second step, from its first action to its last. The calls
before the first action are those of the second step: what has to be done once is done by then.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

import pipecut

from .measure import console, show_table

MICROBATCHES = 4
ROOT = f"{Path(pipecut.__file__).parent}/"
LOOP = ("run/runner.py", "_do")  # the function that goes through the actions of a step
Result = TypeVar("Result")


@dataclass(frozen=True)
class Call:
    """A call of a function of pipecut, and whether it was inside of the loop over actions."""

    file: str
    function: str
    in_loop: bool


class Profile:
    """Notes the calls of functions of pipecut."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._imports = self._loops = 0

    def of(self, function: Callable[[], Result]) -> Result:
        """Call a function, and note what it calls."""
        sys.setprofile(self._note)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ROOT):
            return
        file, function = code.co_filename.removeprefix(ROOT), code.co_name
        if function == "<module>":
            self._imports += 1 if event == "call" else -1
        elif event == "call" and not self._imports:
            self.calls.append(Call(file, function, self._loops > 0))
        if (file, function) == LOOP:
            self._loops += 1 if event == "call" else -1


@dataclass(frozen=True)
class MainPath:
    """The calls of each part of the main path."""

    build: list[Call]
    first_step: list[Call]
    second_step: list[Call]

    @property
    def before_the_first_action(self) -> list[Call]:
        first = next(nth for nth, call in enumerate(self.second_step) if call.in_loop)
        return self.second_step[:first]

    @property
    def actions(self) -> list[Call]:
        return [call for call in self.second_step if call.in_loop]


def run_main_path(microbatches: int) -> MainPath:
    """Cut, build, and train two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x, y = torch.randn(2, 2 * microbatches, 8)

    def build() -> Any:
        pipe = pipecut.pipeline(model, (x[:2],), num_stages=2)
        stages = [pipe.build_stage(index, "cpu") for index in range(2)]
        return pipecut.Schedule1F1B(stages, n_microbatches=microbatches, loss_fn=nn.functional.mse_loss)

    profiles = [Profile(), Profile(), Profile()]
    schedule = profiles[0].of(build)
    for profile in profiles[1:]:
        profile.of(lambda: schedule.step(x, target=y))
    return MainPath(*(profile.calls for profile in profiles))


def added(more: Sequence[Call], fewer: Sequence[Call]) -> Counter[Call]:
    """The calls that one microbatch more adds."""
    counted = Counter(more)
    counted.subtract(Counter(fewer))
    return Counter({call: count for call, count in counted.items() if count > 0})


def _files(calls: Sequence[Call] | Counter[Call]) -> set[str]:
    return {call.file for call in calls}


def _switches(calls: Sequence[Call]) -> int:
    return sum(one.file != other.file for one, other in zip(calls, calls[1:], strict=False))


def main() -> None:
    """Print the table, and every call with --calls."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.main_path", description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print the calls of a steady microbatch and before it")
    options = parser.parse_args()
    path, longer = run_main_path(MICROBATCHES), run_main_path(MICROBATCHES + 1)
    steady = added(longer.actions, path.actions)
    before = path.before_the_first_action
    rows = [
        ["files entered in all", len(_files([*path.build, *path.first_step, *path.second_step])), 80],
        ["a steady microbatch: calls", steady.total(), 120],
        ["a steady microbatch: files", len(_files(steady)), 14],
        ["a steady microbatch: changes of file", _switches(longer.actions) - _switches(path.actions), None],
        ["calls before the first action of the second step", len(before), 149],
        ["files before the first action of the second step", len(_files(before)), None],
        ["calls in the second step", len(path.second_step), None],
    ]
    table = [[str(name), str(count), "" if limit is None else str(limit)] for name, count, limit in rows]
    show_table(f"main path: 2 stages, {MICROBATCHES} microbatches, one process", ["", "counted", "at most"], table)
    if options.calls:
        for title, counted in (("steady microbatch", steady), ("before the first action", Counter(before))):
            lines = [f"{count:4} {call.file} {call.function}" for call, count in sorted(counted.items(), key=_place)]
            console.print("\n".join([title, *lines]), highlight=False, markup=False)


def _place(entry: tuple[Call, int]) -> tuple[str, int]:
    return entry[0].file, -entry[1]


if __name__ == "__main__":
    main()
