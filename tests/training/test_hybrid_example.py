"""examples/hybrid.py under torchrun: the losses and norms of the uncut model, also after going on with fewer ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.limits import WORK

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINE = re.compile(r"step (\d+): loss ([\d.]+), norm of the gradients ([\d.]+)")


def run(folder: Path, ranks: int, *arguments: str) -> dict[int, tuple[float, float]]:
    """Return the loss and the norm of each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    ran = subprocess.run(
        [*command, str(EXAMPLES / "hybrid.py"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WORK,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {int(step): (float(loss), float(norm)) for step, loss, norm in LINE.findall(ran.stdout)}


def uncut(steps: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[float, float]]:
    """The same training of the whole model in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import gpt
    import hybrid

    torch.manual_seed(0)
    model = gpt.GPT(hybrid.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        tokens = gpt.random_tokens(hybrid.CONFIG, hybrid.BATCH, seed=step)
        loss = gpt.next_token_loss(model(tokens), tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        found[step] = (loss.item(), norm.item())
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        pytest.param(("--dp", "2", "--fsdp", "1", "--schedule", "ZBVZeroBubble"), marks=pytest.mark.long),
        pytest.param(("--fsdp", "1", "--tp", "2"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_losses_and_norms_are_those_of_the_uncut_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    found = run(tmp_path, 4, "--steps", "2", *arguments) | run(tmp_path, 2, "--steps", "3", "--resume")
    wanted = uncut(3, monkeypatch)
    assert found.keys() == wanted.keys()
    for step, numbers in found.items():
        assert numbers == pytest.approx(wanted[step], rel=1e-3), step
