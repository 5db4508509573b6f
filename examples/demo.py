"""Cuts a small GPT into stages, trains them on local ranks, and shows that nothing else changed: run `make demo`."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

import torch
from compare import Check, check_forward, check_state, check_training_run, report
from gpt import GPT, GPTConfig, next_token_loss, random_tokens
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn
from training import BATCH, draw, executed_timeline, plan_training, train_on_ranks, train_uncut, worst_parameter

from pipecut import Pipe, compare, pipeline


def main() -> int:
    """Cut, show, compare. 0 if the pipe and the uncut model agree in everything."""
    options = _options()
    console = Console(width=120)
    config = GPTConfig(layers=options.layers, width=128, dropout=0.1, tied_embeddings=True)
    torch.manual_seed(0)
    model = GPT(config)
    uncut = copy.deepcopy(model)
    with _progress(console) as progress:
        task = progress.add_task(f"tracing a GPT of {config.layers} layers, cutting it into {options.stages} stages")
        pipe = pipeline(model, (random_tokens(config, batch=8),), num_stages=options.stages)
        progress.update(task, description="running the pipe and the uncut model")
        checks = check(pipe, uncut, config)
    console.print(str(pipe), highlight=False, markup=False)
    console.print()
    checks += train(console, options)
    if report(console, checks):
        return 0
    console.print("[bold red]The pipe differs from the uncut model.[/]")
    return 1


def train(console: Console, options: argparse.Namespace) -> list[Check]:
    """Train on local ranks and uncut, side by side; print the plan, write the timeline."""
    config = GPTConfig(layers=options.layers, width=128, tied_embeddings=True)
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    with _progress(console) as progress:
        progress.add_task("measuring the parts of a GPT, searching a cut and a schedule")
        planned = plan_training(config, options.ranks, BATCH // options.microbatches, str(folder / "plan.json"))
    console.print(str(planned), highlight=False, markup=False)
    plan = planned.schedule_plan
    console.print(plan.grid(width=118), highlight=False, markup=False)
    uncut = train_uncut(config, options.steps, console)
    runs = train_on_ranks(config, options.ranks, options.steps, str(folder / "plan.json"))
    executed = executed_timeline(runs, planned)
    draw(planned, executed, str(folder / "timeline.svg"))
    console.print(str(compare(planned, executed)), highlight=False, markup=False)
    cores = os.cpu_count() or 1
    if cores < plan.ranks:
        console.print(f"({plan.ranks} ranks share {cores} cores here: one that waits leaves its core to another)")
    console.print(f"\nThe last step, predicted and executed: {folder / 'timeline.svg'}\n", highlight=False)
    worst_loss = max(abs(mine - theirs) for run in runs for mine, theirs in zip(run.losses, uncut.losses, strict=True))
    name, difference = worst_parameter(runs, uncut)
    losses = f"{uncut.losses[0]:.4f} to {uncut.losses[-1]:.4f}, worst difference {worst_loss:.1e}"
    return [
        Check(f"loss of {options.steps} steps on {plan.ranks} ranks", worst_loss < 1e-4, losses),
        Check("parameters after them", difference < 1e-4, f"worst difference {difference:.1e}, {name}"),
    ]


def check(pipe: Pipe, uncut: nn.Module, config: GPTConfig) -> list[Check]:
    """All that has to be the same."""
    tokens = random_tokens(config, batch=8)
    checks = [*check_training_run(pipe, uncut, tokens, lambda logits: next_token_loss(logits, tokens))]
    for batch in (1, 13):
        other = random_tokens(config, batch, seed=batch)
        checks.append(check_forward(f"output, batch of {batch} without tracing again", pipe, uncut, other))
    pipe.eval()
    uncut.eval()
    checks.append(check_forward("output, after eval() of both", pipe, uncut, tokens))
    checks.append(check_state(pipe, uncut))
    return checks


def _progress(console: Console) -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4, help="how many stages to cut into (default: %(default)s)")
    ranks = max(2, min(4, os.cpu_count() or 1))
    parser.add_argument("--ranks", type=int, default=ranks, help="how many ranks train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="how many steps to train (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of each step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="how many layers the GPT has (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
