"""pipecut takes upstream's place: in this process, in new ones, and for scripts; and gives it back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

from pipecut.compat.installing import MODULES, UPSTREAM, install, uninstall
from tests.support.limits import WORK

ROOT = Path(__file__).resolve().parents[2]
WHOSE = "import torch.distributed.pipelining.schedules as s; print(s.ScheduleGPipe.__module__)"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    uninstall()


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=WORK, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_installed_here_and_restored(environment: None) -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith(UPSTREAM)}
    attribute = getattr(torch.distributed, "pipelining", None)
    path = os.environ["PYTHONPATH"]
    for _ in range(2):
        install()
        install()
        import torch.distributed.pipelining as pipelining
        from torch.distributed.pipelining.stage import PipelineStage

        import pipecut
        import pipecut.compat

        assert pipelining is pipecut.compat is torch.distributed.pipelining
        assert PipelineStage is pipecut.compat.PipelineStage
        assert issubclass(PipelineStage, pipecut.PipelineStage)
        assert all(f"{UPSTREAM}.{name}" in sys.modules for name in MODULES)
        uninstall()
        assert {name: module for name, module in sys.modules.items() if name.startswith(UPSTREAM)} == before
        assert getattr(torch.distributed, "pipelining", None) is attribute
        assert os.environ["PYTHONPATH"] == path
        assert "PIPECUT_COMPAT" not in os.environ


@pytest.mark.slow
def test_new_processes_get_it_too_and_not_after(environment: None, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden_one_ran = True")
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    install()
    assert run("-c", f"import sys; assert sys.hidden_one_ran; {WHOSE}") == "pipecut.compat.schedules"
    assert run("-c", "import sys; print('torch' in sys.modules)") == "False"
    uninstall()
    assert run("-c", WHOSE) == "torch.distributed.pipelining.schedules"


@pytest.mark.slow
def test_scripts_and_modules_run_that_way(environment: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; {WHOSE}; print(__name__, sys.argv[1:])")
    wanted = "pipecut.compat.schedules\n__main__ ['a', '--b']"
    assert run("-m", "pipecut.compat", str(script), "a", "--b") == wanted
    os.environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    assert run("-m", "pipecut.compat", "-m", "script", "a", "--b") == wanted
    done = subprocess.run([sys.executable, "-m", "pipecut.compat"], capture_output=True, text=True, cwd=ROOT)
    assert "usage: python -m pipecut.compat [-m module | script.py]" in done.stderr


SPAWNS = """
import sys
import torch
import torch.multiprocessing as mp


def rank_of(rank, store):
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.ones(4, 4)
    losses = []
    schedule = ScheduleGPipe(PipelineStage(layers[rank], rank, 2, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), target=x, losses=losses)
    layers[rank].zero_grad()
    wanted = nn.functional.mse_loss(nn.Sequential(*layers)(x), x)
    assert rank == 0 or abs(sum(losses) / 2 - wanted) < 1e-6
    if rank == 1:
        print(type(schedule).__module__, len(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    import pipecut.compat

    pipecut.compat.install()
    mp.start_processes(rank_of, (sys.argv[2],), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_ranks_that_a_process_with_it_starts_have_it_too(environment: None, tmp_path: Path, method: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SPAWNS)
    assert run(str(script), method, str(tmp_path / "store")) == "pipecut.compat.schedules 2"


@pytest.mark.upstream
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("script", "ranks"), [("upstream_traced.py", 2), ("upstream_fsdp.py", 4)])
def test_a_script_for_upstream_has_the_same_losses_on_both(environment: None, script: str, ranks: int) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    losses = []
    for way in ((), ("-m", "pipecut.compat")):
        told = run(*torchrun, *way, f"examples/{script}")
        losses.append([float(each) for each in re.findall(r"loss (\S+)", told)])
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], abs=2e-6)
