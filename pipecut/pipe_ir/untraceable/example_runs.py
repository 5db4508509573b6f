"""Runs a copy of a model on the example, and on examples of other sizes, to see what its modules give."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attributes import attributes_of, is_same
from ..clone import clone
from ..dynamic import Place
from ..inputs import Example
from .observed import Observations, ObservedRun
from .random_numbers import kept_random_numbers
from .watcher import Watcher


def run_on_example(model: nn.Module, example: Example) -> Observations:
    """The run on the example itself, then those on other sizes of its symbolic dims with which the model works.

    `model` is a copy of the user's whose hooks are silent. Its buffers, the inputs and the random generators are
    left as they are.
    """
    on_example = _run(model, example, example.tensors)
    others: list[ObservedRun] = []
    same: list[tuple[Place, ...]] = []
    for places in _sizes_that_change(example):
        nth, dim = places[0]
        sizes = _other_sizes(dim, example.tensors[nth].shape[dim])
        together = [run for size in sizes if (run := _try(model, example, places, size)) is not None]
        others += together
        if together and len(places) > 1:
            # A size that cannot change alone is one with the others, though no traced operation says so.
            same.append(tuple(place for place in places if _try(model, example, [place], sizes[0]) is None))
    return Observations(on_example, tuple(others), tuple(tied for tied in same if len(tied) > 1))


def _try(model: nn.Module, example: Example, places: Sequence[Place], size: int) -> ObservedRun | None:
    """A run with another size at these places; None if the model cannot work with it."""
    tensors = list(example.tensors)
    for nth, dim in places:
        tensors[nth] = _resized(tensors[nth], dim, size)
    with contextlib.suppress(Exception):  # the model's own complaint about a size that nobody asked for
        return _run(model, example, tensors)
    return None


def _sizes_that_change(example: Example) -> list[list[Place]]:
    """The places of each symbolic size: those with one name, or dims of one number and size."""
    places: dict[Any, list[Place]] = {}
    for nth, dim in sorted(example.dynamic.symbolic([tensor.shape for tensor in example.tensors])):
        key = example.dynamic.names.get((nth, dim)) or (dim, example.tensors[nth].shape[dim])
        places.setdefault(key, []).append((nth, dim))
    return list(places.values())


def _other_sizes(dim: int, size: int) -> tuple[int, ...]:
    """More samples, but shorter sequences: these have a limit in many models. Two, as one may fit by chance."""
    return (size + 1, size + 2) if dim == 0 or size < 4 else (size - 1, size - 2)


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Real data in another size: what is there, again from the start."""
    with torch.no_grad():
        rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        return tensor.index_select(dim, rows).requires_grad_(tensor.requires_grad)


def _run(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> ObservedRun:
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    args, kwargs = example.call_with(tuple(own))
    runner = _with_own_tensors(clone(model))
    before = {path: attributes_of(module) for path, module in runner.named_modules()}
    with kept_random_numbers((*runner.parameters(), *runner.buffers(), *own)), torch.enable_grad():
        calls = Watcher(runner).run(args, kwargs)
    return ObservedRun(tuple(tuple(tensor.shape) for tensor in tensors), calls, _changed(before, runner))


def _changed(before: Mapping[str, Mapping[str, Any]], model: nn.Module) -> tuple[str, ...]:
    """The attributes that the forwards of modules have set: `block.scale`."""
    found = []
    for path, module in model.named_modules():
        was, now = before.get(path, {}), attributes_of(module)
        names = sorted(name for name in now if name not in was or not is_same(was[name], now[name]))
        found += [f"{path}.{name}".lstrip(".") for name in names]
    return tuple(found)


def _with_own_tensors(model: nn.Module) -> nn.Module:
    """A copy shares its tensors with the model; what the forward may write to must be its own."""
    made: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return made.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))
        return value

    for module in model.modules():
        for names in (module._buffers, vars(module)):
            for name, value in list(names.items()):
                names[name] = own(value)
    return model
