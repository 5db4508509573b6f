"""The examples run as a user would run them, on local ranks, and end as they promise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import WORK

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MOST_LINES = 150
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]

# Lets rank 1 die once, after the checkpoint of step 2.
DIES_ONCE = f"""
import os, runpy, signal, sys
import pipecut
save = pipecut.save_checkpoint
def save_and_die(*args, step, **options):
    save(*args, step=step, **options)
    if step == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
pipecut.save_checkpoint = save_and_die
runpy.run_path({str(EXAMPLES / "train_lm.py")!r}, run_name="__main__")
"""


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a directory of its own, with the package that is tested."""
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=WORK, check=False)


def train_lm(ranks: int, cwd: Path, *options: str, launcher: tuple[str, ...] = (), script: str = "") -> str:
    """Run train_lm.py under torchrun, and return what it prints."""
    command = [*TORCHRUN, *launcher, f"--nproc-per-node={ranks}", script or str(EXAMPLES / "train_lm.py"), *options]
    ended = run(command, cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses_of(folder: Path) -> dict[int, float]:
    """The loss of each step; of one that was run twice, the last."""
    return {int(line["step"]): line["loss"] for line in lines_of(folder) if "loss" in line}


def norms_of(folder: Path) -> dict[int, float]:
    return {int(line["step"]): line["norm"] for line in lines_of(folder) if "norm" in line}


def assert_loads(exported: Path, step: int, folder: Path) -> None:
    """Compare a model that transformers loads with the last checkpoint."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoModelForCausalLM

    dcp_to_torch_save(folder / f"step-{step:08}", folder / "whole.pt")
    saved = torch.load(folder / "whole.pt", weights_only=True)
    for name, value in AutoModelForCausalLM.from_pretrained(exported).state_dict().items():
        assert torch.equal(value, saved[f"model/{name}"]), name


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") < MOST_LINES


@pytest.mark.slow
@pytest.mark.distributed
def test_vision_ends_like_the_uncut_model(tmp_path: Path) -> None:
    ended = run([sys.executable, str(EXAMPLES / "vision.py"), "--steps=2"], tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "stage 0 -> 3 (skips 2 stages)" in ended.stdout
    assert "step 2/2: loss " in ended.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_train_lm_goes_on_under_another_number_of_stages_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    printed = train_lm(2, tmp_path, "--steps=6", "--save-every=3", f"--folder={whole}")
    assert "step 6/6: perplexity " in printed
    again = run([*TORCHRUN, "--nproc-per-node=2", str(EXAMPLES / "train_lm.py"), f"--folder={whole}"], tmp_path)
    assert f"{whole} has checkpoints: pass --resume to go on from the last, or another --folder" in again.stderr
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "step-00000006")
    (resumed / "metrics.jsonl").unlink()
    options = ("--steps=6", "--save-every=3", f"--folder={resumed}", "--resume")
    exported = tmp_path / "exported"
    train_lm(1, tmp_path, *options, "--schedule=Interleaved1F1B", "--stages=3", f"--export={exported}")
    assert_loads(exported, 6, resumed)
    assert list(losses_of(resumed)) == [4, 5, 6]
    assert losses_of(resumed) == pytest.approx({step: losses_of(whole)[step] for step in (4, 5, 6)}, rel=1e-5)
    assert norms_of(resumed) == pytest.approx({step: norms_of(whole)[step] for step in (4, 5, 6)}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_train_lm_goes_on_by_itself_after_a_rank_was_killed(tmp_path: Path) -> None:
    whole, killed, script = tmp_path / "whole", tmp_path / "killed", tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE, encoding="utf-8")
    options = ("--steps=4", "--save-every=2")
    train_lm(2, tmp_path, *options, f"--folder={whole}")
    train_lm(2, tmp_path, *options, f"--folder={killed}", launcher=("--max-restarts=1",), script=str(script))
    assert losses_of(killed) == losses_of(whole)


@pytest.mark.slow
@pytest.mark.distributed
def test_train_lm_says_what_does_not_fit(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", str(EXAMPLES / "train_lm.py")]
    few = run([*command, "--stages=3"], tmp_path)
    assert few.returncode != 0
    assert "3 stages cannot run on 2 ranks: start torchrun with --nproc-per-node 3" in few.stderr
    several = run([*command, "--stages=4"], tmp_path)
    assert "chunks=2 does not fit 1F1B, which has 1 on each rank" in several.stderr
    assert "Or start torchrun with --nproc-per-node 4, a rank for each stage." in several.stderr
    alone = run([sys.executable, str(EXAMPLES / "train_lm.py")], tmp_path)
    assert f"Start it by `torchrun --nproc-per-node=2 {EXAMPLES / 'train_lm.py'}`" in alone.stderr
