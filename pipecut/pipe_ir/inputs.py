"""How a call's arguments become the model inputs of a trace: by name, through the model's own signature."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn

from ..errors import InputError
from .structure import Atom, Structure, flatten, unflatten
from .traced import PLAIN_TYPES, Condition, TracedCall, TracedInput


@dataclass(frozen=True)
class Example:
    """Example arguments, as leaves in the order of the call and under their names in the signature."""

    leaves: tuple[Any, ...]
    call: Structure
    signature: inspect.Signature
    named: tuple[tuple[str, int | None, Any], ...]

    def call_with(self, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with their tensors replaced, in order."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(self.call, leaves)
        return args, kwargs

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class _Nth(Atom):
    """Stands for the nth leaf while arguments are bound to names."""

    index: int


def read_example(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> Example:
    """Check example arguments against `model.forward`'s signature and name their leaves."""
    if not isinstance(args, tuple):
        raise InputError(
            f"mb_args must be a tuple of positional arguments, got {type(args).__name__}; "
            "for a single argument write mb_args=(x,)"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise InputError(f"mb_kwargs must be a dict with the names of arguments as keys, got {type(kwargs).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"{type(model).__name__} is a TorchScript module, which cannot be traced; pass the nn.Module")
    signature = inspect.signature(model.forward)
    leaves, call = flatten((args, dict(kwargs or {})))
    marked_args, marked_kwargs = unflatten(call, [_Nth(index) for index in range(len(leaves))])
    named, structure = flatten(_bind(signature, type(model).__name__, marked_args, marked_kwargs))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise InputError(
            f"there is no tensor among the example inputs of {type(model).__name__}.forward{signature}; "
            "mb_args and mb_kwargs are the arguments of one call, such as mb_args=(x,)"
        )
    named_leaves = tuple(
        (_pretty(path), leaf.index, leaves[leaf.index]) if isinstance(leaf, _Nth) else (_pretty(path), None, leaf)
        for path, leaf in zip(structure.paths(), named, strict=True)
    )
    return Example(tuple(leaves), call, signature, named_leaves)


def _bind(signature: inspect.Signature, model_name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the arguments do not fit {model_name}.forward{signature}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _pretty(path: tuple[str, ...]) -> str:
    """`("['batch']", "['ids']")` as a user writes it: `batch['ids']`."""
    first, *rest = path
    return first[2:-2] + "".join(rest)


def bind_inputs(call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """The tensors of a call by the step that they are the value of; what the trace cannot take is an error."""
    model_name = call.model_name
    leaves, structure = flatten(_bind(call.signature, model_name, args, kwargs))
    given = dict(zip(map(_pretty, structure.paths()), leaves, strict=True))
    faults = _structure_faults(call, given)
    for entry in call.inputs:
        if entry.path in given:
            faults += _leaf_faults(entry, given[entry.path])
    faults = faults or _size_faults(call, given)
    if faults:
        raise InputError(f"this call does not fit the trace of {model_name}:\n  " + "\n  ".join(faults))
    return {entry.step: given[entry.path] for entry in call.inputs if entry.step is not None}


def _size_faults(call: TracedCall, given: Mapping[str, Any]) -> list[str]:
    """Sizes that are one symbol in the trace, and differ in this call."""
    faults = []
    first: dict[sympy.Basic, tuple[str, int]] = {}
    for entry in call.inputs:
        for dim, expected in enumerate(entry.spec.shape if entry.spec is not None else ()):
            if isinstance(expected, int):
                continue
            size, place = given[entry.path].shape[dim], f"{entry.path} (dim {dim})"
            known = {symbol: first[symbol][1] for symbol in expected.free_symbols if symbol in first}
            if isinstance(expected, sympy.Symbol) and expected not in first:
                first[expected] = (place, size)
            elif known and int(expected.subs(known)) != size:
                others = " and ".join(f"{first[symbol][0]} has {first[symbol][1]}" for symbol in known)
                faults.append(f"{place} has size {size}, and {others}; in the trace it is {expected}, for both")
    sizes = {symbol: size for symbol, (_, size) in first.items()}
    return faults or [_broken(condition, sizes) for condition in call.conditions if not _holds(condition, sizes)]


def _holds(condition: Condition, sizes: Mapping[sympy.Basic, int]) -> bool:
    return bool(condition.holds.subs(sizes) != sympy.false)


def _broken(condition: Condition, sizes: Mapping[sympy.Basic, int]) -> str:
    given = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in condition.holds.free_symbols)
    where = f" (at {condition.source})" if condition.source else ""
    return (
        f"the model's code found {condition} in the example{where}, and the trace holds for that only; here "
        f"{given}: call pipeline() with an example of this size"
    )


def _structure_faults(call: TracedCall, given: Mapping[str, Any]) -> list[str]:
    expected = {entry.path for entry in call.inputs}
    missing = [f"{path} was part of the example inputs and is missing" for path in expected - given.keys()]
    extra = [
        f"{path} was not part of the example inputs: call pipeline() with an example that has it"
        for path in given.keys() - expected
    ]
    return sorted(missing) + sorted(extra)


def _leaf_faults(entry: TracedInput, value: Any) -> list[str]:
    retrace = f"call pipeline() with an example in which {entry.path} is like this"
    if entry.step is None:
        if _same_value(entry.constant, value):
            return []
        return [
            f"{entry.path} was {entry.constant!r} when the model was traced, and the trace holds for that value "
            f"only; got {_brief(value)}: {retrace}"
        ]
    if not isinstance(value, torch.Tensor):
        return [f"{entry.path} was a tensor when the model was traced; got {_brief(value)}: {retrace}"]
    return _tensor_faults(entry, value)


def _tensor_faults(entry: TracedInput, value: torch.Tensor) -> list[str]:
    spec = entry.spec
    assert spec is not None
    if value.dim() != len(spec.shape):
        return [f"{entry.path} has {value.dim()} dims {list(value.shape)}; the trace has {len(spec.shape)}: {spec}"]
    faults = [
        f"{entry.path} has size {size} in dim {dim}; the trace holds for {expected} only "
        f"(it was fixed by the example, or by the model's code)"
        for dim, (size, expected) in enumerate(zip(value.shape, spec.shape, strict=True))
        if isinstance(expected, int) and size != expected
    ]
    if value.dtype != spec.dtype:
        faults.append(f"{entry.path} is {value.dtype}; it was {spec.dtype} when the model was traced")
    return faults


def _same_value(fixed: Any, value: Any) -> bool:
    if fixed is value:
        return True
    # Of any other type, another object may be == and still hold other tensors.
    return type(fixed) is type(value) and isinstance(fixed, PLAIN_TYPES) and bool(fixed == value)


def _brief(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
