"""Modules that others refer to in a list or an object, without having registered them, across a cut too."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import SplitError
from ..pipe_ir.clone import HOOK_DICTS
from ..pipe_ir.objects import is_plain_object

References = Mapping[nn.Module, Mapping[nn.Module, str]]  # which modules a module refers to, and by which attribute

_OTHERWISE_KNOWN = frozenset(("_modules", "_parameters", "_buffers", *HOOK_DICTS))
_WAYS_TO_COPY = ("__deepcopy__", "__reduce__", "__reduce_ex__")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Tensor)


def plain_references(model: nn.Module) -> dict[nn.Module, dict[nn.Module, str]]:
    """The modules of a model that others of its modules refer to.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> model[1].first = [model[0]]
    >>> plain_references(model) == {model[1]: {model[0]: "first"}}
    True
    """
    own = set(model.modules())
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    for module in own:
        for name, value in vars(module).items():
            if name in _OTHERWISE_KNOWN or type(value) in _ATOMS:
                continue
            for other in _modules_in(value):
                if other in own and other is not module:
                    found.setdefault(module, {}).setdefault(other, name)
    return found


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules that a copy of a value would copy with it."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, nn.Module):
            yield item
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            waiting += _inside(item)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.SimpleNamespace) or (is_plain_object(value) and not _has_own_way(type(value))):
        return list(vars(value).values())
    return ()


def _has_own_way(cls: type) -> bool:
    """Whether a class says itself how it is copied, as that of loggers, which lead to all other loggers."""
    return any(name in vars(base) for base in cls.__mro__[:-1] for name in _WAYS_TO_COPY)


def referred_to(model: nn.Module, present: Iterable[nn.Module], references: References) -> dict[nn.Module, str]:
    """The modules that those of a stage refer to and that it does not hold, and all inside of these, with paths."""
    held = set(present)
    found: set[nn.Module] = set()
    waiting = list(held) if references else []
    while waiting:
        for other in references.get(waiting.pop(), ()):
            new = {module for module in other.modules() if module not in held and module not in found}
            found |= new
            waiting += new
    return {module: path for path, module in model.named_modules() if module in found} if found else {}


def refuse_changing(
    model: nn.Module,
    stage: int,
    present: Iterable[nn.Module],
    references: References,
    assigned_attributes: Mapping[str, tuple[str, ...]],
) -> None:
    """A stage has a copy of what its modules refer to: it would not see what the forward sets in another stage."""
    held = set(present)
    paths = {module: path for path, module in model.named_modules()}
    for module in held & references.keys():
        for other, attribute in references[module].items():
            for inside in other.modules():
                changed = assigned_attributes.get(paths[inside], ())
                if inside not in held and changed:
                    raise SplitError(
                        f"{paths[module]!r}, in stage {stage}, refers to {paths[other]!r} by its attribute "
                        f"{attribute!r}; that is in another stage, and the forward of the model sets "
                        f"{', '.join(f'{paths[inside]}.{name}' for name in changed)}, which stage {stage} would not "
                        "see: cut so that both are in one stage, or hand the value over as a tensor, in arguments and "
                        "results"
                    )
