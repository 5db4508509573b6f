"""A module's own attributes, and whether a forward has changed them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, apart from what nn.Module keeps for it; containers as they are now."""
    own = {name: value for name, value in vars(module).items() if name not in _MACHINERY}
    return {name: copy.copy(value) if isinstance(value, list | dict | set) else value for name, value in own.items()}


_MACHINERY = frozenset(vars(nn.Module()))


def is_same(before: Any, after: Any) -> bool:
    """Whether an attribute is what it was: the same object, or an equal plain value."""
    if isinstance(before, list | tuple) and type(before) is type(after):
        return len(before) == len(after) and all(map(is_same, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(is_same(before[key], after[key]) for key in before)
    return before is after or (isinstance(before, _COMPARABLE) and type(before) is type(after) and before == after)


_COMPARABLE = (bool, int, float, str, bytes, set)
