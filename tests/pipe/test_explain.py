"""pipe.explain(): each thing that it tells of, in its words."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from pipecut import PipeWarning, SplitPoint, pipe_split, pipeline
from pipecut.pipe_ir.traced import Fallback
from tests.split.test_recompute import Decoder, batch


class Talkative(nn.Module):
    """A tie, a skip, a late input, a Python argument, a decision about sizes, and early values among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        early = self.layers[0](x) * scale
        if x.shape[0] > 2:
            early = early + 1
        pipe_split()
        middle = self.layers[1](early)
        self.calls = 1
        pipe_split()
        return self.layers[2](middle) * mask, early, middle


@pytest.fixture(scope="module")
def told() -> str:
    with pytest.warns(PipeWarning, match=r"self\.calls"):
        pipe = pipeline(Talkative(), (torch.ones(3, 4), torch.ones(3, 1)), {"scale": 2.0}, outputs="all")
    return str(pipe.explain())


@pytest.mark.parametrize(
    "sentence",
    [
        "Talkative in training mode, on cpu: ",
        "the example: x float32[batch, 4], mask float32[batch, 1], where batch = 3",
        "batch may change from call to call, as long as batch > 2 (decided at ",
        "if x.shape[0] > 2:",
        "scale = 2.0: Python values are part of the trace, and a call with others is an error",
        "dim 1 of x is 4, dim 1 of mask is 1: as in the example, since nobody asked for anything else",
        "stage 1: whole, running their own code: layers.1; as generated code: the model itself",
        "stage 0 -> 1: add, 48 B",
        "stage 0 -> 2 (skips 1 stage): mask, add, 60 B",
        "model inputs that later stages use, sent by stage 0: mask",
        "the model's output has 1 value of 48 B that comes from earlier stages and is sent to the last only to be",
        "layers.0.weight = layers.2.weight is in stages 0, 2: one parameter, its gradients are summed",
        "nothing uses spare.weight, spare.bias",
        "Talkative sets self.calls in its forward: the stages keep the value of the trace",
    ],
)
def test_it_tells(told: str, sentence: str) -> None:
    assert sentence in " ".join(told.split()), told


def test_it_tells_of_recomputed_values() -> None:
    pipe = pipeline(Decoder(), batch(3), split_spec={"blocks.1": SplitPoint.BEGINNING})
    lines = pipe.explain()["recomputed"]
    assert lines[0] == "stage 1: and_1, rotary_0, rotary_1 (would be 1.2 kB)"
    assert "cost less to make again than to send" in lines[1]


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).view(2, 8).view(-1, 4))  # type: ignore[no-any-return]


def test_it_tells_where_a_size_was_fixed() -> None:
    with pytest.warns(UserWarning, match="holds for some sizes only"):
        pipe = pipeline(FixedBatch(), (torch.ones(4, 4),), num_stages=2)
    [line, _] = pipe.explain()["fixed by the trace"]
    assert line.startswith("dim 0 of x, is always 4: fixed at ")
    assert "test_explain.py" in line
    assert ".view(2, 8)" in line


class Deciding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_it_tells_of_hooks_and_of_modules_that_could_not_be_traced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Deciding(), nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.warns(PipeWarning):
        pipe = pipeline(model, (torch.ones(3, 4),), split_spec={"2": SplitPoint.BEGINNING})
    explained = pipe.explain()
    assert explained["hooks and attributes"] == (
        "Sequential has a forward hook: what it does to tensors is part of the generated code",
    )
    [fallback] = pipe.traced.fallbacks
    assert isinstance(fallback, Fallback)
    assert explained["not traced"] == (f"1 could not be traced, and stays as it is: {fallback.reason}",)


def test_rich_prints_the_same_words_and_sections_are_there_to_look_at() -> None:
    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(3, 4),), num_stages=2)
    explained = pipe.explain()
    assert explained["sent between stages"] == ("stage 0 -> 1: _0, 48 B",)
    assert explained["recomputed"] == ()
    assert repr(explained) == str(explained)
    buffer = io.StringIO()
    Console(file=buffer, width=200).print(explained)
    assert buffer.getvalue().split() == str(explained).split()
