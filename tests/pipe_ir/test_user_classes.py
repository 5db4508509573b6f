"""Values and classes of the user's own: they come back as what they are, or are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import InputError, SplitPoint, TraceError, pipeline
from tests.support.equality import assert_equals_uncut

X = torch.randn(4, 8)
BEFORE_B = {"b": SplitPoint.BEGINNING}


class Two(nn.Module):
    """Two layers, and a given function that makes the output."""

    def __init__(self, pack: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.b(self.a(x)))


class Bag(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dataclass that is an OrderedDict of those of its fields that are not None."""

    logits: Any = None
    loss: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@pytest.mark.parametrize(
    ("pack", "name"),
    [
        (lambda y: types.SimpleNamespace(logits=y, count=2), "SimpleNamespace"),
        (lambda y: (y, {1, 2}), r"\bset\b"),
        (lambda y: {"y": [y, types.SimpleNamespace(inner=y)]}, "SimpleNamespace"),
    ],
    ids=["namespace", "set in a tuple", "nested namespace"],
)
def test_an_output_of_an_unknown_type_is_refused(pack: Callable[[Tensor], Any], name: str) -> None:
    """The object that the trace made, with the trace's tensors in it, came back from every call."""
    with pytest.raises(TraceError, match=f"(?s){name}.*(dict|tuple|dataclass)"):
        pipeline(Two(pack), (X,), split_spec=BEFORE_B)


def test_a_dict_of_a_class_of_its_own_comes_back() -> None:
    model = Two(lambda y: Bag(logits=y, both=Bag(first=y * 2, count=3)))
    output = assert_equals_uncut(model, (X,), split_spec=BEFORE_B, expect_stages=2)(X)
    assert type(output) is type(output.both) is Bag
    assert list(output) == ["logits", "both"]
    assert output.both.count == 3


def test_a_dataclass_that_is_a_dict_comes_back_with_items_and_attributes() -> None:
    model = Two(lambda y: ModelOutput(logits=y, states=(y + 1, y + 2)))
    expected = copy.deepcopy(model)(X)
    output = assert_equals_uncut(model, (X,), split_spec=BEFORE_B, expect_stages=2)(X)
    assert type(output) is ModelOutput
    assert list(output) == list(expected) == ["logits", "states"]
    assert output.loss is None
    for read in (lambda value: value["logits"], lambda value: value.logits, lambda value: value["states"][1]):
        assert torch.equal(read(output), read(expected))
    assert output["logits"] is output.logits
    assert len(output.states) == 2
    output["logits"].sum().backward()


def test_example_inputs_without_a_tensor_are_refused() -> None:
    class Ones(Two):
        def forward(self, count: int) -> Tensor:
            return self.b(self.a(torch.ones(count, 8)))

    with pytest.raises(InputError, match="tensor"):
        pipeline(Ones(), (4,), split_spec=BEFORE_B)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_is_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(InputError, match="(?i)script"):
        pipeline(scripted, (X,), split_spec={"1": SplitPoint.BEGINNING})


class Scale:
    """Equal to every other of its kind."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale)

    def __hash__(self) -> int:
        return 0


def test_an_equal_object_is_not_the_same_object() -> None:
    """What `==` says of a class of the user's own says nothing of what the forward reads from it."""

    class Scaled(Two):
        def forward(self, x: Tensor, scale: Scale) -> Tensor:
            return self.b(self.a(x) * scale.factor)

    traced = Scale(2.0)
    model = Scaled()
    pipe = pipeline(model, (X, traced), split_spec=BEFORE_B)
    assert torch.equal(pipe(X, traced), model(X, traced))
    with pytest.raises(InputError, match="scale was .* when the model was traced"):
        pipe(X, Scale(3.0))


class Stack(nn.Sequential):
    """A Sequential under another name."""


class Layers(nn.ModuleList):
    """A ModuleList that can be called."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Stacked(nn.Module):
    """Six layers in a container."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(6)]
        self.stack = cls(layers) if issubclass(cls, nn.ModuleList) else cls(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x)


@pytest.mark.parametrize("cls", [nn.Sequential, Stack, Layers])
def test_containers_are_indexed_in_a_stage_as_in_the_model(cls: type[nn.Module]) -> None:
    """A subclass counted the members that are in the stage, and gave another one than was asked for."""
    model = Stacked(cls)
    pipe = assert_equals_uncut(model, (X,), split_spec={"stack.3": SplitPoint.BEGINNING}, expect_stages=2)
    model, (first, last) = pipe.traced.model, pipe.stages
    assert isinstance(first.stack, cls)
    assert isinstance(last.stack, cls)
    for index in (3, 4, 5, -1, -2, -3):
        assert last.stack[index].weight is model.stack[index].weight
    for index in (0, 1, 2, -4, -6):
        assert first.stack[index].weight is model.stack[index].weight
    assert [len(first.stack), len(last.stack)] == [3, 3]
    for index in (0, 2, 6, -4):
        with pytest.raises(IndexError, match="3, 4, 5"):
            last.stack[index]
    for index in (3, -1):
        with pytest.raises(IndexError, match="0, 1, 2"):
            first.stack[index]


def test_classes_that_watch_their_subclasses_see_none_of_ours() -> None:
    """The tracer and the stages made subclasses: registries saw them, and required arguments were missing."""
    seen: list[type] = []

    class Registered(nn.Module):
        def __init_subclass__(cls, *, required: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(cls)

    class Block(Registered, required="block"):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    assert_equals_uncut(Block(), (X,), split_spec=BEFORE_B, expect_stages=2)
    assert_equals_uncut(nn.Sequential(Block(), Block()), (X,), split_spec={"1.b": SplitPoint.BEGINNING})
    assert seen == [Block]


class Versioned(nn.Module):
    """Nothing but extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 7

    def get_extra_state(self) -> int:
        return self.version

    def set_extra_state(self, state: int) -> None:
        self.version = state


@pytest.mark.parametrize("inside", [False, True])
def test_extra_state_of_a_module_that_is_not_called_is_in_a_stage(inside: bool) -> None:
    model = Two()
    (model.b if inside else model).add_module("versioned", Versioned())
    name = "b.versioned" if inside else "versioned"
    pipe = pipeline(model, (X,), split_spec=BEFORE_B)
    holders = [stage for stage in pipe.stages if f"{name}._extra_state" in stage.state_dict()]
    assert len(holders) == 1
    (holder,) = holders
    assert holder.state_dict()[f"{name}._extra_state"] == 7
    holder.load_state_dict({**holder.state_dict(), f"{name}._extra_state": 8})
    assert holder.get_submodule(name).version == 8
