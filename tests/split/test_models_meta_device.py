"""Models on the meta device and of fake tensors are cut without a byte for their parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pipecut import Pipe, SplitPoint, pipe_split, pipeline
from tests.support.nested_values import assert_same


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4)
        self.register_buffer("table", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x)).relu() + torch.zeros(x.shape[0], 1, device=x.device)
        pipe_split()
        return self.b(x * self.table)


WIDTH = 100_000  # a square matrix of 40 GB


def names(pipe: Pipe) -> list[set[str]]:
    return [set(stage.state_dict()) for stage in pipe.stages]


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
HELD = [{"a.weight", "a.bias", "norm.weight", "norm.bias", *STATISTICS}, {"b.weight", "b.bias", "table"}]


@pytest.mark.parametrize("device", ["meta", "cpu"], ids=["inputs on meta too", "inputs with memory"])
def test_a_model_on_the_meta_device_is_cut(device: str) -> None:
    with torch.device("meta"):
        model = Net(WIDTH)
    pipe = pipeline(model, (torch.ones(3, WIDTH, device=device),))
    assert names(pipe) == HELD
    for stage in pipe.stages:
        assert {tensor.device.type for tensor in stage.state_dict().values()} == {"meta"}
    assert pipe(torch.ones(5, WIDTH, device="meta")).shape == (5, 4)


def test_a_model_of_fake_tensors_is_cut() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = Net(WIDTH), torch.ones(3, WIDTH)
        pipe = pipeline(model, (x,))
    assert names(pipe) == HELD
    assert all(isinstance(tensor, FakeTensor) for stage in pipe.stages for tensor in stage.parameters())


def test_a_model_of_fake_tensors_is_cut_outside_of_its_mode() -> None:
    with FakeTensorMode():
        model, x = Net(WIDTH), torch.ones(3, WIDTH)
    assert names(pipeline(model, (x,))) == HELD


def test_a_stage_from_the_meta_device_gets_memory_and_weights_of_its_own() -> None:
    real = Net(8)
    with torch.device("meta"):
        pipe = pipeline(Net(8), (torch.ones(3, 8),))
    for stage in pipe.stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: copy.deepcopy(real.state_dict()[name]) for name in stage.state_dict()})
    x = torch.randn(6, 8)
    assert_same(pipe(x), real(x), "output")


def test_the_meta_device_is_not_baked_into_the_stages() -> None:
    class MakesTensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) + torch.arange(8, device=x.device)
            return self.b(x * torch.ones(x.shape[0], 8, device=x.device))

    real = MakesTensors()
    with torch.device("meta"):
        pipe = pipeline(MakesTensors(), (torch.ones(3, 8),), split_spec={"b": SplitPoint.BEGINNING})
    for stage in pipe.stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: real.state_dict()[name] for name in stage.state_dict()})
    x = torch.randn(3, 8)
    assert_same(pipe(x), real(x), "output")
