"""launch() gives the results of all ranks or the first failure, and leaves no process behind."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecut import InputError, PipeError, PipelineStage, Schedule1F1B
from pipecut.errors import LaunchError, LostConnectionError
from pipecut.launcher import launch
from pipecut.launcher import pool as pool_module
from pipecut.launcher import rank as rank_module
from pipecut.launcher.pool import RankPool
from pipecut.launcher.rank import Outcome
from pipecut.torch_internals import group_timeout
from tests.support.limits import WORK

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]


def child_processes(parent: int) -> set[int]:
    """The children of a process, without the resource tracker that multiprocessing keeps for later."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if int(fields[1]) == parent and b"resource_tracker" not in command:
            children.add(int(stat.parent.name))
    return children


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Whatever happens in a test, its processes are gone."""
    before = child_processes(os.getpid())
    children = set(multiprocessing.active_children())  # other tests may keep ranks of their own
    yield
    assert child_processes(os.getpid()) - before == set()
    assert set(multiprocessing.active_children()) <= children


def failure_of(function: Any, ranks: int = 2, *args: Any, **options: Any) -> LaunchError:
    with pytest.raises(LaunchError) as caught:
        launch(function, ranks, *args, **{"timeout": WORK, **options})
    return caught.value


def summed(model: nn.Linear, scale: float) -> dict[str, Any]:
    """At the top level of a module: a new process finds it."""
    return {
        "rank": dist.get_rank(),
        "output": model(torch.ones(1, 2)) * scale,
        "threads": torch.get_num_threads(),
        "process": os.getpid(),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "COLOUR")},
    }


def test_a_function_of_a_module_runs_in_new_processes() -> None:
    model, environment = nn.Linear(2, 2), dict(os.environ)
    (result,) = launch(summed, 1, model, 2.0, env={"COLOUR": "blue"}, timeout=WORK)
    assert torch.equal(result["output"], model(torch.ones(1, 2)) * 2.0)
    assert result["rank"] == 0
    assert result["process"] != os.getpid()
    assert result["threads"] == 1
    assert result["environment"] == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "COLOUR": "blue"}
    assert dict(os.environ) == environment


def test_an_inner_function_runs_in_forks() -> None:
    shared = torch.zeros(2)
    torch.set_num_threads(2)

    def change(value: Tensor) -> tuple[int, Tensor]:
        shared.add_(value)
        return torch.get_num_threads(), shared

    try:
        results = launch(change, 2, torch.ones(2), timeout=WORK)
    finally:
        torch.set_num_threads(1)
    assert [threads for threads, _ in results] == [1, 1]
    assert all(torch.equal(made, torch.ones(2)) for _, made in results)
    assert torch.equal(shared, torch.zeros(2))  # every rank has its own copy


def test_a_fork_can_differentiate_after_its_parent_has() -> None:
    def gradient() -> Tensor | None:
        value = torch.ones(3, requires_grad=True)
        value.square().sum().backward()
        return value.grad

    expected = gradient()
    assert expected is not None
    for made in launch(gradient, 2, timeout=WORK):
        assert made is not None
        assert torch.equal(made, expected)


def test_large_results_come_back_by_value() -> None:
    (one,) = launch(lambda: torch.arange(3_000_000), 1, timeout=WORK)
    assert torch.equal(one, torch.arange(3_000_000))


def test_ranks_meet_before_any_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was done at once had closed connections that others were still making."""
    initialise = dist.init_process_group

    def observed(*args: Any, **options: Any) -> None:
        assert os.environ["TORCH_DIST_INIT_BARRIER"] == "1"
        initialise(*args, **options)

    monkeypatch.setattr(dist, "init_process_group", observed)  # forks have it too
    assert launch(lambda: dist.get_rank(), 4, timeout=WORK) == [0, 1, 2, 3]


def test_leaving_with_success_is_a_result() -> None:
    assert launch(lambda: sys.exit(0), 1, timeout=WORK) == [None]


def test_the_failure_of_a_rank_is_raised_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("no such colour")
        dist.barrier()

    error = failure_of(fail)
    assert isinstance(error, PipeError)
    assert error.rank == 1
    assert str(error).startswith("rank 1 failed: ValueError: no such colour\n\nOn rank 1:\nTraceback")
    assert 'raise ValueError("no such colour")' in error.traceback
    assert "rank.py" not in error.traceback  # it begins in the function


def test_a_lost_connection_is_not_where_a_failure_began() -> None:
    """Rank 0 loses its connection first, and rank 1 tells only later what was wrong."""

    def fail() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.3)
        raise ValueError("the cause")

    error = failure_of(fail)
    assert (error.rank, "ValueError: the cause" in str(error)) == (1, True)


