"""Layers that share a table outside of the model, on ranks that each have a cache of their own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import Schedule1F1B, pipeline
from tests.support.ranks import Ranks
from tests.support.training import assert_same_gradients, gradients_of

pytestmark = pytest.mark.distributed

TABLES: dict[int, Tensor] = {}


@functools.lru_cache
def decay(size: int) -> Tensor:
    return torch.linspace(0.5, 1.0, size)


class Layer(nn.Module):
    """Makes the table if it is the first layer to run, and uses it in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.ones(4, 4).tril() / 4
        y: Tensor = self.linear(x) @ TABLES[x.shape[1]] * decay(x.shape[1])
        return y


def check_shared_cache(rank: int, used_before: bool) -> list[Any]:
    TABLES.clear()
    decay.cache_clear()
    torch.manual_seed(0)
    model, x, y = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(6, 4), torch.randn(6, 4)
    if used_before:
        model(x)
    pipe = pipeline(model, (x[:2],), num_stages=2)
    assert bool(TABLES) == used_before
    schedule = Schedule1F1B(pipe.build_stage(rank, "cpu"), 3, nn.functional.mse_loss)
    for _ in range(2):
        model.zero_grad()
        schedule.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)
    mine = gradients_of(model)
    model.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    held = {name for name, _ in pipe.get_stage_module(rank).named_parameters()}
    assert_same_gradients({n: mine[n] for n in held}, {n: gradients_of(model)[n] for n in held}, 1e-6)
    assert {type(table) for table in (*TABLES.values(), decay(4))} == {Tensor}
    return sorted(held)


@pytest.mark.parametrize("used_before", [False, True], ids=["first use", "used before"])
def test_two_ranks_fill_their_own_caches(two_ranks: Ranks, used_before: bool) -> None:
    """The first layer fills the cache, the others read it; the rank of the later ones must not wait for that."""
    held = two_ranks.run(check_shared_cache, used_before)
    assert len({*held[0], *held[1]}) == 8
