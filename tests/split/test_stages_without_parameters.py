"""A stage that makes values from nothing but the device that it runs on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipeline


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.tokens = nn.Embedding(8, 4), nn.Embedding(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        numbers = torch.arange(4, device=ids.device)
        result: Tensor = self.tokens(ids) + self.places(numbers)
        return result


def test_the_first_stage_has_neither_inputs_nor_parameters() -> None:
    """It asked its parameters for the device, and had none: StopIteration at the first call."""
    model, ids = Positions(), torch.randint(0, 16, (3, 4))
    pipe = pipeline(model, (ids,), split_spec={"tokens": SplitPoint.BEGINNING})
    torch.testing.assert_close(pipe(ids), model(ids))
