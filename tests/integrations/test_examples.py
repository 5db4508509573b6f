"""The examples of integrations run under torchrun, with 2 ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import WORK

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


# Ends a rank of the first attempt while the checkpoint of step 20 is written, as kill -9 would.
DIES_ONCE = f"""
import os, runpy
import pipecut.integrations.transformers as integration

save = integration.PipelineTrainer._save_rng_state

def dying(self, output_dir):
    if self.state.global_step == 20 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os._exit(9)
    save(self, output_dir)

integration.PipelineTrainer._save_rng_state = dying
runpy.run_path({str(EXAMPLES / "trainer.py")!r}, run_name="__main__")
"""


def run(name: str, folder: Path, *arguments: str, ranks: int = 2, restarts: int = 0) -> str:
    """Run an example as a user would, and return what it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, f"--max-restarts={restarts}", str(EXAMPLES / name), "--output", str(folder), *arguments]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WORK, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_trainer_trains_and_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    first = run("trainer.py", tmp_path, "--steps", "20")
    then = run("trainer.py", tmp_path, "--steps", "30", "--resume", ranks=3)
    before, after = (float(re.findall(r"perplexity ([\d.]+)", text)[0]) for text in (first, then))
    assert "after 20 steps" in first
    assert "after 30 steps" in then
    assert after < before < 200  # of 256 bytes
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0


@pytest.mark.long
def test_trainer_goes_on_by_itself_after_a_rank_was_killed_in_a_save(tmp_path: Path) -> None:
    """torch's own store has addresses of processes that are gone; and half a checkpoint was taken for a whole one."""
    script = tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE, encoding="utf-8")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    expected = run("trainer.py", whole, "--steps", "30")
    found = run(str(script), killed, "--steps", "30", restarts=1)
    assert re.findall(r"perplexity ([\d.]+) after 30", found) == re.findall(r"perplexity ([\d.]+) after 30", expected)
    assert sorted(each.name for each in killed.glob("*checkpoint*")) == ["checkpoint-20", "checkpoint-30"]


def test_adapters_learn_and_are_loaded_again(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    text = run("finetune_lora.py", tmp_path, "--steps", "10")
    before, after, loaded = map(float, re.findall(r"(\d+\.\d{4})", text)[-3:])
    assert after < before - 0.1
    assert loaded == pytest.approx(after, abs=2e-4)
