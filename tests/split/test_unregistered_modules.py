"""A module keeps another one in a list or an object, without having registered it, and the cut goes between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Pipe, PipeError, Schedule1F1B, SplitError, SplitPoint, pipeline
from tests.support.training import TIGHT, Problem, assert_trains_as_uncut

WIDTH = 4


class Holder:
    """Is nothing but its attribute."""

    def __init__(self, leaf: nn.Module) -> None:
        self.leaf = leaf


class Leaf(nn.Module):
    """Has a number that others read, in itself and in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.power = 2  # type: ignore[assignment]
        self.scale = 3.0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def number(self) -> float:
        return self.scale**self.linear.power  # type: ignore[operator,no-any-return]


class Counted(Leaf):
    """Its number changes from call to call."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Reader(nn.Module):
    """Reads the number of a module that it keeps in its own way."""

    def __init__(self, leaf: Leaf, keep: Callable[[Leaf], Any], read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = keep(leaf)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self.kept)  # type: ignore[no-any-return]


class Model(nn.Module):
    """The leaf is in the first stage, the reader in the second."""

    def __init__(self, leaf: Leaf, keep: Callable[[Leaf], Any], read: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.leaf, self.middle = nn.Linear(WIDTH, WIDTH), leaf, nn.Linear(WIDTH, WIDTH)
        self.reader = Reader(leaf, keep, read)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.middle(self.leaf(self.first(x))))  # type: ignore[no-any-return]


WAYS: dict[str, tuple[Callable[[Leaf], Any], Callable[[Any], float]]] = {
    "list": (lambda leaf: [leaf], lambda kept: kept[0].number()),
    "dict": (lambda leaf: {"leaf": (leaf,)}, lambda kept: kept["leaf"][0].number()),
    "object": (lambda leaf: Holder(leaf), lambda kept: kept.leaf.number()),
    "namespace": (lambda leaf: SimpleNamespace(leaf=leaf), lambda kept: kept.leaf.number()),
    "method": (lambda leaf: leaf.number, lambda kept: kept()),
    "partial": (lambda leaf: functools.partial(getattr, leaf, "scale"), lambda kept: kept()),
    "module inside": (lambda leaf: [leaf.linear], lambda kept: kept[0].power),
}


def cut(model: nn.Module) -> Pipe:
    return pipeline(model, (torch.randn(4, WIDTH).double(),), split_spec={"middle": SplitPoint.BEGINNING})


@pytest.mark.parametrize("way", WAYS)
def test_numbers_of_a_module_in_another_stage(way: str) -> None:
    torch.manual_seed(0)
    model = Model(Leaf(), *WAYS[way]).double()
    pipe = cut(model)
    assert [sorted(stage.state_dict()) for stage in pipe.stages] == [
        ["first.bias", "first.weight", "leaf.linear.bias", "leaf.linear.weight"],
        ["middle.bias", "middle.weight", "reader.linear.bias", "reader.linear.weight"],
    ]
    x, y = torch.randn(2, 6, WIDTH, dtype=torch.double)
    stages = [pipe.build_stage(index, "cpu") for index in range(2)]
    assert_trains_as_uncut(Schedule1F1B(stages, 3, F.mse_loss), Problem(model, (x,), y, F.mse_loss))


def test_the_module_that_is_referred_to_has_no_tensors_there() -> None:
    model = Model(Leaf(), *WAYS["list"]).double()
    kept: Any = cut(model).stages[1].get_submodule("reader").kept
    assert isinstance(kept[0], Leaf)
    assert kept[0] is not model.leaf
    assert not list(kept[0].parameters())
    assert len(list(model.leaf.parameters())) == 2
    with pytest.raises(AttributeError, match="leaf.linear.weight is asked for in a stage that does not hold 'leaf.lin"):
        _ = kept[0].linear.weight


class Decides(nn.Module):
    """Calls a module that it keeps in a list, for some inputs."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.kept = [leaf]

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 0 else self.kept[0](x)  # type: ignore[no-any-return]


def test_a_call_that_the_example_did_not_show() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Flatten())
    model.append(Decides(model[1]))
    nn.init.ones_(model[1].weight)
    pipe = pipeline(model, (torch.ones(4, WIDTH),), split_spec={"2": SplitPoint.BEGINNING}, tracer="fx")
    nn.init.constant_(model[1].bias, -1.0)
    with pytest.raises(PipeError, match="1.weight is asked for .*: cut so that both are in one stage, or pass the ten"):
        pipe(torch.zeros(4, WIDTH))


def test_a_number_that_the_forward_changes_in_another_stage() -> None:
    model = Model(Counted(), lambda leaf: [leaf], lambda kept: kept[0].calls).double()
    text = (
        "'reader', in stage 1, refers to 'leaf' by its attribute 'kept'; that is in another stage, and the forward of "
        "the model sets leaf.calls, which stage 1 would not see: cut so that both are in one stage"
    )
    with pytest.raises(SplitError, match=text):
        cut(model)
    pipeline(model, (torch.randn(4, WIDTH).double(),), split_spec={"leaf": SplitPoint.BEGINNING})


def test_a_tensor_of_a_module_in_another_stage() -> None:
    """The trace shows it, and so the reader is cut: it gets the tensor, and the module that it is of stays away."""
    torch.manual_seed(0)
    model = Model(Leaf(), lambda leaf: [leaf], lambda kept: kept[0].linear.weight.sum()).double()
    x = torch.randn(6, WIDTH).double()
    torch.testing.assert_close(cut(model)(x), model(x), rtol=0, atol=TIGHT)
