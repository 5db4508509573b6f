"""Cuts a small GPT into stages, automatically, and shows that nothing else changed: run it with `make demo`."""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from compare import Check, check_forward, check_state, check_training_run, report
from gpt import GPT, GPTConfig, next_token_loss, random_tokens
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import nn

from pipecut import Pipe, pipeline


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
        checks = compare(pipe, uncut, config)
    console.print(str(pipe), highlight=False, markup=False)
    console.print()
    if report(console, checks):
        return 0
    console.print("[bold red]The pipe differs from the uncut model.[/]")
    return 1


def compare(pipe: Pipe, uncut: nn.Module, config: GPTConfig) -> list[Check]:
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
    parser.add_argument("--stages", type=int, default=4, help="how many stages (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="how many layers the GPT has (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
