"""Whatever a model takes: nested, optional, in any order, and not only tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from pipecut import pipe_split, pipeline
from pipecut.errors import InputError
from tests.support.equality import assert_equals_uncut


class Whole(nn.Module):
    """Takes integers and truth values; some of them are used in the second stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, keep: Tensor, positions: Tensor) -> Tensor:
        x = self.table(ids)
        pipe_split()
        return self.body(x * keep[..., None]) + self.table(positions)


def test_int_and_bool_inputs() -> None:
    args = (torch.randint(0, 9, (3, 4)), torch.rand(3, 4) > 0.5, torch.arange(4, dtype=torch.int32))
    others = [((torch.randint(0, 9, (5, 4)), torch.rand(5, 4) > 0.5, torch.arange(4, dtype=torch.int32)), {})]
    assert_equals_uncut(Whole(), args, expect_stages=2, other_calls=others)


class PythonValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int, bias: Tensor | None, mode: str, flag: bool = False) -> Tensor:
        x = self.a(x) * times
        if bias is not None:
            x = x + bias
        pipe_split()
        x = x.sin() if mode == "sin" else x.cos()
        return self.b(x) if flag else x + self.b(x)


@pytest.mark.parametrize("args", [(2, None, "sin"), (3, torch.randn(8), "cos", True)])
def test_python_values_are_arguments(args: tuple[Any, ...]) -> None:
    x = torch.randn(3, 8)
    assert_equals_uncut(PythonValues(), (x, *args), expect_stages=2, other_calls=[((torch.randn(4, 8), *args), {})])


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ((3, None, "sin"), "times was 2 when the model was traced.*got 3"),
        ((2, torch.ones(8), "sin"), r"bias was None when the model was traced.*got a tensor \[8\]"),
        ((2, None, "cos"), "mode was 'sin' when the model was traced.*got 'cos'"),
        ((2, None, "sin", True), "flag was False when the model was traced.*got True"),
    ],
)
def test_other_python_values_than_those_traced_are_traced_or_refused(args: tuple[Any, ...], fault: str) -> None:
    model, x = PythonValues(), torch.randn(3, 8)
    pipe = pipeline(model, (x, 2, None, "sin"))
    torch.testing.assert_close(pipe(x, *args), model(x, *args))
    with pytest.raises(InputError, match=fault):
        dataclasses.replace(pipe, retrace=None)(x, *args)


@dataclasses.dataclass
class Batch:
    x: Tensor
    masks: dict[str, Tensor | None]
    scale: float = 2.0


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Any) -> Tensor:
        tensors = leaves(value)
        x = self.a(tensors[0])
        pipe_split()
        for tensor in tensors[1:]:
            x = self.b(x) * tensor
        return x


def leaves(value: Any) -> list[Tensor]:
    """The tensors of the inputs below, in an order of their own."""
    if isinstance(value, Batch):
        return [value.x * value.scale, *(mask for mask in value.masks.values() if mask is not None)]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in leaves(value[key])]
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in leaves(item)]


def nested_inputs(batch: int) -> dict[str, Any]:
    def tensor() -> Tensor:
        return torch.randn(batch, 8)

    return {
        "dict": {"b": tensor(), "a": {"z": tensor(), "y": [tensor(), (tensor(),)]}},
        "ordered dict": OrderedDict(second=tensor(), first=tensor()),
        "list": [tensor(), tensor(), tensor()],
        "tuple": (tensor(), [tensor()]),
        "dataclass": Batch(tensor(), {"left": tensor(), "none": None, "right": tensor()}, scale=0.5),
        "namedtuple": Point(tensor(), tensor()),
        "list of dataclasses": [Batch(tensor(), {"m": tensor()}), Batch(tensor(), {"n": tensor()})],
    }


@pytest.mark.parametrize("kind", list(nested_inputs(1)))
def test_nested_inputs(kind: str) -> None:
    others = [((nested_inputs(5)[kind],), {})]
    assert_equals_uncut(Nested(), (nested_inputs(3)[kind],), expect_stages=2, other_calls=others)


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, x: Tensor, first: Tensor, unused: Tensor | None = None, *, second: Tensor, power: int = 2
    ) -> Tensor:
        x = self.a(x) + second
        pipe_split()
        return self.b(x) * first - second**power


def test_keywords_come_in_another_order_than_they_are_used() -> None:
    tensors = {name: torch.randn(3, 8, requires_grad=True) for name in ("second", "first", "x")}
    swapped = {name: torch.randn(4, 8) for name in ("x", "second", "first")}
    assert_equals_uncut(Keywords(), (), tensors, expect_stages=2, other_calls=[((), swapped)])


def test_unused_arguments_and_defaults() -> None:
    x, first, second, unused = (torch.randn(3, 8, requires_grad=True) for _ in range(4))
    kwargs = {"second": second}
    others = [((x, first), {"second": second, "power": 2, "unused": unused})]
    assert_equals_uncut(Keywords(), (x, first, unused), kwargs, expect_stages=2, other_calls=others)


class AnyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        x = self.a(sum(tensors, torch.zeros(8)))
        pipe_split()
        return self.b(x) * named["scale"] + named["shift"]


def test_star_arguments() -> None:
    args = (torch.randn(3, 8), torch.randn(3, 8))
    kwargs = {"shift": torch.randn(8), "scale": torch.randn(3, 8)}
    assert_equals_uncut(AnyArguments(), args, kwargs, expect_stages=2)


def test_one_tensor_is_two_arguments() -> None:
    x = torch.randn(3, 8)
    assert_equals_uncut(Keywords(), (x, x), {"second": torch.randn(3, 8)}, expect_stages=2)
