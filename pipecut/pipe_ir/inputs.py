"""Binding of a call's arguments to the inputs of a trace: by name, through the model's own signature."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import ExampleError, InputError
from ..text import dtype_name, shape_text
from .sizes.dynamic import NOTHING_ASKED, DynamicDims, Place, read_dynamic
from .sizes.faults import size_faults
from .structure import NthLeaf, Structure, flatten, is_plain_object, is_tensor_holder, unflatten
from .traced import PLAIN_TYPES, FixedDim, TracedCall, TracedInput


@dataclass(frozen=True)
class Example:
    """Example arguments, as leaves in the order of the call and under their names in the signature."""

    leaves: tuple[Any, ...]
    call: Structure
    signature: inspect.Signature
    named: tuple[tuple[str, int | None, Any], ...]
    dynamic: DynamicDims = NOTHING_ASKED

    def call_with(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with their tensors replaced, in order."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.call, leaves)
        return args, kwargs

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))


def read_example(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, dynamic: Any = None) -> Example:
    """Check example arguments against `model.forward`'s signature and name their leaves."""
    if not isinstance(args, tuple):
        raise ExampleError(
            f"mb_args must be a tuple of positional arguments, got {type(args).__name__}; "
            "for a single argument write mb_args=(x,)"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise ExampleError(f"mb_kwargs must be a dict with the names of arguments as keys, got {type(kwargs).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"{type(model).__name__} is a TorchScript module, which cannot be traced; pass the nn.Module")
    signature = inspect.signature(model.forward)
    leaves, call = flatten((args, dict(kwargs or {})))
    marked_args, marked_kwargs = unflatten(call, [NthLeaf(index) for index in range(len(leaves))])
    named, structure = flatten(_bind(signature, type(model).__name__, marked_args, marked_kwargs))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise InputError(
            f"there is no tensor among the example inputs of {type(model).__name__}.forward{signature}; "
            "mb_args and mb_kwargs are the arguments of one call, such as mb_args=(x,)"
        )
    named_leaves = tuple(
        (_pretty(path), leaf.index, leaves[leaf.index]) if isinstance(leaf, NthLeaf) else (_pretty(path), None, leaf)
        for path, leaf in zip(structure.paths(), named, strict=True)
    )
    for path, _, leaf in named_leaves:
        if is_tensor_holder(leaf):
            raise ExampleError(_holds_tensors(path, leaf, "holds tensors, which a trace would take for constants"))
    paths = {nth: path for path, nth, _ in named_leaves}
    tensors = {paths[nth]: leaf for nth, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    asked = read_dynamic(dynamic, tensors, type(model).__name__)
    return Example(tuple(leaves), call, signature, named_leaves, asked)


def _holds_tensors(path: str, value: Any, why: str) -> str:
    return (
        f"{path} is a {type(value).__name__}, an object that {why}.\nLeave it out if the model can do without (of a "
        "key/value cache: pass use_cache=False instead), or let the model take the tensors themselves, alone or in "
        "tuples, lists, dicts or dataclasses"
    )


@contextlib.contextmanager
def objects_kept(example: Example) -> Iterator[None]:
    """Raise if the code in the block puts tensors into an object among the arguments, which is then as before."""
    plain = [(path, leaf) for path, _, leaf in example.named if is_plain_object(leaf)]
    before = [_attributes_of(leaf) for _, leaf in plain]
    try:
        yield
    finally:
        filled = [
            (path, leaf, attributes)
            for (path, leaf), attributes in zip(plain, before, strict=True)
            if is_tensor_holder(leaf)
        ]
        for path, leaf, attributes in filled:
            vars(leaf).clear()
            vars(leaf).update(attributes)
            why = "the forward puts tensors into; the stages would not put them into that of a call"
            raise ExampleError(_holds_tensors(path, leaf, why)) from None


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in which those that change are copies."""
    try:
        return copy.deepcopy(vars(value))
    except Exception:  # an attribute that cannot be copied; as it is, it is all there is
        return dict(vars(value))


def _bind(signature: inspect.Signature, model_name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the arguments do not fit {model_name}.forward{signature}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _pretty(path: tuple[str, ...]) -> str:
    """Return `("['batch']", "['ids']")` as a user writes it: `batch['ids']`."""
    first, *rest = path
    return first[2:-2] + "".join(rest)


def bind_inputs(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return the tensors of a call by the index of their values in the trace; raise if the call does not fit it."""
    model_name, given = call.model_name, by_path(call, args, kwargs)
    faults = _structure_faults(call, given)
    for entry in call.inputs:
        if entry.path in given:
            faults += _leaf_faults(entry, given[entry.path], call.fixed_dims)
    faults = faults or size_faults(call, given)
    if faults:
        raise InputError(f"this call does not fit the trace of {model_name}:\n  " + "\n  ".join(faults))
    return {entry.value: given[entry.path] for entry in call.inputs if entry.value is not None}


def by_path(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a call, defaults included, by their paths."""
    leaves, structure = flatten(_bind(call.signature, call.model_name, args, kwargs))
    return dict(zip(map(_pretty, structure.paths()), leaves, strict=True))


def has_form(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call is of the form of the traced one, whatever the sizes of its tensors.

    That is the same arguments, the same Python values, and tensors in the same places, with the same dtypes and numbers
    of dims. A call of another form is traced once more.
    """
    given = by_path(call, args, kwargs)
    return len(given) == len(call.inputs) and all(
        entry.path in given and _is_like(entry, given[entry.path]) for entry in call.inputs
    )


def _is_like(entry: TracedInput, value: Any) -> bool:
    if entry.spec is None:
        return _same_value(entry.constant, value)
    return isinstance(value, torch.Tensor) and (value.dim(), value.dtype) == (len(entry.spec.shape), entry.spec.dtype)


def can_be_retraced(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call differs from the traced one by nothing but tensors and plain Python values.

    Numbers of another precision do not count: it is the parameters' that has to be another, in a new pipe.
    """
    known = {entry.path: entry for entry in call.inputs}
    return all(_can_differ(known.get(path), value) for path, value in by_path(call, args, kwargs).items())


def _can_differ(entry: TracedInput | None, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        known = None if entry is None else entry.spec
        return known is None or not known.dtype.is_floating_point or value.dtype == known.dtype
    return isinstance(value, PLAIN_TYPES) or (entry is not None and entry.constant is value)


def _structure_faults(call: TracedCall, given: Mapping[str, Any]) -> list[str]:
    entries = {entry.path: entry for entry in call.inputs}
    missing, extra = sorted(entries.keys() - given.keys()), sorted(given.keys() - entries.keys())
    faults = []
    for path in [path for path in extra if _inside(path, missing)]:
        then = _inside(path, missing)
        faults.append(
            f"{path} held {', '.join(then)} when the model was traced; got {_brief(given[path])}: {_retrace(path)}"
        )
        missing, extra = _others(missing, then), _others(extra, [path])
    for path in [path for path in missing if _inside(path, extra)]:
        now = _inside(path, extra)
        was = "a tensor" if entries[path].value is not None else repr(entries[path].constant)
        faults.append(f"{path} was {was} when the model was traced; now it holds {', '.join(now)}: {_retrace(path)}")
        missing, extra = _others(missing, [path]), _others(extra, now)
    faults += [f"{path} was part of the example inputs and is missing" for path in missing]
    faults += [
        f"{path} was not part of the example inputs: call pipeline() with an example that has it" for path in extra
    ]
    return faults


def _inside(path: str, others: Sequence[str]) -> list[str]:
    """Return the paths that lead into the value at a path."""
    return [other for other in others if other.startswith((f"{path}[", f"{path}."))]


def _others(paths: Sequence[str], without: Sequence[str]) -> list[str]:
    return [path for path in paths if path not in without]


def _retrace(path: str) -> str:
    return f"call pipeline() with an example in which {path} is like this"


def _leaf_faults(entry: TracedInput, value: Any, fixed: Sequence[FixedDim]) -> list[str]:
    retrace = _retrace(entry.path)
    if entry.value is None:
        if _same_value(entry.constant, value):
            return []
        return [
            f"{entry.path} was {entry.constant!r} when the model was traced, and the trace holds for that value "
            f"only; got {_brief(value)}: {retrace}"
        ]
    if not isinstance(value, torch.Tensor):
        return [f"{entry.path} was a tensor when the model was traced; got {_brief(value)}: {retrace}"]
    return _tensor_faults(entry, value, fixed)


def _tensor_faults(entry: TracedInput, value: torch.Tensor, fixed: Sequence[FixedDim]) -> list[str]:
    spec = entry.spec
    assert spec is not None
    if value.dim() != len(spec.shape):
        return [
            f"{entry.path} has {value.dim()} dims {shape_text(value.shape)}; the trace has {len(spec.shape)}: {spec}"
        ]
    faults = [
        f"{entry.path} has size {size} in dim {dim}{_name_of(entry, dim, fixed)}; the trace holds for {expected} only "
        f"({_why_fixed(entry, dim, fixed)})"
        for dim, (size, expected) in enumerate(zip(value.shape, spec.shape, strict=True))
        if isinstance(expected, int) and size != expected
    ]
    if value.dtype != spec.dtype:
        faults.append(f"{entry.path} is {value.dtype}; it was {spec.dtype} when the model was traced")
    return faults


def _name_of(entry: TracedInput, dim: int, fixed: Sequence[FixedDim]) -> str:
    names = [place.name for place in fixed if (place.path, place.dim) == (entry.path, dim) and place.name]
    return f" ({names[0]})" if names else ""


def _why_fixed(entry: TracedInput, dim: int, fixed: Sequence[FixedDim]) -> str:
    """Return the reason for which a size is a number in the trace, and the remedy."""
    for place in fixed:
        if (place.path, place.dim) == (entry.path, dim):
            return f"it was fixed by the model's code{f' at {place.source}' if place.source else ''}"
    if dim == 0 and entry.spec is not None and entry.spec.shape[0] == 1:
        return "it was fixed by the example, which has one row: call pipeline() with an example of several"
    return (
        f"it was fixed by the example: call pipeline() with dynamic={{{entry.path!r}: {{{dim}: 'a name'}}}}, or with "
        "dynamic='auto', which finds all sizes that may change"
    )


def _same_value(fixed: Any, value: Any) -> bool:
    if fixed is value:
        return True
    # Of any other type, another object may be == and still hold other tensors.
    return type(fixed) is type(value) and isinstance(fixed, PLAIN_TYPES) and bool(fixed == value)


def _brief(value: Any) -> str:
    return f"a tensor {shape_text(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def active_autocast() -> str:
    """Return the torch.autocast of the caller in words, '' if it is off: a trace holds for the dtypes that it gives.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     active_autocast()
    'bfloat16 on cpu'
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    return ", ".join(f"{dtype_name(torch.get_autocast_dtype(device))} on {device}" for device in on)


# Sizes in the place of 1. One sample is broadcast, and contiguous in every layout: a trace would hold for it alone.
# Only shapes matter to a trace, so that the same rows twice do as well.
_BATCH = 2
_OTHERS = (3, 5, 7, 11, 13)  # apart from each other, so that no two sizes are taken for one


def sizes_of_one(example: Example) -> list[Place]:
    """Return the dims of an example that are to be symbolic and have size 1."""
    shapes = [tuple(tensor.shape) for tensor in example.tensors]
    return sorted(place for place in example.dynamic.symbolic(shapes) if shapes[place[0]][place[1]] == 1)


def with_fixed(example: Example, places: Iterable[Place]) -> Example:
    """Return the same example with some sizes fixed as they are."""
    return replace(example, dynamic=replace(example.dynamic, fixed=example.dynamic.fixed | frozenset(places)))


def enlarged(example: Example, small: Iterable[Place]) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an example with these sizes of 1 made larger."""
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
