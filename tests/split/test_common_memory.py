"""Two parameters in one memory: one tensor in one process, and two on separate ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecut import Schedule1F1B, SplitPoint, pipeline
from pipecut.errors import SplitError
from pipecut.pipe import Pipe
from tests.support.training import Problem, assert_trains_as_uncut


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()


def cut(model: nn.Module, at: str = "1") -> Pipe:
    return pipeline(model, (torch.ones(2, 4).double(),), split_spec={at: SplitPoint.BEGINNING})


def test_weights_made_the_same_through_their_data() -> None:
    """They were trained apart on ranks: after the first step of an optimizer the two had different values."""
    model = net()
    model[2].weight.data = model[0].weight.data
    told = "0.weight of stage 0 and 2.weight of stage 1 are two tensors in the same memory.*same nn.Parameter"
    with pytest.raises(SplitError, match=told):
        cut(model)
    model[2].weight = model[0].weight
    pipe = cut(model)
    assert [tie.stages for tie in pipe.tied_parameters] == [(0, 1)]
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2, nn.functional.mse_loss)
    assert_trains_as_uncut(
        schedule, Problem(model, (torch.ones(4, 4).double(),), torch.zeros(4, 4), nn.functional.mse_loss)
    )


def test_both_in_one_stage() -> None:
    model = net()
    model[2].weight.data = model[1].weight.data
    cut(model)


def test_a_buffer_that_is_a_view_of_a_weight() -> None:
    model = net()
    model[2].register_buffer("row", model[0].weight.detach()[1])
    with pytest.raises(SplitError, match="0.weight of stage 0 and 2.row of stage 1"):
        cut(model)


def test_weights_without_training() -> None:
    model = net()
    model[2].weight.data = model[0].weight.data
    cut(model.requires_grad_(False))


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_one_memory(dim: int) -> None:
    """As parameters are that are kept in one flat tensor, or cut out of one matrix: no element belongs to two."""
    model = net()
    parts = torch.randn(8, 8).double().chunk(2, dim)
    for layer, part in zip((model[0], model[2]), parts, strict=True):
        layer.weight = nn.Parameter(part[:4, :4] if dim else part[:, :4])
    cut(model)
    model[2].weight = nn.Parameter(parts[0][:4, 1:5] if dim == 0 else parts[0][1:5, :4])
    with pytest.raises(SplitError, match="in the same memory"):
        cut(model)


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipeline(model, (torch.ones(2, 4),), split_spec={"1": SplitPoint.BEGINNING})
