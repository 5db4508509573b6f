"""Dicts in which nn.Module keeps parameters, buffers, children and hooks.

The public iterators (`named_buffers` and others) skip entries that are None, and cannot replace or remove an entry;
hooks cannot be listed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNorm = _BatchNorm  # the base of all batch norms, the lazy and the synchronised ones too

# Attributes of a module in which it keeps its parameters, buffers and children.
STATE_DICTS = ("_parameters", "_buffers", "_modules")

# Attributes of a module in which it keeps the hooks of the user.
HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# The last part of the state_dict key under which `get_extra_state` is saved.
EXTRA_STATE = "_extra_state"


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that a module itself has registered, by name; changes reach the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that a module itself has registered, by name; changes reach the module."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that a module itself has registered, by name; changes reach the module."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that are not in its state_dict; changes reach the module."""
    return module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return a module's hooks before and after its forward, by number; changes reach the module."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return a module's hooks before and after its backward, by number; changes reach the module."""
    return module._backward_pre_hooks, module._backward_hooks


def is_wrapped_hook(hook: object) -> bool:
    """Return True for torch's wrapper around a hook that takes the module, as state_dict hooks have it."""
    return type(hook).__name__ == "_WrappedHook"


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module was compiled, by `torch.compile(module)` or in place by `module.compile()`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def trainable_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that require a gradient, each once.

    A walk by hand, for it happens in every step: `module.parameters()` takes several calls per part.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.bias.requires_grad_(False)
    >>> [parameter is layer.weight for parameter in trainable_parameters(nn.Sequential(layer, layer))]
    [True]
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
        stack += part._modules.values()
    return list(found.values())


def part_types(module: nn.Module) -> dict[int, type]:
    """Return the type of each part of a module by its id: wrapping a part changes one or the other.

    A walk by hand, for it happens in every step.
    """
    types: dict[int, type] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is not None and id(part) not in types:
            types[id(part)] = type(part)
            stack += part._modules.values()
    return types
