"""`python -m benchmarks.coverage`: which models of the installed transformers can be cut and trained, and why not."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .kinds import KINDS, Kind
from .pool import Job, run_jobs
from .trial import Outcome, Trial

COLOURS = {"equal": "green", "error": "yellow", "wrong": "bold red", "not uncut": "dim"}
UPSTREAM: tuple[Outcome, ...] = ("equal", "ties", "error", "wrong")


def main() -> int:
    """Try all models that are asked for; the exit code is 1 if a gradient is wrong."""
    options = _options()
    transformers.logging.set_verbosity_error()
    if options.json and not options.resume:
        Path(options.json).unlink(missing_ok=True)
    jobs = [job for kind in KINDS if kind.name in options.kinds for job in _jobs(kind, options.only)]
    written = Path(options.json) if options.json else None
    trials = _read(written) if options.resume and written else []
    known = {(trial.kind, trial.model) for trial in trials}
    jobs = [job for job in jobs if (job.kind.name, job.model_class.__name__) not in known]
    console = Console(width=None if os.isatty(1) else 160)
    with Progress(console=console) as progress:
        task = progress.add_task("models", total=len(jobs))
        for trial in run_jobs(
            jobs,
            stages=options.stages,
            schedule=options.schedule,
            at_once=options.at_once,
            seconds=options.seconds,
            with_upstream=options.upstream,
        ):
            trials.append(trial)
            if written:  # as they come: a run that is ended can go on
                with written.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
            progress.update(task, advance=1, description=trial.model)
            if options.verbose and trial.outcome != "equal":
                progress.console.print(f"{trial.model}: {trial.outcome}: {trial.cause[:1000]}", markup=False)
    _show(console, trials, options.stages, options.schedule)
    return int(any(trial.outcome == "wrong" for trial in trials))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    names = [kind.name for kind in KINDS]
    parser.add_argument("only", nargs="*", metavar="model", help="only models with this in the name of their class")
    parser.add_argument("--kinds", nargs="+", choices=names, default=names, help="only these kinds (default: all)")
    parser.add_argument("--stages", type=int, default=2, help="stages (default: %(default)s)")
    parser.add_argument("--schedule", default="1F1B", help="schedule with one stage per rank (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=100.0, help="CPU limit for one model (default: %(default)s)")
    parser.add_argument("--upstream", action="store_true", help="cut by torch.distributed.pipelining too")
    parser.add_argument("--json", metavar="FILE", help="write the trials into a file, one line for each")
    parser.add_argument("--resume", action="store_true", help="leave out the models that the file has already")
    parser.add_argument("--verbose", action="store_true", help="print each cause in full")
    return parser.parse_args()


def _read(file: Path) -> list[Trial]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Trial(**json.loads(line)) for line in lines]


def _jobs(kind: Kind, only: Sequence[str]) -> list[Job]:
    jobs = [Job(kind, config, model) for config, model in kind.classes().items()]
    wanted = [word.lower() for word in only]
    return [job for job in jobs if not wanted or any(word in job.model_class.__name__.lower() for word in wanted)]


def _show(console: Console, trials: Sequence[Trial], stages: int, schedule: str) -> None:
    table = Table("model", "kind", "result", "upstream", "cause", title=f"{stages} stages, {schedule}")
    for trial in sorted(trials, key=lambda trial: (trial.kind, trial.model.lower())):
        table.add_row(
            trial.model,
            trial.kind,
            f"[{COLOURS[trial.outcome]}]{trial.outcome}[/]",
            trial.upstream or "-",
            trial.cause[:200].replace("[", r"\["),
        )
    console.print(table)
    summary = Table(
        "kind",
        "equal",
        "error",
        "wrong",
        "share",
        "do not train uncut",
        *(f"upstream: {outcome}" for outcome in UPSTREAM),
        title="how many",
    )
    for name in [*dict.fromkeys(trial.kind for trial in trials), "all"]:
        counts = Counter(trial.outcome for trial in trials if name in (trial.kind, "all"))
        tried = counts["equal"] + counts["error"] + counts["wrong"]
        share = f"{counts['equal'] / tried:.1%}" if tried else "-"
        theirs = Counter(trial.upstream for trial in trials if name in (trial.kind, "all"))
        numbers = [counts["equal"], counts["error"], counts["wrong"], share, counts["not uncut"]]
        numbers += [theirs[outcome] for outcome in UPSTREAM]
        summary.add_row(name, *map(str, numbers))
    console.print(summary)
    console.print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    raise SystemExit(main())
