"""A stage that makes values from nothing but the device that it runs on; one whose model assigns a buffer."""

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


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: Tensor = self.last(x)
        return result


def test_a_buffer_that_the_model_assigns_and_does_not_use() -> None:
    """The operation that makes it seemed to be of no use, and was left out: NameError at the first call."""
    model, x = Averages(), torch.randn(3, 4)
    pipe = pipeline(model, (x,), split_spec={"last": SplitPoint.BEGINNING})
    torch.testing.assert_close(pipe(x), model(x))
    torch.testing.assert_close(pipe.get_stage_module(0).get_buffer("mean"), model.mean)
