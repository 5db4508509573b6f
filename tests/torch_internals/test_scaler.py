"""The check for infinities of torch's gradient scaler is where pipecut looks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipecut.torch_internals import FoundInf, OpenGradScaler, scales_by_itself


class Pessimist(OpenGradScaler):
    """Finds an infinity in every step."""

    def found_by(self, check: Callable[[], FoundInf]) -> FoundInf:
        return {device: torch.ones_like(found) for device, found in check().items()}


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_subclass_finds_decides_about_the_step(fused: bool) -> None:
    for kind, changes, scale in ((OpenGradScaler, True, 16.0), (Pessimist, False, 8.0)):
        parameter = nn.Parameter(torch.ones(2))
        optimizer, scaler = torch.optim.AdamW([parameter], fused=fused), kind("cpu", init_scale=16.0)
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (parameter[0].item() != 1.0) == changes
        assert scaler.get_scale() == scale


def test_fused_optimizers_scale_by_themselves() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert scales_by_itself(torch.optim.AdamW([parameter], fused=True))
    assert not scales_by_itself(torch.optim.AdamW([parameter], fused=False))