class Fails(nn.Module):
    """A stage that cannot run its second microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("cannot go on")
        return x * self.weight


@pytest.mark.parametrize("origin", [0, 1])
def test_the_rank_is_found_whose_stage_failed(origin: int) -> None:
    """The step fails on both ranks; only one of them is to blame."""

    def train() -> None:
        rank = dist.get_rank()
        stage = PipelineStage(Fails() if rank == origin else nn.Linear(2, 2), rank, 2, "cpu")
        schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss)
        schedule.step(*([torch.ones(4, 2)] if rank == 0 else []), target=torch.ones(4, 2))

    error = failure_of(train)
    assert error.rank == origin
    assert f"rank {origin} failed: pipecut.errors.StepError: the step failed: rank {origin}" in str(error)
    assert "ValueError: cannot go on" in str(error)


def test_a_lost_connection_alone_is_raised() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("Connection closed by peer")

    error = failure_of(fail)
    assert (error.rank, "RuntimeError: Connection closed by peer" in str(error)) == (0, True)


def test_a_killed_rank_is_named_with_the_signal() -> None:
    def end() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    error = failure_of(end)
    assert error.rank == 1
    assert "rank 1 failed: it was killed by SIGKILL before" in str(error)
    assert str(error).endswith("end returned; the system does that when memory runs out")


def test_an_exit_code_is_told() -> None:
    error = failure_of(lambda: os._exit(7), 1)
    assert "rank 0 failed: it ended with exit code 7 before" in str(error)
    assert 'belongs below `if __name__ == "__main__":`' in str(error)
    assert "rank 0 failed: SystemExit: 3" in str(failure_of(lambda: sys.exit(3), 1))


def test_a_rank_that_was_interrupted_is_told() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    error = failure_of(interrupted, 1)
    assert str(error).startswith("rank 0 failed: it was interrupted before ")
    assert str(error).endswith(".interrupted returned")


def test_a_result_that_cannot_be_sent_is_refused() -> None:
    error = failure_of(lambda: lambda: 1, 1)
    assert "rank 0 failed: its result, of type function, cannot be sent (" in str(error)
    assert str(error).endswith("return tensors and plain values")


class OnlyThere:
    """A value that can be sent, and not be received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (os.getpid(),)


def _received(sender: int) -> int:
    if os.getpid() != sender:
        raise ValueError("not in this process")
    return sender


def test_a_result_that_cannot_be_read_is_refused() -> None:
    error = failure_of(lambda: OnlyThere(), 1)  # a lambda: forks start sooner
    assert "its result cannot be read here (not in this process): return tensors and plain values" in str(error)


def wait_for_ever() -> None:
    if dist.get_rank() == 1:
        time.sleep(10 * WORK)
    dist.barrier()


def test_a_timeout_tells_where_every_rank_was() -> None:
    with RankPool(2, start_method="fork") as pool:
        pool.run(dist.get_rank)  # so that starting takes none of the time
        with pytest.raises(LaunchError) as caught:
            pool.run(wait_for_ever, timeout=2.0)
    error = caught.value
    assert error.rank == 0
    assert "wait_for_ever had not returned on ranks 0, 1 after 2 s, and all ranks were stopped." in str(error)
    first, second = str(error).split("rank 1:\n")
    assert "in barrier" in first
    assert "in barrier" not in second
    assert "in wait_for_ever" in second


def test_the_group_of_a_launch_has_a_timeout() -> None:
    """A collective that a rank waited in alone held up the launch for half an hour."""

    def how_long() -> float:
        assert dist.group.WORLD is not None
        return group_timeout(dist.group.WORLD, torch.device("cpu")).total_seconds()

    assert launch(how_long, 1, timeout=WORK) == [600]
    assert launch(how_long, 1, timeout=WORK, group_timeout=77) == [77]


def test_a_launch_has_a_timeout() -> None:
    with pytest.raises(LaunchError, match=r"had not returned on ranks 0, 1 after 0\.1 s, and all ranks were stopped"):
        launch(lambda: time.sleep(10 * WORK), 2, timeout=0.1)


def test_a_rank_that_does_not_want_to_end_is_ended() -> None:
    def stubborn() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == 1:
            raise ValueError("enough")
        time.sleep(10 * WORK)

    assert failure_of(stubborn).rank == 1


