"""Objects that hold tensors: taken apart and put together, or left alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeError, Schedule1F1B, SplitPoint, TraceError, pipeline
from pipecut.pipe_ir.structure import flatten, is_tensor_holder, unflatten


class Layer:
    def __init__(self, keys: Tensor | None) -> None:
        self.keys = keys
        self.is_empty = keys is None


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = list(layers)
        self.kind = Layer


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def ring() -> Cache:
    cache = Cache(Layer(torch.ones(1)))
    cache.layers.append(cache)  # type: ignore[arg-type]
    return cache


@pytest.mark.parametrize(
    ("value", "holds"),
    [
        (Cache(Layer(torch.ones(1))), True),
        (Cache(Layer(None)), False),
        (Cache(), False),
        (Slotted(torch.ones(1)), False),
        (ring(), False),
        (nn.Linear(1, 1), False),
        (Cache, False),
        (torch.ones(1), False),
        ([torch.ones(1)], False),
        ("text", False),
    ],
)
def test_what_is_a_holder(value: Any, holds: bool) -> None:
    assert is_tensor_holder(value) is holds


def test_a_holder_is_a_leaf_unless_asked_for() -> None:
    cache = Cache(Layer(torch.ones(1)))
    assert flatten(cache)[0] == [cache]


def test_taken_apart_and_put_together() -> None:
    cache = Cache(Layer(torch.ones(2)), Layer(None), Layer(torch.zeros(3)))
    leaves, structure = flatten({"cache": cache}, holders=True)
    assert [".".join(path) for path in structure.paths()][0] == "['cache']..layers.[0]..keys"
    made = unflatten(structure, leaves)["cache"]
    assert type(made) is Cache
    assert made is not cache
    assert made.kind is Layer
    assert [type(layer) for layer in made.layers] == [Layer, Layer, Layer]
    assert made.layers[1] is not cache.layers[1]
    assert all(new.keys is old.keys for new, old in zip(made.layers, cache.layers, strict=True))


@dataclasses.dataclass
class Output:
    y: Tensor
    cache: Any


class Remembers(nn.Module):
    """Every layer leaves something in an object that is part of the result, as language models do with their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Output:
        cache = Cache()
        for layer in self.layers:
            x = layer(x)
            cache.layers.append(Layer(x * 2))
        return Output(x, cache)


@pytest.mark.parametrize("stages", [2, 4])
def test_an_object_with_values_of_all_stages_is_returned(stages: int) -> None:
    torch.manual_seed(0)
    model, x = Remembers(), torch.randn(5, 3)
    expected = model(x)
    pipe = pipeline(model, (x,), num_stages=stages, outputs=["cache"])
    built = [pipe.build_stage(index, "cpu") for index in range(stages)]
    schedule = Schedule1F1B(
        built, 2, lambda output, target: output.y.pow(2).mean() + output.cache.layers[0].keys.mean()
    )
    output = schedule.step(x, target=torch.zeros(5))
    assert type(output.cache) is Cache
    for layer, wanted in zip(output.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, wanted.keys)
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    (expected.y.pow(2).mean() + expected.cache.layers[0].keys.mean()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, msg=name)


class ReturnsSlotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Slotted:
        return Slotted(self.linear(x))


def test_an_object_that_cannot_be_put_together_again() -> None:
    with pytest.raises(TraceError, match="returns a Slotted, which cannot be taken apart and put together again"):
        pipeline(ReturnsSlotted(), (torch.ones(2, 3),))


class KeepsSizes(nn.Module):
    """An object with a symbolic size in it, as caches have that count their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        layer = Layer(self.first(x))
        layer.is_empty = x.shape[1]  # type: ignore[assignment]
        return {"y": self.second(layer.keys), "cache": Cache(layer)}


def test_symbolic_sizes_inside_an_object() -> None:
    """A symbolic number leads to all that a trace knows of sizes, and back to itself."""
    model = KeepsSizes()
    pipe = pipeline(model, (torch.ones(2, 5, 3),), num_stages=2, dynamic={"x": {1: "seq"}})
    output = pipe(torch.ones(4, 7, 3))
    assert output["cache"].layers[0].is_empty == 7
    torch.testing.assert_close(output["y"], model(torch.ones(4, 7, 3))["y"])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        if x.sum() > 0:
            y = y * 2
        return {"y": y, "cache": Cache(Layer(y + 1))}


class ReturnsWhatItGot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches, self.last = nn.Linear(3, 3), Branches(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        made = self.branches(self.first(x))
        return {"y": self.last(made["y"]), "cache": made["cache"]}


def test_an_object_from_a_module_that_cannot_be_traced() -> None:
    """It was the example's object at every call."""
    model = ReturnsWhatItGot()
    pipe = pipeline(model, (torch.ones(2, 3),), split_spec={"last": SplitPoint.BEGINNING}, tracer="fx")
    x = torch.randn(4, 3)
    torch.testing.assert_close(pipe(x)["cache"].layers[0].keys, model(x)["cache"].layers[0].keys)


class TakesCache(nn.Module):
    """Attends to what is in its cache, and puts more into it, as a language model does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.a(x)
        if cache is not None:
            cache.layers.append(Layer(x))
            x = x + torch.cat([layer.keys for layer in cache.layers if layer.keys is not None]).mean()
        return self.b(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tracer", ["auto", "export", "fx"])
def test_a_cache_among_the_inputs_is_refused_in_two_lines(tracer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A run on the example filled the user's own cache, the next one failed on it, and torch printed a page about it.

    What was in the cache became a constant of the trace.
    """
    model, x, empty = TakesCache(), torch.ones(3, 2), Cache()
    for cache, why in (empty, "the forward puts tensors into"), (Cache(Layer(torch.ones(3, 2))), "holds tensors"):
        before = list(cache.layers)
        with pytest.raises(PipeError, match=f"^cache is a Cache, an object that {why}.*\\.\nLeave it out") as caught:
            pipeline(model, (x, cache), num_stages=2, tracer=tracer)
        assert len(str(caught.value).splitlines()) == 2
        assert cache.layers == before
    assert capfd.readouterr().err == ""
    torch.testing.assert_close(pipeline(model, (x,), num_stages=2)(x), model(x))
