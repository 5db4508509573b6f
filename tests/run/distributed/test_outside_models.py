"""Models that act outside of their trace: on ranks they train as the uncut one, or there is an error in time."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipecut import PipeError, SplitPoint, get_schedule_class, pipeline, random_streams
from tests.run.outside_models import WIDTH, WORLD, OutsideCase, logs_of, random_cases
from tests.support.properties import examples
from tests.support.ranks import GROUP_TIMEOUT, Ranks
from tests.support.sampling import sampled

STEPS, MICROBATCHES, ROWS = 2, 2, 6
RATE = 0.1


@dataclass
class Training:
    """The losses and the parameters after some steps, and the values from outside that were used."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    log: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""  # the first one, if it is one of pipecut's
    failed: bool = False  # it was in a step
    steps: int = 0  # that ended without an error
    warned: bool = False  # that hooks of different stages share something


def batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2))
    return x, y


def begin(step: int) -> None:
    for seeding in (random.seed, np.random.seed, torch.manual_seed):
        seeding(step)


def train_on_rank(rank: int, cases: Sequence[OutsideCase]) -> list[Training]:
    """Cut each model and train it, in this process as one of two."""
    group: Any = None
    found = []
    for case in cases:
        group = group or dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found.append(_train(rank, case, group))
        found[-1].warned = any("which a hook on" in str(warning.message) for warning in warned)
        if found[-1].failed:  # the connections are closed
            group = dist.destroy_process_group(group)
    return found


def _train(rank: int, case: OutsideCase, group: dist.ProcessGroup) -> Training:
    WORLD.reset()
    begin(100 + rank)
    model, loss_fn = case.build()
    x, y = batch()
    made = Training()
    try:
        cut: dict[str, Any] = {"num_stages": 2}
        if case.cut != "automatic":
            place = {"between": ("blocks.1", SplitPoint.BEGINNING), "inside": ("blocks.1.lin", SplitPoint.END)}
            cut = {"split_spec": dict([place[case.cut]])}
        pipe = pipeline(model, (x[:3],), **cut)
    except PipeError as error:
        made.error = f"{type(error).__name__}: {error}"
        return made
    WORLD.reset()
    stage = pipe.build_stage(rank, "cpu", group)
    logs = logs_of(stage.submod) | {"loss": model.loss_log}
    for log in logs.values():
        log.values.clear()
    schedule = get_schedule_class(case.schedule)(stage, MICROBATCHES, loss_fn, random_numbers="as_uncut")  # type: ignore[call-arg, arg-type]
    optimizer = torch.optim.SGD(stage.submod.parameters(), RATE)
    for step in range(STEPS):
        begin(step)
        losses: list[Tensor] = []
        try:
            schedule.step(*((x,) if rank == 0 else ()), **({"target": y, "losses": losses} if rank == 1 else {}))
        except PipeError as error:
            made.error, made.failed = f"{type(error).__name__}: {error}", True
            return made
        optimizer.step()
        optimizer.zero_grad()
        made.losses += [float(loss) for loss in losses]
        made.steps += 1
    made.parameters = {name: parameter.detach().clone() for name, parameter in stage.submod.named_parameters()}
    made.log = {name: log.values for name, log in logs.items() if log.values}
    return made


def train_uncut(case: OutsideCase, log: dict[str, list[float]]) -> Training:
    """Train the model itself, one microbatch after the other, with the values from outside that the ranks used."""
    WORLD.reset()
    model, loss_fn = case.build()
    for name, own in {**logs_of(model), "loss": model.loss_log}.items():
        own.forced = iter(log.get(name, ()))
    x, y = batch()
    made = Training()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        begin(step)
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), random_streams(MICROBATCHES), strict=True)
        for mine, target, stream in parts:
            with stream:
                loss = loss_fn(model(mine), target)
            (loss / MICROBATCHES).backward()
            made.losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    made.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return made


