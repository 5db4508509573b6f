"""Steps that end badly on one rank, and what each rank has afterwards: each function runs on every rank."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pipecut import ChunkSpec, PipeError, StepError
from pipecut.run.schedule import PipelineSchedule
from pipecut.run.state import StepState
from pipecut.schedule import Action, Op
from tests.run.distributed.failing_models import Party, fail, nth

NAN = float("nan")


def gradients(party: Party) -> list[Tensor | None]:
    return [parameter.grad for stage in party.stages for parameter in stage.submod.parameters()]


def error_of(call: Callable[[], object]) -> str:
    """The kind and text of what a call raises."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def step(party: Party, schedule: PipelineSchedule, target: Tensor | None) -> Any:
    return schedule.step(*party.args, target=target if party.target is not None else None)


def has_nan(rank: int, traced: bool) -> tuple[str, int, float]:
    """A step with NaN in its loss, and one without it after that, over the same connections."""
    party = Party(rank, 2, traced)
    schedule = party.schedule()
    bad = party.y.clone()
    bad[5] = NAN
    told = error_of(lambda: step(party, schedule, bad))
    left = sum(grad is not None for grad in gradients(party))
    step(party, schedule, party.y)
    return told, left, schedule.mean_loss()


def has_nan_after_good_steps(rank: int) -> tuple[str, list[bool]]:
    """Gradients of an earlier step are there when one with NaN is added to them."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    step(party, schedule, party.y)
    return error_of(lambda: step(party, schedule, party.y * NAN)), [grad is not None for grad in gradients(party)]


class Unmergeable(ChunkSpec):
    """Fails when the step is over but for its output."""

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        raise ValueError("cannot be merged on purpose")

    def __repr__(self) -> str:
        return "Unmergeable()"


def keeps_nothing_of_a_failed_step(rank: int) -> int:
    """The states that are left of a step with NaN, once its error is gone."""

    def states() -> int:
        gc.collect()
        return sum(type(each) is StepState for each in gc.get_objects())

    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    before = states()
    error_of(lambda: step(party, schedule, party.y * NAN))
    return states() - before


def cannot_merge(rank: int, method: str) -> str:
    party = Party(rank, 2, traced=False)
    schedule = party.schedule(output_merge_spec=Unmergeable())
    return error_of(lambda: getattr(schedule, method)(*party.args, target=party.target))


def fails_last(rank: int, world: int) -> tuple[str, int]:
    """The first rank fails in the very last backward, when all others are done."""
    party = Party(rank, world, traced=False)
    if inner := party.inner(0):
        inner.backward_trap = nth(3, fail)
    schedule = party.schedule()
    told = error_of(lambda: step(party, schedule, party.y))
    return told, sum(grad is not None for grad in gradients(party))


def interrupts(rank: int, who: int, kind: type[BaseException], where: str) -> str:
    """An exception that is no Exception, in a forward, a loss or before the first action."""

    def interrupt() -> None:
        raise kind("on purpose")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        trap()
        return F.mse_loss(output, target)

    trap = nth(1, interrupt) if where == "loss" else lambda: None
    party = Party(rank, 2, traced=False)
    inner = party.inner(who)
    if inner is not None and where == "forward":
        inner.forward_trap = nth(2, interrupt)
    schedule = party.schedule(loss_fn)
    if where == "begin" and rank == who:
        party.stages[0].check_no_new_wrappers = interrupt  # type: ignore[method-assign]
    if where == "watch" and rank == who:
        schedule._isolation._watch_of = lambda executor: interrupt()  # type: ignore[assignment, method-assign, return-value]
    return error_of(lambda: step(party, schedule, party.y))


def is_interrupted(rank: int) -> str:
    """A real SIGINT while rank 1 computes."""

    def wait() -> None:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        while True:
            time.sleep(0.01)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    party = Party(rank, 2, traced=False)
    if inner := party.inner(1):
        inner.forward_trap = nth(1, wait)
    schedule = party.schedule()
    return error_of(lambda: step(party, schedule, party.y))


def goes_on_after_a_failure(rank: int, folder: Path) -> tuple[str, str, float]:
    """The same schedule, a new one, and one over a group that is made anew."""
    party = Party(rank, 2, traced=False)
    if inner := party.inner(1):
        inner.forward_trap = nth(2, fail)
    schedule = party.schedule()
    assert error_of(lambda: step(party, schedule, party.y)).startswith("StepError: the step failed: rank 1 failed")
    again = error_of(lambda: step(party, schedule, party.y))
    new = error_of(party.schedule)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    step(party, schedule, party.y)
    return again, new, schedule.mean_loss()


def steps_without_a_group(rank: int) -> str:
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    step(party, schedule, party.y)
    dist.barrier()
    dist.destroy_process_group()
    return error_of(lambda: step(party, schedule, party.y))


def steps_from_two_threads(rank: int) -> list[str]:
    """The first step holds until the second has been tried; and then goes on as if nothing had been."""
    party = Party(rank, 2, traced=False)
    entered, tried = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        tried.wait()

    inner = party.inner(rank)
    assert inner is not None
    inner.forward_trap = nth(0, hold)
    schedule, found = party.schedule(), ["", ""]

    def first() -> None:
        found[0] = error_of(lambda: step(party, schedule, party.y))

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    found[1] = error_of(lambda: step(party, schedule, party.y))
    tried.set()
    thread.join()
    return found


def asks_for_the_loss_alone(rank: int) -> list[float]:
    """Rank 0 asks for the mean loss, rank 1 does not, and steps."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    asked = []
    for _ in range(2):
        step(party, schedule, party.y)
        if rank == 0:
            asked.append(schedule.mean_loss())
    return asked