def test_an_interrupt_stops_all_ranks() -> None:
    def interrupt() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(10 * WORK)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(interrupt, 2, timeout=WORK)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_ranks_of_a_killed_process_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process launches ranks, and is killed before it can stop them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for nobody is left to remove its files

    def stay() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(10 * WORK)

    parent = multiprocessing.get_context("fork").Process(target=launch, args=(stay, 2))
    parent.start()
    parent.join(WORK)
    assert parent.exitcode == -signal.SIGKILL
    pids = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    end = time.monotonic() + WORK
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"ranks {pids} outlived their parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------ how ranks are started


def test_what_neither_a_new_process_nor_a_fork_can_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_used_accelerator", lambda: "cuda")
    with pytest.raises(LaunchError) as caught:
        launch(lambda: 1, 2)
    message = str(caught.value)
    assert "<lambda>: it, or one of its arguments, cannot be sent to a new process (Can't pickle" in message
    assert "and this process cannot be forked, for cuda is in use here already. Put " in message
    assert message.endswith("at the top level of a module, and import it from there")


def test_what_was_defined_at_a_prompt_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    monkeypatch.setattr(main, "typed", typed, raising=False)
    monkeypatch.setattr(typed, "__module__", "__main__")
    monkeypatch.setattr(pool_module, "_used_accelerator", lambda: "cuda")
    with pytest.raises(LaunchError, match="a new process cannot import what was defined in a notebook or at a prompt"):
        launch(typed, 2)
    monkeypatch.setattr(pool_module, "_used_accelerator", lambda: None)
    assert launch(typed, 2, timeout=WORK) == [0, 1]


def typed() -> int:
    return dist.get_rank()


SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    from pipecut.launcher import launch

    def say(text):
        print(text + "\\n", end="", flush=True)  # one write, for ranks write at the same time

    class Answer:
        def __init__(self, value):
            self.value = value

    def work(factor):
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        say(f"rank {dist.get_rank()} has {factor * total.item():g}")
        return Answer(dist.get_rank())

    if __name__ == "__main__":
        say(f"result {[answer.value for answer in launch(work, 2, 10)]} {dist.is_initialized()}")
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=WORK, env=environment, check=False
    )


def script(directory: Path) -> str:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


@pytest.mark.slow
def test_a_script_runs_by_itself(tmp_path: Path) -> None:
    done = run(script(tmp_path))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"rank 0 has 30", "rank 1 has 30", "result [0, 1] False"}


@pytest.mark.slow
def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script(tmp_path))
    assert done.returncode == 0, done.stderr
    expected = ["rank 0 has 30", "rank 1 has 30", "result [0] False", "result [1] False"]
    assert sorted(line for line in done.stdout.splitlines() if line) == expected


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.py"
    bare.write_text("from pipecut.launcher import launch\nlaunch(print, 1)\n")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(bare), raising=False)
    error = failure_of(print, 1)
    printed = capfd.readouterr().err
    assert "launch() was called while a rank was importing the script that it is in" in printed
    assert 'call it below `if __name__ == "__main__":`, so that it runs once; print stays above' in printed
    assert "rank 0 failed: it ended with exit code 1 before print returned; its own output says why." in str(error)
    assert 'What is to run once belongs below `if __name__ == "__main__":`' in str(error)


# ------------------------------------------------------------------ where there are ranks already


def test_on_a_rank_the_function_is_called_there() -> None:
    def outer() -> tuple[list[int], int, bool]:
        process = os.getpid()
        inner = launch(lambda: os.getpid() - process, 2, backend="no such backend")
        return inner, dist.get_rank(), dist.is_initialized()

    assert launch(outer, 2, timeout=WORK) == [([0], 0, True), ([0], 1, True)]


def test_another_number_of_ranks_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(InputError) as caught:
        launch(print)
    assert str(caught.value) == (
        "launch() was asked for 4 ranks, and this process is one of 8 already (WORLD_SIZE): pass ranks=8, or start 4 "
        "with torchrun --nproc-per-node=4; without torchrun, unset RANK and WORLD_SIZE"
    )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None,), {}, r"launch\(\) takes a function, got NoneType: write launch\(train, 4\), not train\(\)"),
        ((print, 0), {}, "ranks must be an integer of at least 1, got 0"),
        ((print, True), {}, "ranks must be an integer of at least 1, got True"),
        ((print, 2), {"timeout": 0}, "timeout must be a number of seconds above 0, or None, got 0"),
        ((print, 2), {"group_timeout": None}, "group_timeout must be a number of seconds above 0, got None"),
        ((print, 2), {"group_timeout": math.inf}, "group_timeout must be a number of seconds above 0, got inf"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        launch(*arguments, **options)


def test_a_process_is_starting_until_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_module._LAUNCHED_BY, str(os.getppid()))
    assert rank_module.is_starting()
    monkeypatch.setenv(rank_module._LAUNCHED_BY, "1000000000")
    assert not rank_module.is_starting()


