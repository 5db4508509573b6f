"""Runs the benchmarks, each in a process of its own, and prints one table of their goals: `python -m benchmarks`.

Only one of them: `python -m benchmarks cutting`. `--write FILE` also writes the table as Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .measure import DEADLINE, VERDICTS, Goal, console, show_table

# The seconds that each may take at the most; less if all of these together would take longer than IN_ALL.
BENCHMARKS = {
    "cutting": 180,
    "planning": 120,
    "searching": 60,
    "backward": 120,
    "stepping": 240,
    "memory": 100,
    "sending": 55,
    "prediction": 180,
    "replicas": 90,
    "balance": 240,
}
IN_ALL = 19 * 60
# What torch's profiler and allocator say about themselves would tear the tables apart.
_QUIET = {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Those of `--all`.
FURTHER = {"checking": 240, "running": 120, "passes": 120, "checkpoints": 180}


@dataclass(frozen=True)
class Outcome:
    """The goals of one benchmark, the seconds it took, and how many cores others used meanwhile."""

    name: str
    goals: list[Goal]
    seconds: float
    others: float | None

    @property
    def conditions(self) -> str:
        """Seconds and load, in words."""
        return f"{self.name}: {self.seconds:.0f} s" + ("" if self.others is None else f", others {self.others:.1f}")


def main() -> None:
    """Run the benchmarks that are asked for, or all with goals."""
    known = BENCHMARKS | FURTHER
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=5, help="more rounds, less noise (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help=f"also {', '.join(FURTHER)}")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of goals to FILE, as Markdown")
    parser.add_argument("--goals-to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no benchmark called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.goals_to is not None:
        _run_here(options.names[0], options.rounds, options.goals_to)
        return
    names = options.names or [*(known if options.all else BENCHMARKS)]
    console.print(_machine(), highlight=False)
    scale = min(1.0, IN_ALL / sum(known[name] for name in names)) if names == [*BENCHMARKS] else 1.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as by ctrl-C: what runs is ended too
    outcomes: list[Outcome] = []
    try:
        for name in names:
            outcomes.append(_run_apart(name, options.rounds, scale * known[name]))
    finally:
        _show(outcomes)
    if options.write is not None:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(_markdown(outcomes, " ".join(["python -m benchmarks", *options.names])))


def _run_here(name: str, rounds: int, path: Path) -> None:
    """Run one benchmark in this process, and write its goals to a file, a line each."""
    import torch

    torch.set_num_threads(1)
    # What torch says about itself while it traces would tear the tables apart.
    warnings.filterwarnings("ignore", module="torch|copyreg", category=FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    with path.open("w") as file:
        for goal in importlib.import_module(f"{__package__}.{name}").run(rounds):
            print(json.dumps(asdict(goal)), file=file, flush=True)


def _run_apart(name: str, rounds: int, limit: float) -> Outcome:
    """Run one benchmark in a process of its own; one that fails or takes too long has missed that."""
    console.rule(
        f"{name}, at most {limit:.0f} s; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "goals")
        command = [sys.executable, "-m", __package__, name, "--rounds", str(rounds), "--goals-to", str(path)]
        environment = os.environ | _QUIET | {DEADLINE: str(time.time() + limit), "OMP_NUM_THREADS": "1"}
        begin, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
        asked: list[int] = []  # to end while a process is started, which is not known yet and would be left
        end = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            signal.signal(signal.SIGTERM, end)
            if asked:
                signal.raise_signal(signal.SIGTERM)
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_with_children(process)
        took, busy_then = time.monotonic() - begin, _busy_seconds()
        others = None if busy is None or busy_then is None else max(0.0, busy_then - busy - _own_seconds() + own) / took
        written = path.read_text().split("\n")[:-1] if path.exists() else []  # of a last line there may be a part only
        goals = [Goal(**json.loads(line)) for line in written]
    if code is None:
        goals.append(Goal("finished in its time, in seconds (it was ended)", took, limit))
    elif code:
        goals.append(Goal("ran without an error (exit code)", abs(code), 0))
    return Outcome(name, goals, took, others)


def _end_with_children(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a benchmark: its ranks are in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# Load of the machine.


def _busy_seconds() -> float | None:
    """Return the seconds that all cores have worked since the machine started; None where that is not known."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _machine() -> str:
    import torch

    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} "
        f"cores ({platform.machine()}), devices: {_accelerator()}; load {os.getloadavg()[0]:.1f}"
    )


def _accelerator() -> str:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "CPU only, nothing was run on an accelerator" if found is None else f"CPU and {found.type}"


# The table of goals.


def _show(outcomes: list[Outcome]) -> None:
    console.rule("goals")
    rows = [[*row, VERDICTS[met]] for *row, met in _rows(outcomes)]
    show_table("all goals", ["goal", "measured", "at most", ""], rows)
    console.print(_summary(outcomes), highlight=False)


def _rows(outcomes: list[Outcome]) -> Iterator[tuple[str, str, str, bool]]:
    for outcome in outcomes:
        for goal in outcome.goals:
            reason = f" ({goal.reason})" if goal.reason and not goal.is_met else ""
            yield f"{outcome.name}: {goal.what}{reason}", f"{goal.value:.3f}", f"{goal.limit:g}", goal.is_met


def _summary(outcomes: list[Outcome]) -> str:
    goals = [goal for outcome in outcomes for goal in outcome.goals]
    met = sum(goal.is_met for goal in goals)
    conditions = "; ".join(outcome.conditions for outcome in outcomes)
    return (
        f"{met} of {len(goals)} met, {len(goals) - met} missed, in {sum(each.seconds for each in outcomes) / 60:.1f} "
        f"minutes. Seconds of each, and the cores that other processes used meanwhile: {conditions}."
    )


def _markdown(outcomes: list[Outcome], command: str) -> str:
    lines = ["# Goals, measured", "", f"`{command}`, {_machine()}.", "", _summary(outcomes), ""]
    lines += ["| goal | measured | at most | |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} | {'met' if met else '**missed**'} |" for *row, met in _rows(outcomes)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
