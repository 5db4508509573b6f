"""Runs of a copy of a model on the example, and on examples of other sizes, that observe its module calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import buffers_of
from ..copies import clone
from ..inputs import Example, objects_kept
from ..sizes.dynamic import Place
from ..tracing.records import attributes_of, changed_attributes
from ..tracing.run import kept_random_numbers
from ..untouched import run_untouched
from .observe import Observations, ObservedRun, Watcher


def run_on_example(model: nn.Module, example: Example) -> Observations:
    """Observe a run on the example, then runs on other sizes of its symbolic dims with which the model works.

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
    """Run with another size at these places; return None if the model cannot work with it."""
    tensors = list(example.tensors)
    for nth, dim in places:
        tensors[nth] = _resized(tensors[nth], dim, size)
    with contextlib.suppress(Exception):  # the model's own complaint about a size that nobody asked for
        return _run(model, example, tensors)
    return None


def _sizes_that_change(example: Example) -> list[list[Place]]:
    """Return the places of each symbolic size: those with one name, or dims of one number and size."""
    places: dict[Any, list[Place]] = {}
    for nth, dim in sorted(example.dynamic.symbolic([tensor.shape for tensor in example.tensors])):
        key = example.dynamic.names.get((nth, dim)) or (dim, example.tensors[nth].shape[dim])
        places.setdefault(key, []).append((nth, dim))
    return list(places.values())


def _other_sizes(dim: int, size: int) -> tuple[int, ...]:
    """Return two sizes, as one may fit by chance: more samples, but shorter sequences, which often have a limit."""
    return (size + 1, size + 2) if dim == 0 or size < 4 else (size - 1, size - 2)


def _resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return real data in another size: its rows, repeated from the start."""
    with torch.no_grad():
        rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        return tensor.index_select(dim, rows).requires_grad_(tensor.requires_grad)


def _run(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> ObservedRun:
    return run_untouched(model, lambda _: _observed_run(model, example, tensors), real=True)


def _observed_run(model: nn.Module, example: Example, tensors: Sequence[Tensor]) -> ObservedRun:
    own = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    args, kwargs = example.call_with(tuple(own))
    runner = _with_own_tensors(clone(model))
    before = attributes_of(runner)
    with (
        kept_random_numbers((*runner.parameters(), *runner.buffers(), *own)),
        objects_kept(example),
        torch.enable_grad(),
    ):
        calls = Watcher(runner).run(args, kwargs)
    changed = changed_attributes(before, runner)
    names = tuple(f"{path}.{name}".lstrip(".") for path, names in changed.items() for name in names)
    return ObservedRun(tuple(tuple(tensor.shape) for tensor in tensors), calls, names)


def _with_own_tensors(model: nn.Module) -> nn.Module:
    """Give a copy, which shares its tensors with the model, its own ones wherever the forward may write."""
    made: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return made.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))
        return value

    for module in model.modules():
        for names in (buffers_of(module), vars(module)):
            for name, value in list(names.items()):
                names[name] = own(value)
    return model


@dataclass(frozen=True)
class KnownSize:
    """A size in each run, and its symbol or number in the trace."""

    values: tuple[int, ...]
    name: Any


def size_from(values: Sequence[int], known: Sequence[KnownSize]) -> Any:
    """Express a size that had these values in the runs by known sizes; None if nothing simple explains it.

    >>> batch = KnownSize((4, 5, 6), 4)
    >>> size_from((8, 8, 8), [batch]), size_from((12, 15, 18), [batch]), size_from((7, 8, 9), [batch])
    (8, 12, 7)
    >>> size_from((3, 1, 4), [batch]) is None
    True
    """
    first = values[0]
    if all(value == first for value in values):
        return first
    for size in known:
        if size.values == tuple(values):
            return size.name
    for size in known:
        times, rest = divmod(first, size.values[0]) if size.values[0] else (0, 1)
        if not rest and all(value == times * own for value, own in zip(values, size.values, strict=True)):
            return times * size.name
        more = first - size.values[0]
        if all(value == own + more for value, own in zip(values, size.values, strict=True)):
            return size.name + more
    for one, other in itertools.combinations(known, 2):
        products = [mine * theirs for mine, theirs in zip(one.values, other.values, strict=True)]
        times, rest = divmod(first, products[0]) if products[0] else (0, 1)
        if not rest and all(value == times * product for value, product in zip(values, products, strict=True)):
            return times * one.name * other.name
    return None
