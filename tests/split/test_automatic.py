"""Cuts found by pipecut itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipecut import Pipe, pipeline


class Residual(nn.Module):
    """Two layers and a skip around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


def flops(pipe: Pipe) -> list[int]:
    return [int(info.flops.subs(dict.fromkeys(info.flops.free_symbols, 4))) for info in pipe.stage_infos]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_equal_blocks_are_dealt_out_evenly_and_stay_whole(num_stages: int) -> None:
    model = nn.Sequential(*(Residual(8) for _ in range(8)))
    pipe = pipeline(model, (torch.ones(4, 8),), num_stages=num_stages)
    assert [info.modules for info in pipe.stage_infos] == [
        tuple(str(8 // num_stages * stage + member) for member in range(8 // num_stages)) for stage in range(num_stages)
    ]
    assert len(set(flops(pipe))) == 1


def test_a_heavy_layer_gets_a_stage_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4096), nn.Linear(4096, 8), nn.Linear(8, 8))
    pipe = pipeline(model, (torch.ones(4, 8),), num_stages=2)
    assert [info.modules for info in pipe.stage_infos] == [("0", "1", "2"), ("3", "4")]


def test_at_equal_balance_the_cut_goes_where_least_is_sent() -> None:
    narrow = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(2, 64), nn.Linear(64, 64))
    pipe = pipeline(narrow, (torch.ones(4, 64),), num_stages=2)
    assert [str(edge.spec) for edge in pipe.edges] == ["float32[batch, 2] grad"]


def test_regions_are_never_cut() -> None:
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.layers, x, use_reentrant=False))  # type: ignore[no-any-return]

    pipe = pipeline(Checkpointing(), (torch.ones(4, 8),), num_stages=2)
    assert [info.modules for info in pipe.stage_infos] == [("layers",), ("head",)]
