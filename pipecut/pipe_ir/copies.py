"""Copies of a module tree that share its tensors: changes of a copy never reach the user's model."""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import AbsentTensorError
from ..torch_internals import (
    HOOK_DICTS,
    STATE_DICTS,
    FakeTensorMode,
    buffers_of,
    children_of,
    is_wrapped_hook,
    parameters_of,
    tensors_not_copied,
)


def clone(
    model: nn.Module,
    absent: Collection[nn.Module] = (),
    replaced: Mapping[int, torch.Tensor] | None = None,
    without_tensors: Mapping[nn.Module, str] | None = None,
) -> nn.Module:
    """Return a new module tree of the same classes over the same tensors; `absent` modules are left out.

    Absent modules that are in `without_tensors`, with their paths, are copied without parameters and buffers, and
    outside of the tree: modules that refer to them without having registered them can read their plain attributes.

    Tensors whose id is in `replaced` are others in the copy, wherever a module refers to them.

    Attributes that refer to modules (lists of them, bound methods) refer to the copies; hooks are kept as they are.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> other = clone(model)
    >>> other[0] is model[0], other[0].weight is model[0].weight
    (False, True)
    """
    return _clone(model, absent, replaced, without_tensors)[0]


def clone_with_originals(model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """Return a clone of a model, and for the id of each object that was copied, or of its attributes, the original.

    >>> model = nn.Sequential(nn.ReLU())
    >>> model.log = [3]
    >>> other, originals = clone_with_originals(model)
    >>> other.log is model.log, originals[id(other.log)] is model.log, originals[id(vars(other))] is vars(model)
    (False, True, True)
    """
    copied, memo = _clone(model)
    originals: dict[int, Any] = {}
    empty = [value for module in model.modules() for value in vars(module).values() if id(value) in memo]
    for original in (*memo.get(id(memo), ()), *empty):  # deepcopy keeps the originals there
        made = memo.get(id(original))
        if made is not None and made is not original:
            originals[id(made)] = original
            if hasattr(made, "__dict__") and not isinstance(made, type):
                originals[id(vars(made))] = vars(original)
    return copied, originals


def _clone(
    model: nn.Module,
    absent: Collection[nn.Module] = (),
    replaced: Mapping[int, torch.Tensor] | None = None,
    without_tensors: Mapping[nn.Module, str] | None = None,
) -> tuple[nn.Module, dict[int, Any]]:
    without_tensors = without_tensors or {}
    left_out = {id(module) for module in absent}
    memo: dict[int, Any] = dict.fromkeys(left_out - {id(module) for module in without_tensors})
    kept = [module for module in model.modules() if id(module) not in left_out]
    for module in (*kept, *without_tensors):
        for shared in _shared_values(module):
            memo[id(shared)] = (replaced or {}).get(id(shared), shared)
        for value in vars(module).values():
            if type(value) in (collections.OrderedDict, dict, set) and not value:
                memo[id(value)] = type(value)()  # most modules have a dozen of these; deepcopy is slow at each
    copied, memo = _deepcopy(model, [*kept, *without_tensors], memo)
    for module in kept:
        for name, child in children_of(module).items():
            if id(child) in left_out:
                children_of(memo[id(module)]).pop(name, None)
    for module, path in without_tensors.items():
        _empty(memo[id(module)], path)
    return copied, memo


def _shared_values(module: nn.Module) -> Iterator[Any]:
    """Yield the values that copy and original share: tensors, and callables that are not the module's own."""
    tensors = (*parameters_of(module).values(), *buffers_of(module).values())
    yield from (tensor for tensor in tensors if tensor is not None)
    for name, value in vars(module).items():
        if name in HOOK_DICTS:
            yield from (hook for hook in value.values() if not _belongs_to_a_module(hook))


def _belongs_to_a_module(hook: Callable[..., Any]) -> bool:
    """Return True for a method of a module, also wrapped by torch: it follows the module into its copy."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    if is_wrapped_hook(hook):
        return True
    return isinstance(hook, types.MethodType) and isinstance(hook.__self__, nn.Module)


def _deepcopy(model: nn.Module, modules: list[nn.Module], memo: dict[int, Any]) -> tuple[nn.Module, dict[int, Any]]:
    """Return a deepcopy and its memo; attributes that cannot be copied (locks, process groups) are shared."""
    attempt = dict(memo)
    try:
        with tensors_not_copied():
            return copy.deepcopy(model, attempt), attempt
    except Exception:
        for module in modules:
            for name, value in vars(module).items():
                if name not in STATE_DICTS and not _can_be_copied(value, memo):
                    memo[id(value)] = value
        with tensors_not_copied():
            return copy.deepcopy(model, memo), memo


def _can_be_copied(value: object, memo: dict[int, Any]) -> bool:
    try:
        with tensors_not_copied():
            copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _empty(module: nn.Module, path: str) -> None:
    """Take the tensors from a module that others read plain attributes of; reading a tensor raises.

    >>> import torch
    >>> linear = nn.Linear(2, 3)
    >>> _empty(linear, "head")
    >>> linear.out_features
    3
    >>> linear.weight
    Traceback (most recent call last):
    pipecut.errors.AbsentTensorError: head.weight is asked for in a stage that does not hold 'head', by a \
module that refers to it without having registered it: cut so that both are in one stage, or pass the tensor as an \
argument
    """
    names = {*parameters_of(module), *buffers_of(module)}
    parameters_of(module).clear()
    buffers_of(module).clear()
    base: Any = type(module)

    def __getattr__(self: nn.Module, name: str) -> Any:  # noqa: N807
        if name in names:
            raise AbsentTensorError(
                f"{path}.{name} is asked for in a stage that does not hold {path!r}, by a module that refers to it "
                "without having registered it: cut so that both are in one stage, or pass the tensor as an argument"
            )
        return base.__getattr__(self, name)

    module.__class__ = quiet_subclass(base, {"__getattr__": __getattr__})


def stand_in_for_meta(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    mode: FakeTensorMode | None = None,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, ...]:
    """Replace parameters and buffers on the meta device by fake tensors of the CPU; return those of the inputs.

    On the meta device a tensor that the forward makes from Python values would lose them, and mix with no other device.
    """
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for tensors in (parameters_of(module), buffers_of(module)):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = made.setdefault(id(tensor), _stand_in(tensor, device))  # type: ignore[assignment]
        return tuple(_stand_in(tensor, device) for tensor in inputs)


def _stand_in(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def quiet_subclass(cls: type[nn.Module], members: dict[str, Any], *bases: type) -> type[nn.Module]:
    """Make a subclass with the name of `cls` and other members; the __init_subclass__ of `cls` does not run."""
    name = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    skip = () if issubclass(cls, _SkipInitSubclass) else (_SkipInitSubclass,)
    return type(cls.__name__, (*skip, *bases, cls), {**name, **members})


class _SkipInitSubclass:
    """Base class that goes first, so that the __init_subclass__ of the user's class does not run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass
