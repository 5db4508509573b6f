"""Examples with sizes of 1, enlarged for a trace.

Much is different for one sample: rows are broadcast, every layout is contiguous. A trace would hold for it alone.
Only shapes matter to a trace, so that the same rows twice do as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch

from .dynamic import Place
from .inputs import Example

_BATCH = 2
_OTHERS = (3, 5, 7, 11, 13)  # apart from each other, so that no two sizes are taken for one


def sizes_of_one(example: Example) -> list[Place]:
    """The dims of an example that are to be symbolic and have size 1."""
    shapes = [tuple(tensor.shape) for tensor in example.tensors]
    return sorted(place for place in example.dynamic.symbolic(shapes) if shapes[place[0]][place[1]] == 1)


def with_fixed(example: Example, places: Iterable[Place]) -> Example:
    """The same example with some sizes fixed as they are."""
    return replace(example, dynamic=replace(example.dynamic, fixed=example.dynamic.fixed | frozenset(places)))


def enlarged(example: Example, small: Iterable[Place]) -> tuple[torch.Tensor, ...]:
    """The tensors of an example with these sizes of 1 made larger."""
    names, others = example.dynamic.names, itertools.cycle(_OTHERS)

    def size_called(place: Place) -> str | Place:
        return names.get(place, "batch" if place[1] == 0 else place)

    sizes = {size_called(place): _BATCH for place in small if place[1] == 0}
    for place in small:
        if size_called(place) not in sizes:
            sizes[size_called(place)] = next(others)
    tensors = list(example.tensors)
    for nth, dim in small:
        repeated = torch.cat([tensors[nth].detach()] * sizes[size_called((nth, dim))], dim)
        tensors[nth] = repeated.requires_grad_(tensors[nth].requires_grad)
    return tuple(tensors)