def waits_alone(rank: int, timeout: float, what: str) -> tuple[str, float]:
    """Rank 1 makes no second step: it asks for the loss, sleeps, or is stopped in the middle of its own."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule(timeout=timeout)
    step(party, schedule, party.y)
    if rank == 1 and what == "mean_loss":
        return str(schedule.mean_loss()), 0.0
    if rank == 1 and what == "sleep":
        inner = party.inner(1)
        assert inner is not None
        inner.forward_trap = nth(1, lambda: time.sleep(3 * timeout))
    start = time.monotonic()
    return error_of(lambda: step(party, schedule, party.y)), time.monotonic() - start


def is_stopped(rank: int, timeout: float, folder: Path) -> str:
    """Rank 1 is stopped in a forward, and goes on when rank 0 has given up."""

    def stop() -> None:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    party = Party(rank, 2, traced=False)
    schedule = party.schedule(timeout=timeout)
    step(party, schedule, party.y)
    if inner := party.inner(1):
        inner.forward_trap = nth(2, stop)
    told = error_of(lambda: step(party, schedule, party.y))
    if rank == 0:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    return told


def holds_the_store_and_is_stopped(rank: int, timeout: float, folder: Path) -> str:
    """Rank 0, whose process answers for the store, is stopped in a backward."""
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
    else:
        while not (folder / "port").exists():
            time.sleep(0.05)
        store = dist.TCPStore("localhost", int((folder / "port").read_text()), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    party = Party(rank, 2, traced=False)
    schedule = party.schedule(timeout=timeout)
    step(party, schedule, party.y)
    if inner := party.inner(0):
        (folder / "pid").write_text(str(os.getpid()))
        inner.forward_trap = nth(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    told = error_of(lambda: step(party, schedule, party.y))
    if rank == 1:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    return told


def comes_too_early(rank: int, timeout: float, folder: Path) -> str:
    """Rank 0 gives up its first step before rank 1 has come, and makes it again."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule(timeout=timeout)
    if rank == 0:
        told = error_of(lambda: step(party, schedule, party.y))
        (folder / "gave up").touch()
    else:
        told = ""
        while not (folder / "gave up").exists():
            time.sleep(0.05)
    step(party, schedule, party.y)
    return told


def counts_apart(rank: int) -> str:
    """Rank 1 has caught an error of its own call, which no other rank made."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    step(party, schedule, party.y)
    if rank == 1:
        schedule._connection._calls += 1  # as if it had made a call that nobody else has seen
    return error_of(lambda: step(party, schedule, party.y))


def skips_a_batch(rank: int) -> str:
    """Rank 1 goes on to the next batch where rank 0 does not."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()
    for number in range(3):
        if (rank, number) == (1, 1):
            continue
        schedule.step_number = number
        told = error_of(lambda: step(party, schedule, party.y))
        if told != "none":
            return told
    return "no error"


def observes_badly(rank: int) -> str:
    """A custom function fails in the last action of one rank."""
    party = Party(rank, 2, traced=False)
    schedule = party.schedule()

    def run(action: Action, context: Any) -> None:
        context.run(action)
        if rank == 0 and action.microbatch == 3:
            raise PipeError("in a custom function")

    schedule.register_custom_function(Op.FULL_BACKWARD, run)
    return error_of(lambda: step(party, schedule, party.y))


def keeps_optimizers_together(rank: int) -> list[bool]:
    """A training loop that skips a batch whose step failed: no rank takes an optimizer's step that another does not."""
    party = Party(rank, 2, traced=True)
    schedule = party.schedule()
    optimizer = torch.optim.SGD(party.stages[0].submod.parameters(), lr=0.1)
    stepped = []
    for number in range(3):
        optimizer.zero_grad()
        with contextlib.suppress(StepError):
            step(party, schedule, party.y * NAN if number == 1 else party.y)
            optimizer.step()
            stepped.append(True)
            continue
        stepped.append(False)
    assert all(parameter.isfinite().all() for parameter in party.stages[0].submod.parameters())
    return stepped
