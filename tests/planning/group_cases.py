"""What ranks do in the tests of plans that they make together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipecut
from pipecut.planning.group import on_all_ranks, on_first_rank
from pipecut.planning.measure import measure_link

WIDTH, BATCH = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def planned(ranks: int, net: nn.Module | None = None, **options: Any) -> pipecut.TrainingPlan:
    options = {"batch": BATCH, "group": dist.group.WORLD, "time_budget": 0.1} | options
    return pipecut.plan(net or model(), torch.ones(4, WIDTH), ranks=ranks, **options)


def trains_as_planned(rank: int, ranks: int, cost: str) -> tuple[Any, dict[str, float]]:
    """The plan, and how far each gradient of this rank's stages is from that of the uncut model."""
    net = model()
    found = planned(ranks, net, cost=cost, schedules=["1F1B", "ZB-H1", "Interleaved1F1B"])
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    uncut = model()
    nn.functional.mse_loss(uncut(x), y).backward()
    expected = dict(uncut.named_parameters())
    schedule = found.build(rank, loss_fn=nn.functional.mse_loss)
    first, last = (any(getattr(stage, end) for stage in schedule.stages) for end in ("is_first", "is_last"))
    schedule.step(*((x,) if first else ()), target=y if last else None)
    off = {}
    for stage in schedule.stages:
        for name, parameter in stage.submod.named_parameters():
            assert parameter.grad is not None, name
            off[name] = float((parameter.grad - expected[name].grad).abs().max())  # type: ignore[operator]
    costs = found.report.costs
    facts = (found.cuts, found.schedule_plan.actions, found.step_time, costs, found.alternatives)
    return repr(facts), off


def measures_the_link(rank: int) -> tuple[float, float] | None:
    assert dist.group.WORLD is not None
    return measure_link(dist.group.WORLD, torch.device("cpu"))


def asks_for_another_batch(rank: int, ranks: int) -> None:
    planned(ranks, batch=BATCH + rank)


def is_not_in_the_group(rank: int, ranks: int) -> str:
    group = dist.new_group([0])
    try:
        planned(ranks, group=group, schedules=["1F1B"])
    except pipecut.InputError as error:
        return str(error)
    return ""


class OtherOperations(nn.Sequential):
    """The same parameters as without it, and one operation more."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def _other_operations() -> nn.Module:
    net = model()
    net[2] = OtherOperations(*net[2:3])
    return net


def _wrapped() -> nn.Module:
    net = model()
    net[2] = nn.Sequential(*net[2:3])
    return net


def asks_for_something_else(rank: int, options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Each rank has options of its own."""
    options_here = {"ranks": 2, "schedules": ["1F1B"], "time_budget": 0.0} | options[rank]
    planned(**options_here)


def has_another_model(rank: int) -> None:
    planned(2, _wrapped() if rank == 0 else _other_operations(), schedules=["1F1B"], cost="measured")


def has_another_mode(rank: int, part: str | None) -> None:
    net = model()
    if rank:
        (net if part is None else net.get_submodule(part)).eval()
    planned(2, net, schedules=["1F1B"])


def has_another_example(rank: int, widths: tuple[int, int]) -> None:
    x = torch.ones(4 - 2 * rank, widths[rank])
    pipecut.plan(model(), x, ranks=2, batch=BATCH, schedules=["1F1B"], time_budget=0.0, group=dist.group.WORLD)


def has_a_progress_that_fails(rank: int, at: str) -> None:
    def progress(text: str) -> None:
        if rank == 1 and text.startswith(at):
            raise RuntimeError(f"no more at {at}")

    planned(2, schedules=["1F1B"], cost="measured", time_budget=0.0, progress=progress)


def cannot_do_it(rank: int, what: str) -> None:
    """One step of planning fails on the second rank."""
    from pipecut.planning import costs as chains
    from pipecut.planning import ranking

    places: dict[str, tuple[Any, str]] = {
        "measure": (chains.Machine, "measure"),
        "chain_of": (chains, "chain_of"),
        "cut_trace": (ranking, "cut_trace"),
        "prepare": (ranking.StageBenchmark, "prepare"),
    }
    owner, name = places[what]
    kept = owner.__dict__[name]

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(f"no {what}")

    if rank == 1:
        setattr(owner, name, fails)
    try:
        planned(2, schedules=["1F1B"], cost="measured", time_budget=0.0)
    finally:
        setattr(owner, name, kept)


def is_no_group(rank: int) -> list[str]:
    """What is said of things that are no group, and of one that is gone."""
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    said = []
    for group in (3, "WORLD", gone):
        try:
            planned(2, group=group)
        except pipecut.InputError as error:
            said.append(str(error))
    return said


def fails_on_one(rank: int, ranks: int, who: int, everywhere: bool) -> None:
    assert dist.group.WORLD is not None

    def call() -> int:
        if rank == who:
            raise ValueError("no luck")
        return rank

    (on_all_ranks if everywhere else on_first_rank)(dist.group.WORLD, call)


def finds_nothing_that_fits(rank: int, ranks: int) -> None:
    planned(ranks, memory="1kB", schedules=["1F1B"])