def verdict(case: OutsideCase, found: Sequence[Training]) -> str:
    """Return "equal" or "error"; raise if the ranks have trained something else without a word."""
    if any(each.error for each in found):
        assert all(each.error for each in found), f"{case}: an error on one rank only: {found}"
        assert all(each.steps == 0 for each in found), f"{case}: an error after the first step: {found}"
        assert all(FROM_A_CHECK.match(each.error) for each in found), f"{case}: {found}"
        return "error"
    log = {name: values for each in found for name, values in each.log.items()}
    try:
        expected = train_uncut(case, log)
    except StopIteration as error:
        raise AssertionError(f"{case}: the cut model used fewer values from outside: {log}") from error
    parameters = {name: value for each in found for name, value in each.parameters.items()}
    losses = found[-1].losses
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), msg=lambda m: f"{case}: losses {m}")
    for name, value in expected.parameters.items():
        if name in parameters:  # one that nothing uses has no stage
            torch.testing.assert_close(parameters[name], value, msg=lambda m, name=name: f"{case}: {name}: {m}")
    return "equal"


# An error of pipecut's own; if that of a step, then the one with which it began, on whichever rank.
FROM_A_CHECK = re.compile(r"(?!StepError)\w+|StepError: the step failed: rank \d failed [^\n]*: pipecut\.errors\.\w+:")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


def check_cases(ranks: Ranks, cases: Sequence[OutsideCase]) -> Counter[str]:
    trainings = zip(*ranks.run(train_on_rank, cases), strict=True)
    verdicts = [_verdict_or_fault(case, found) for case, found in zip(cases, trainings, strict=True)]
    tally = Counter(verdict for verdict in verdicts if verdict in ("equal", "error", "warning"))
    faults = [verdict for verdict in verdicts if verdict not in tally]
    assert not faults, "\n\n".join(faults)
    print(dict(tally))
    return tally


def _verdict_or_fault(case: OutsideCase, found: Sequence[Training]) -> str:
    try:
        return verdict(case, found)
    except AssertionError as fault:
        return "warning" if any(each.warned for each in found) else f"SILENT {fault}"


@pytest.mark.distributed
def test_models_that_act_outside_of_their_trace(ranks: Ranks) -> None:
    tally = check_cases(ranks, random_cases(0, examples(8)))
    assert set(tally) <= {"equal", "error", "warning"}


PARTS, CASES = 40, 50  # together 2,000


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("part", sampled(range(PARTS), lambda part: part < 8, lambda part: True))
def test_many_of_them(ranks: Ranks, part: int) -> None:
    tally = check_cases(ranks, random_cases(0, PARTS * CASES)[part::PARTS])
    assert tally["equal"] > 5
    assert tally["error"] > 5


# Each was silently wrong once.
STORIES = [
    OutsideCase(("plain", "plain", "plain"), root="stashes", loss="reads the stash"),
    OutsideCase(("remembers", "plain", "plain"), loss="reads an attribute"),
    OutsideCase(("plain", "plain", "keeps in a list"), loss="reads a list"),
    OutsideCase(("plain", "plain", "plain"), loss="reads what a hook set"),
    OutsideCase(("plain", "plain", "plain"), root="counts for others", loss="reads a count"),
    OutsideCase(("plain", "plain", "plain"), root="keeps in a config", loss="reads a config"),
    OutsideCase(("plain", "decides by the count", "plain"), root="counts for others"),
    OutsideCase(("takes the stash", "stashes", "plain")),
    OutsideCase(("takes the stash", "plain", "plain"), root="stashes"),
    OutsideCase(("reads another block", "remembers", "plain"), cut="inside"),
    OutsideCase(("plain", "plain", "plain"), root="every third call"),
    OutsideCase(("plain", "plain", "plain"), root="rarely, by its own generator"),
]


@pytest.mark.distributed
def test_hooks_of_different_stages(ranks: Ranks) -> None:
    """State that they share is in the trace of nobody: there is a warning, as they may be no more than statistics."""
    told = ("counts by a hook", "uses the count by a hook"), ("leaves a tensor by a hook", "takes the tensor by a hook")
    orders = [pair for one, other in told for pair in ((one, other), (other, one))]
    cases = [OutsideCase((first, "plain", last)) for first, last in orders]
    assert check_cases(ranks, cases) == {"warning": len(cases)}


@pytest.mark.slow
@pytest.mark.distributed
def test_what_was_not_seen_before(ranks: Ranks) -> None:
    assert check_cases(ranks, STORIES) == {"error": len(STORIES)}
