"""`contiguous()` is in every trace, also where it had nothing to do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipecut import SplitPoint, pipeline


class Modes(nn.Module):
    """The same operations in both modes, on a tensor that is contiguous in one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x)[:, None]
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5 if self.training else 0.0)
        joined: Tensor = self.last(mixed.transpose(1, 2).contiguous().flatten(2))
        return joined


def test_both_modes_after_the_cut() -> None:
    """A model with dropout in its attention could not switch its mode: one trace had an operation more."""
    for traced_in_training in (True, False):
        model, x = Modes().train(traced_in_training), torch.randn(3, 5, 4)
        pipe = pipeline(model, (x,), split_spec={"last": SplitPoint.BEGINNING})
        for training in (False, True, False):
            model.train(training)
            pipe.train(training)
            torch.manual_seed(1)
            expected = model(x)
            torch.manual_seed(1)
            torch.testing.assert_close(pipe(x), expected)