def test_a_lost_connection_is_seen_below_other_errors() -> None:
    error = PipeError("the step failed")
    assert not Outcome.of_error(0, error).lost_connection
    error.__cause__ = RuntimeError("[pair.cc] Connection closed by peer")
    assert Outcome.of_error(0, error).lost_connection
    error.__cause__ = LostConnectionError(1, ConnectionResetError("Connection closed by the other process"))
    assert Outcome.of_error(0, error).lost_connection


def test_errors_that_are_each_the_context_of_the_other_are_looked_through_once() -> None:
    """A rank that failed with such errors, as a step raises them, never reported and used all of its core."""
    error, cause = PipeError("the step failed"), ValueError("the cause")
    error.__cause__, cause.__context__ = cause, error
    assert not Outcome.of_error(0, error).lost_connection


# ------------------------------------------------------------------ a pool takes more than one call


def add_to_state(value: int) -> tuple[int, int]:
    """Count in the module, which every rank has for itself."""
    STATE.append(value)
    return os.getpid(), len(STATE)


STATE: list[int] = []


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} fails on purpose")
    return os.getpid()


def test_the_ranks_of_a_pool_stay_for_the_next_call() -> None:
    with RankPool(2, start_method="fork") as pool:
        first, second = pool.run(add_to_state, 1), pool.run(add_to_state, 1)
        assert [process for process, _ in first] == [process for process, _ in second]
        assert [count for _, count in second] == [2, 2]
        assert all(is_running(process) for process, _ in second)
    assert not any(is_running(process) for process, _ in second)


def test_the_ranks_of_a_pool_are_replaced_after_a_failure() -> None:
    with RankPool(2, start_method="fork") as pool:
        before = pool.run(fail_on, -1)
        with pytest.raises(LaunchError, match="rank 1 failed: ValueError: rank 1 fails on purpose"):
            pool.run(fail_on, 1)
        assert not any(is_running(process) for process in before)
        after = pool.run(fail_on, -1)
        assert set(before).isdisjoint(after)


def test_the_outcomes_of_a_call_are_values_and_failures() -> None:
    with RankPool(2, start_method="fork") as pool:
        good, bad = pool.outcomes(fail_on, 1)
    assert (good.failed, good.value is not None) == (False, True)
    assert (bad.failed, bad.error, bad.text) == (True, "ValueError", "rank 1 fails on purpose")
    assert "in fail_on" in bad.traceback


def make_groups() -> int:
    for _ in range(3):
        dist.new_group([0, 1])
    return len(list(Path("/proc/self/task").iterdir()))


def test_process_groups_end_with_the_call_that_made_them() -> None:
    """Each has threads that poll: ranks that had run a hundred tests with meshes kept a machine busy."""
    with RankPool(2, start_method="fork") as pool:
        threads = [pool.run(make_groups) for _ in range(3)]
    assert threads[0] == threads[1] == threads[2]


def test_a_fork_leaves_what_it_has_inherited_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cache of meshes came with the fork, and to clear it aborted the process: its threads were elsewhere."""
    monkeypatch.setattr("pipecut.launcher.rank.forget_meshes", os.abort)
    with RankPool(2, start_method="fork") as pool:
        assert len([pool.run(make_groups) for _ in range(2)]) == 2


def test_a_pool_forks_anew_for_a_function_that_cannot_be_sent() -> None:
    """Ranks that run already do not have it."""
    with RankPool(2, start_method="fork") as pool:
        before = pool.run(fail_on, -1)
        assert pool.run(lambda: os.getpid() in before) == [False, False]


@pytest.mark.slow
def test_a_pool_that_nobody_closes_ends_with_its_process() -> None:
    code = """
        import torch.distributed as dist
        from pipecut.launcher.pool import RankPool
        pool = RankPool(2, start_method="fork")
        print(pool.run(dist.get_rank))
    """
    done = run("-c", textwrap.dedent(code))
    assert (done.stdout, done.returncode) == ("[0, 1]\n", 0), done.stderr


def sockets_that_listen() -> list[str]:
    """Return the addresses at which this process listens, also for a group of its own."""
    dist.new_group([0, 1])
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the sockets of a process are read from Linux's /proc")
def test_ranks_listen_where_no_other_machine_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo listens at the address of the host's name, which may be that of its network."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for addresses in launch(sockets_that_listen, ranks=2):
        assert addresses
        for address in addresses:
            assert address.partition(":")[0] in ("0100007F", "00000000000000000000000001000000")
