"""Runs a copy of a model on the example, and on examples of other sizes, to see what its modules give."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_internals import buffers_of
from ..copies import clone
from ..inputs import Example
from ..sizes.dynamic import Place
from ..tracing.seen import attributes_of, is_same
from .observe import Observations, ObservedRun, Watcher

# MERGED: Random generators that go on as if a run had not been.


@contextlib.contextmanager
def kept_random_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put all generators back: torch's on the CPU and on the devices of these tensors, Python's and numpy's.

    >>> before = torch.get_rng_state()
    >>> with kept_random_numbers([]):
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices}:
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


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
        for names in (buffers_of(module), vars(module)):
            for name, value in list(names.items()):
                names[name] = own(value)
    return model


# MERGED: Sizes of a module's results, as expressions of the sizes that are known: read off from runs of several
# MERGED: sizes.


@dataclass(frozen=True)
class KnownSize:
    """A size in each run, and what it is called in the trace: a number, or a symbolic one."""

    values: tuple[int, ...]
    name: Any


def size_from(values: Sequence[int], known: Sequence[KnownSize]) -> Any:
    """The size that had these values in the runs, from known ones; None where nothing simple explains it.

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
