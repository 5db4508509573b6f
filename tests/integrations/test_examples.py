"""The examples of integrations run under torchrun, with 2 ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import WORK

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(name: str, folder: Path, *arguments: str, ranks: int = 2) -> str:
    """Run an example as a user would, and return what it prints."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(EXAMPLES / name), "--output", str(folder), *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WORK, check=False)
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


def test_adapters_learn_and_are_loaded_again(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    text = run("finetune_lora.py", tmp_path, "--steps", "10")
    before, after, loaded = map(float, re.findall(r"(\d+\.\d{4})", text)[-3:])
    assert after < before - 0.1
    assert loaded == pytest.approx(after, abs=2e-4)
