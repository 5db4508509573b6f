"""A module that writes to an input without gradient, as the uncut model does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipecut import PipelineStage, ScheduleGPipe


class Shifts(nn.Module):
    """Replaces padding in its token ids, in place, before it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        ids.masked_fill_(ids == 7, 0)
        embedded: Tensor = self.embed(ids)
        return embedded


def test_writing_to_one_microbatch_does_not_spoil_the_others() -> None:
    """All were views of one tensor, with one version counter: the backward of the first microbatch was refused."""
    parts = [Shifts(), nn.Linear(4, 4)]
    ids, y = torch.randint(0, 8, (6, 3)), torch.randn(6, 3, 4)
    nn.functional.mse_loss(parts[1](parts[0](ids.clone())), y).backward()
    expected = [parameter.grad for part in parts for parameter in part.parameters()]
    for part in parts:
        part.zero_grad(set_to_none=True)
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(parts)]
    ScheduleGPipe(stages, 3, nn.functional.mse_loss).step(ids, target=y)
    found = [parameter.grad for part in parts for parameter in part.parameters()]
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)
