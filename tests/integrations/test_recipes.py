"""The recipes of docs/other_trainers.md run on ranks as they are written, and train as the uncut model does."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.trainer_cases import as_torchrun
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "other_trainers.md"


def recipe(library: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (block for block in blocks if f"from {library}" in block)
    return str(found)


def run_recipe(rank: int, library: str, folder: Path) -> list[float]:
    """Run a recipe in a folder, and return the losses of its steps."""
    before = Path.cwd()
    os.chdir(folder)
    names: dict[str, Any] = {}
    try:
        with as_torchrun():
            exec(compile(recipe(library), DOCS.name, "exec"), names)
    finally:
        os.chdir(before)
    losses: list[float] = names["losses"]
    return losses


def uncut_losses() -> list[float]:
    """Train the recipes' model uncut, on one process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("library", ["accelerate", "lightning.fabric"])
def test_a_recipe_trains_as_the_uncut_model(library: str, two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed, and no dependency of pipecut")
    for losses in two_ranks.run(run_recipe, library, tmp_path):
        assert losses == pytest.approx(uncut_losses(), rel=1e-6)
        assert losses[-1] < losses[0]
    assert list((tmp_path / "checkpoints").iterdir())
