"""Recognise the wrappers in a stage's module, by the table of all that a pipeline can steer."""

from __future__ import annotations

import sys

from torch import nn

from ...errors import InputError
from ...torch_internals import wrapped_attribute
from .base import NotReplicated, Replica, Wrapper, WrapperClass
from .ddp import COPIES
from .fsdp import SHARDS

# A new wrapper is a file with its Replica, and an entry here.
_WRAPPERS = (COPIES, SHARDS)

# Wrappers that would average some gradients and not others, since the last backward cannot be marked for them, and
# what to use instead.
_UNSUPPORTED = (
    (
        WrapperClass("torch.distributed.fsdp", "FullyShardedDataParallel", "FullyShardedDataParallel (FSDP1)"),
        "fully_shard",
    ),
)


def replica_of(module: nn.Module) -> Replica:
    """Return the replica of a stage's module, wrapped as a whole or in parts.

    >>> replica_of(nn.Linear(2, 2)).is_reduced
    False
    """
    _check_supported(module)
    found = []
    for wrapper in _WRAPPERS:
        parts = _parts_under(wrapper, module)
        if parts:
            found.append((wrapper, parts))
    if not found:
        return NotReplicated()
    if len(found) > 1:
        names = [next(iter(parts.values())) for _, parts in found]
        raise InputError(f"a stage holds both {' and '.join(names)} modules: use one of the two for all its parts")
    ((wrapper, parts),) = found
    return wrapper.replica(module, list(parts))


def wrapped_parts(module: nn.Module) -> frozenset[int]:
    """Return the ids of the parts of a module that are copied or sharded."""
    return frozenset(id(part) for wrapper in _WRAPPERS for part in _parts_under(wrapper, module))


class UnwrappedNames:
    """Names that the tensors of a module have without torch's wrappers, wherever in the module these are.

    >>> import torch
    >>> layers = nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1)))
    >>> names = UnwrappedNames(layers)
    >>> [names.of(name) for name, _ in layers.named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths: dict[str, str] = {}  # of modules inside wrappers, without these
        inside: dict[str, str] = {}  # the paths of what wrappers hold, and where the wrappers are
        for path, part in module.named_modules(remove_duplicate=False):
            attribute = wrapped_attribute(part)
            if attribute is not None:
                inside[f"{path}.{attribute}".lstrip(".")] = path
            parent, _, name = path.rpartition(".")
            if path in inside:
                self._paths[path] = self._paths.get(inside[path], inside[path])
            elif parent in self._paths:
                self._paths[path] = f"{self._paths[parent]}.{name}".lstrip(".")

    def of(self, name: str) -> str:
        """Return a parameter's or a buffer's name, or a key of the module's state_dict, without wrappers."""
        path, rest = name, ""
        while self._paths and path:
            path, _, last = path.rpartition(".")
            rest = f"{last}.{rest}".rstrip(".")
            if path in self._paths:
                return f"{self._paths[path]}.{rest}".lstrip(".")
        return name


def _check_supported(module: nn.Module) -> None:
    for known, instead in _UNSUPPORTED:
        kind = _imported(known)
        for path, part in module.named_modules():
            if kind is not None and isinstance(part, kind):
                where = f"'{path}' of a stage" if path else "a stage"
                raise InputError(
                    f"{where} is under {known.called}, which a pipeline cannot steer: use {instead} instead"
                )


def _parts_under(wrapper: Wrapper, module: nn.Module) -> dict[nn.Module, str]:
    """Return the parts of a module that are wrapped in this way, each with the name of its wrapper."""
    found: dict[nn.Module, str] = {}
    kinds = [(kind, known.called) for known in wrapper.classes if (kind := _imported(known)) is not None]
    for part in module.modules() if kinds else ():
        for kind, called in kinds:
            if isinstance(part, kind):
                found.setdefault(part, called)
    return found


def _imported(known: WrapperClass) -> type | None:
    """Return the class, which may be slow to import; None while nobody has imported it."""
    return getattr(sys.modules.get(known.module), known.name, None)
