"""The `dynamic` option: sizes of the inputs that the user wants symbolic, and their names."""

from __future__ import annotations

import builtins
import difflib
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from ...errors import InputError
from ...text import shape_text

# What a user writes for one input: names by dim, the dims without names, or the names of all dims in order.
_DimNames: TypeAlias = Mapping[int, str | None] | Sequence[int] | Sequence[str | int | None]
AUTO = "auto"  # or one word: all sizes that the model's code leaves free
Dynamic: TypeAlias = Mapping[str, _DimNames] | Literal["auto"]
Place = tuple[int, int]  # the nth tensor of a call, and a dim of it

# Sizes are variables of the generated code: these names mean something else there.
_TAKEN = {"self", "torch", "device", "math", *keyword.kwlist, *dir(builtins)}


@dataclass(frozen=True)
class DynamicDims:
    """Dims that the user asked for. Places with one name are one size; a place without a name gets one later.

    With `auto` all dims are symbols when the trace begins, and those stay symbols that the code leaves free. Dims of
    size 1 are not, apart from the batch: they are there to be broadcast.
    """

    asked: Mapping[Place, str | None] = field(default_factory=dict)
    fixed: frozenset[Place] = frozenset()
    auto: bool = False

    @property
    def names(self) -> dict[Place, str]:
        """Names that the user gave."""
        return {place: name for place, name in self.asked.items() if name is not None}

    def symbolic(self, shapes: Sequence[Sequence[int]]) -> set[Place]:
        """Return the dims that are symbols at the beginning of a trace: those that were asked for, and the batch."""
        # One row beside others of several is meant to be broadcast, like a mask of shape [1, T]: not a batch of one.
        batched = any(shape and shape[0] > 1 for shape in shapes)
        firsts = {(nth, 0) for nth, shape in enumerate(shapes) if shape and not (batched and shape[0] == 1)}
        others = {
            (nth, dim) for nth, shape in enumerate(shapes) for dim, size in enumerate(shape) if dim > 0 and size > 1
        }
        return {*self.asked, *firsts, *self.alike(shapes), *(others if self.auto else ())} - self.fixed

    def alike(self, shapes: Sequence[Sequence[int]]) -> set[Place]:
        """Return dims without a name that are as large as one with a name: the model may turn out to tie them."""
        named = {
            shapes[nth][dim] for (nth, dim), name in self.names.items() if name != "batch" and shapes[nth][dim] > 1
        }
        places = {(nth, dim) for nth, shape in enumerate(shapes) for dim in range(1, len(shape))}
        return {(nth, dim) for nth, dim in places - self.asked.keys() - self.fixed if shapes[nth][dim] in named}


NOTHING_ASKED = DynamicDims()


def read_dynamic(dynamic: Any, tensors: Mapping[str, torch.Tensor], model_name: str) -> DynamicDims:
    """Check the `dynamic` option against the tensors of the example, given by path in the order of the call.

    >>> ids = torch.zeros(4, 10)
    >>> read_dynamic({"ids": {1: "seq"}, "mask": ("batch", "seq")}, {"ids": ids, "mask": ids}, "Net").names
    {(0, 1): 'seq', (1, 0): 'batch', (1, 1): 'seq'}
    """
    if dynamic is None:
        return NOTHING_ASKED
    if isinstance(dynamic, str) and dynamic == AUTO:
        return DynamicDims(auto=True)
    if not isinstance(dynamic, Mapping):
        got = repr(dynamic) if isinstance(dynamic, str) else type(dynamic).__name__
        raise InputError(
            f'dynamic must be "auto", or a dict from inputs to the names of their dims, such as '
            f'{{"{next(iter(tensors))}": {{0: "batch"}}}}; got {got}'
        )
    paths = list(tensors)
    asked: dict[Place, str | None] = {}
    fixed: set[Place] = set()
    for path, wish in dynamic.items():
        found = _path(path, tensors, model_name)
        for dim, name in _names_by_dim(found, tensors[found], wish).items():
            place = (paths.index(found), dim)
            if isinstance(name, int):
                fixed.add(place)
                continue
            if asked.get(place, name) != name:
                raise InputError(_two_names(found, dim, asked[place], name))
            asked[place] = name
    _check_one_size_per_name(asked, tensors)
    return DynamicDims(asked, frozenset(fixed))


