"""clone: the same tensors in new modules, so that nothing done to a copy reaches the model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pipecut.pipe_ir.copies import clone


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.optional: nn.Module | None = None
        self.register_module("nothing", None)
        self.register_parameter("no_bias", None)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.plain = torch.arange(3.0)
        self.config = {"sizes": [1, 2], "tensor": torch.ones(1)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.count


def test_modules_are_new_and_tensors_are_shared() -> None:
    model = Net()
    copy = clone(model)
    assert not set(copy.modules()) & set(model.modules())
    assert [type(module) for module in copy.modules()] == [type(module) for module in model.modules()]
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        mine, other = dict(named(model)), dict(named(copy))
        assert mine.keys() == other.keys()
        assert all(other[name] is tensor for name, tensor in mine.items())
    assert copy.plain is model.plain
    assert copy.config["tensor"] is model.config["tensor"]
    assert list(copy.state_dict()) == list(model.state_dict())


def test_other_attributes_are_copied() -> None:
    model = Net()
    copy = clone(model)
    copy.config["sizes"].append(3)
    copy.layers[0].extra = "mine"
    copy._buffers["count"] = torch.ones(1)
    assert model.config["sizes"] == [1, 2]
    assert not hasattr(model.layers[0], "extra")
    assert model.count == 0


def test_children_that_are_none_stay_none() -> None:
    copy = clone(Net(), absent=[])
    assert (copy.nothing, copy.optional, copy.no_bias) == (None, None, None)
    assert "nothing" in copy._modules
    assert "no_bias" in copy._parameters


def test_absent_modules_are_gone_and_none_children_are_not() -> None:
    model = Net()
    copy = clone(model, absent=[model.layers[1]])
    assert list(copy.layers._modules) == ["0", "2"]
    assert copy.layers._modules["2"].weight is model.layers[2].weight
    assert "nothing" in copy._modules
    assert len(model.layers) == 3


def test_a_module_with_two_names_is_one_module_in_the_copy() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.b = model.a
    copy = clone(model)
    assert copy.a is copy.b
    assert copy.a is not model.a
    assert [name for name, _ in clone(model, absent=[model.a]).named_modules(remove_duplicate=False)] == [""]


def test_attributes_that_refer_to_modules_refer_to_the_copies() -> None:
    model = Net()
    model.favourites = [model.layers[2]]
    model.by_name = {"first": model.layers[0]}
    copy = clone(model)
    assert copy.favourites[0] is copy.layers[2]
    assert copy.by_name["first"] is copy.layers[0]


class Chooses(nn.Module):
    """Keeps a method of its own, and one of a child, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.run: Callable[[Tensor], Tensor] = self.plainly
        self.later = functools.partial(self.plainly)
        self.of_child = self.inner.forward

    def plainly(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_bound_methods_belong_to_the_copy() -> None:
    model = Chooses()
    copy = clone(model)
    assert copy.run.__self__ is copy
    assert copy.later.func.__self__ is copy
    assert copy.of_child.__self__ is copy.inner
    assert model.run.__self__ is model


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.inner = nn.Linear(4, 4)
        self.settings = {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.inner(x)


def test_an_attribute_that_cannot_be_copied_is_shared() -> None:
    model = nn.Sequential(Locked(), nn.Linear(4, 4))
    copy = clone(model)
    assert copy[0].lock is model[0].lock
    assert copy[0] is not model[0]
    assert copy[0].settings is not model[0].settings
    assert torch.equal(copy(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_an_attribute_that_cannot_be_copied_is_shared_deep_inside_others() -> None:
    model = Locked()
    model.nested = {"locks": [threading.Lock()]}
    copy = clone(model)
    assert copy.nested["locks"][0] is model.nested["locks"][0]


class Remembers:
    """A callable object as hook."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(type(module).__name__)


def test_hooks_are_shared_but_not_the_dicts_that_hold_them() -> None:
    model, hook = Net(), Remembers()
    model.layers[0].register_forward_hook(hook)
    copy = clone(model)
    assert list(copy.layers[0]._forward_hooks.values()) == [hook]
    copy(torch.ones(1, 4))
    assert hook.seen == ["Linear"]
    copy.layers[0]._forward_hooks.clear()
    assert len(model.layers[0]._forward_hooks) == 1


def test_a_computed_weight_that_is_not_a_leaf_is_shared() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight_of_today = model[0].weight * 2
    assert clone(model)[0].weight_of_today is model[0].weight_of_today


def test_a_parametrized_module_keeps_its_class_and_parameters() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    copy = clone(model)
    assert list(copy.state_dict()) == list(model.state_dict())
    assert torch.equal(copy[0].weight, model[0].weight)
    assert all(mine is other for mine, other in zip(model.parameters(), copy.parameters(), strict=True))


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_kept(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).train(training)
    model[0].eval()
    assert [module.training for module in clone(model).modules()] == [training, False, training]
