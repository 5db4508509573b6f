"""Plans the training of a small GPT, trains it on local ranks, and the uncut model beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, next_token_loss, random_tokens
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pipecut import TrainingPlan, launch, plan
from pipecut.schedule import Span, Timeline, render

BATCH, LEARNING_RATE = 32, 1e-2


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


def plan_training(config: GPTConfig, ranks: int, microbatch: int, path: str) -> TrainingPlan:
    """Search cut and schedule together for the costs of this machine, and save what was found."""
    found: TrainingPlan = launch(plan_rank, ranks, config, microbatch, timeout=600)[0]
    found.save(path)
    return found


def plan_rank(config: GPTConfig, microbatch: int) -> TrainingPlan:
    """What each rank does: all measure at the same time, as all will compute at the same time."""
    return plan(
        fresh_model(config),
        random_tokens(config, microbatch),
        ranks=dist.get_world_size(),
        batch=BATCH,
        microbatch=microbatch,
        cost="measured",
        group=dist.group.WORLD,
    )


def train_on_ranks(config: GPTConfig, ranks: int, steps: int, path: str) -> list[Run]:
    """The same training on local processes, by a plan that was saved."""
    return launch(train_rank, ranks, config, steps, path, timeout=600)


def train_rank(config: GPTConfig, steps: int, path: str) -> Run:
    """What each rank does."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    planned = TrainingPlan.load(path, fresh_model(config), random_tokens(config, BATCH))
    schedule = planned.build(rank, loss_fn=next_token_loss)
    stages = schedule.stages
    parameters = {id(each): each for stage in stages for each in stage.submod.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE, momentum=0.9)
    losses = []
    data = batches(config, steps)
    console = Console(quiet=rank != 0)
    for tokens in _progress(data, steps, f"training on {ranks} ranks", console):
        optimizer.zero_grad()
        schedule.tracing = len(losses) == steps - 1
        inputs = (tokens,) if any(stage.is_first for stage in stages) else ()
        target = tokens if any(stage.is_last for stage in stages) else None
        schedule.step(*inputs, target=target, return_outputs=False)
        optimizer.step()
        losses.append(schedule.mean_loss())
    held = {
        name: parameter.detach()
        for stage in stages
        for name, parameter in stage.submod.named_parameters(remove_duplicate=False)
    }
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


def executed_timeline(runs: list[Run], planned: TrainingPlan) -> Timeline:
    """The last step of all ranks, from its first moment: what the plan predicts, without transfers."""
    predicted = {span.action for span in planned.report.timeline}
    spans = [span for run in runs for span in run.spans if span.action in predicted]
    begin = min(span.start for span in spans)
    shifted = [span._replace(start=span.start - begin, end=span.end - begin) for span in spans]
    return Timeline("executed", len(runs), tuple(shifted), "s")


def draw(planned: TrainingPlan, executed: Timeline, path: str) -> None:
    """The predicted step, above the step as it ran."""
    predicted = replace(planned.report.timeline, name="predicted", unit="s")
    render.svg([in_milliseconds(predicted), in_milliseconds(executed)], path)


def in_milliseconds(timeline: Timeline) -> Timeline:
    """The same in another unit."""
    spans = tuple(span._replace(start=1000 * span.start, end=1000 * span.end) for span in timeline)
    return replace(timeline, spans=spans, unit="ms")


def _progress(data: Iterator[Tensor], total: int, what: str, console: Console) -> Iterator[Tensor]:
    hidden = console.quiet or not console.is_terminal
    yield from track(data, what, total=total, console=console, transient=True, disable=hidden)