def _path(given: Any, tensors: Mapping[str, torch.Tensor], model_name: str) -> str:
    """Return the path of the input that is meant: its path, or its name alone if it came through `**kwargs`."""
    if given in tensors:
        return str(given)
    alike = [path for path in tensors if path.endswith(f"[{given!r}]")]
    if len(alike) == 1:
        return alike[0]
    inputs = ", ".join(f"{path} {shape_text(tensor.shape)}" for path, tensor in tensors.items())
    inside = [path for path in tensors if path.startswith((f"{given}[", f"{given}."))]
    near = inside or difflib.get_close_matches(str(given), tensors, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InputError(
        f"dynamic names {given!r}, which is not a tensor input of {model_name} in the example{hint}\n  inputs: {inputs}"
    )


def _names_by_dim(path: str, tensor: torch.Tensor, wish: Any) -> dict[int, str | int | None]:
    """Return for each dim that is mentioned its name, None if it gets one later, or the one size that it has."""
    if isinstance(wish, Mapping):
        pairs = list(wish.items())
    elif isinstance(wish, Sequence) and not isinstance(wish, str) and all(_is_number(item) for item in wish):
        pairs = [(dim, None) for dim in wish]
    elif isinstance(wish, Sequence) and not isinstance(wish, str):
        pairs = _pairs_of_shape(path, tensor, wish)
    else:
        raise InputError(_unreadable(path, wish))
    named: dict[int, str | int | None] = {}
    for dim, name in pairs:
        if not _is_number(dim):
            raise InputError(_unreadable(path, wish))
        if not -tensor.dim() <= dim < tensor.dim():
            raise InputError(
                f"dynamic names dim {dim} of {path}, which has {tensor.dim()} dims in the example: "
                f"{shape_text(tensor.shape)}; use dims 0 to {tensor.dim() - 1}"
                if tensor.dim()
                else f"dynamic names dim {dim} of {path}, which is a tensor without dims; leave it out"
            )
        _check_name(path, dim, name, tensor)
        dim %= tensor.dim()
        if named.get(dim, name) != name:
            raise InputError(_two_names(path, dim, named[dim], name))
        named[dim] = name
    return named


def _pairs_of_shape(path: str, tensor: torch.Tensor, shape: Sequence[Any]) -> list[tuple[int, Any]]:
    if len(shape) != tensor.dim():
        raise InputError(
            f"dynamic has {tuple(shape)} for {path}, which has {tensor.dim()} dims in the example: "
            f"{shape_text(tensor.shape)}; give each dim a name, or None to leave it as it is"
        )
    return [(dim, name) for dim, name in enumerate(shape) if name is not None]


def _check_name(path: str, dim: int, name: Any, tensor: torch.Tensor) -> None:
    if _is_number(name):
        if name != tensor.shape[dim]:
            raise InputError(
                f"dynamic says that dim {dim} of {path} is {name}, and it is {tensor.shape[dim]} in the example; "
                "give it a name if it can have several sizes"
            )
    elif name is not None and not (isinstance(name, str) and name.isidentifier() and name not in _TAKEN):
        raise InputError(
            f"dynamic calls dim {dim} of {path} {name!r}, which cannot be the name of a size; use a word such as "
            "'seq' that means nothing else in Python"
        )


def _check_one_size_per_name(asked: Mapping[Place, str | None], tensors: Mapping[str, torch.Tensor]) -> None:
    paths, shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
    first: dict[str, Place] = {}
    for (nth, dim), name in asked.items():
        if name is None:
            continue
        other, other_dim = first.setdefault(name, (nth, dim))
        if shapes[nth][dim] != shapes[other][other_dim]:
            raise InputError(
                f"dynamic calls both dim {other_dim} of {paths[other]} and dim {dim} of {paths[nth]} {name!r}, and "
                f"they are {shapes[other][other_dim]} and {shapes[nth][dim]} in the example; one name is one size: "
                "use two names, or an example in which they are the same"
            )


def _two_names(path: str, dim: int, one: Any, other: Any) -> str:
    return f"dynamic calls dim {dim} of {path} both {one!r} and {other!r}; keep one of the names"


def _unreadable(path: str, wish: Any) -> str:
    return (
        f'dynamic has {wish!r} for {path}; write the names by dim, {{1: "seq"}}, or those of all dims, '
        '("batch", "seq"), or the dims alone, [1]'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
