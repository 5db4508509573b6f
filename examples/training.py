"""Trains a small GPT on local ranks, one stage on each, and the uncut model beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, next_token_loss, random_tokens
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pipecut import Schedule1F1B, launch, pipeline
from pipecut.schedule import Costs, Op, Plan, Span, Timeline, plan_for, render, simulate

BATCH, LEARNING_RATE = 16, 1e-2


@dataclass(frozen=True)
class Run:
    """What came out of a training run: the loss of each step, and the parameters at the end, by name."""

    losses: list[float]
    parameters: dict[str, Tensor]
    spans: list[Span]


def fresh_model(config: GPTConfig) -> GPT:
    """The same weights every time."""
    torch.manual_seed(0)
    return GPT(config)


def batches(config: GPTConfig, steps: int) -> Iterator[Tensor]:
    """The same data every time."""
    return (random_tokens(config, BATCH, seed=step) for step in range(steps))


def train_uncut(config: GPTConfig, steps: int, console: Console) -> Run:
    """The plain loop, on one device."""
    model = fresh_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    for tokens in _progress(batches(config, steps), steps, "training the uncut model", console):
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, dict(model.named_parameters(remove_duplicate=False)), [])


def train_on_ranks(config: GPTConfig, ranks: int, microbatches: int, steps: int) -> list[Run]:
    """The same training on local processes, one stage on each."""
    return launch(train_stage, ranks, config, microbatches, steps, timeout=600)


def train_stage(config: GPTConfig, microbatches: int, steps: int) -> Run:
    """What each rank does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pipe = pipeline(fresh_model(config), (random_tokens(config, BATCH),), num_stages=ranks)
    stage = pipe.build_stage(rank, "cpu")
    schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=next_token_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    data = batches(config, steps)
    console = Console(quiet=rank != 0)
    for tokens in _progress(data, steps, f"training on {ranks} ranks", console):
        optimizer.zero_grad()
        schedule.tracing = len(losses) == steps - 1
        if stage.is_first:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens if stage.is_last else None, return_outputs=False)
        optimizer.step()
        losses.append(schedule.mean_loss())
    held = {name: parameter.detach() for name, parameter in stage.submod.named_parameters(remove_duplicate=False)}
    return Run(losses, held, list(schedule.trace()))


def worst_parameter(runs: list[Run], uncut: Run) -> tuple[str, float]:
    """The parameter that is furthest from the uncut model's, over all ranks, and how far."""
    differences = {
        name: (parameter - uncut.parameters[name]).abs().max().item()
        for run in runs
        for name, parameter in run.parameters.items()
    }
    missing = {name for name in uncut.parameters if name not in differences}
    assert not missing, f"no rank holds {sorted(missing)}"
    worst = max(differences, key=differences.__getitem__)
    return worst, differences[worst]


def executed_timeline(runs: list[Run], name: str) -> Timeline:
    """The last step of all ranks, from its first moment."""
    spans = [span for run in runs for span in run.spans if span.action.is_compute]
    begin = min(span.start for span in spans)
    shifted = [span._replace(start=1000 * (span.start - begin), end=1000 * (span.end - begin)) for span in spans]
    return Timeline(name, len(runs), tuple(shifted), "ms")


def draw(runs: list[Run], microbatches: int, path: str) -> Plan:
    """The plan with the costs that were measured, above the step as it was executed."""
    plan = plan_for("1F1B", ranks=len(runs), microbatches=microbatches)
    executed = executed_timeline(runs, "executed")
    report = simulate(plan, Costs(forward=_mean(executed, Op.FORWARD), full_backward=_mean(executed, Op.FULL_BACKWARD)))
    planned = replace(report.timeline, name="planned, with the measured costs", unit="ms")
    render.svg([planned, executed], path)
    return plan


def _mean(timeline: Timeline, op: Op) -> list[float]:
    """The mean time of an op on each stage, in milliseconds."""
    times: list[list[float]] = [[] for _ in range(timeline.ranks)]
    for span in timeline:
        if span.action.op is op:
            times[span.action.stage].append(span.end - span.start)
    return [sum(each) / len(each) for each in times]


def _progress(data: Iterator[Tensor], total: int, what: str, console: Console) -> Iterator[Tensor]:
    hidden = console.quiet or not console.is_terminal
    yield from track(data, what, total=total, console=console, transient=True, disable=hidden)
