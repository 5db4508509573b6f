"""How many hooks anybody has put anywhere, besides our own: a number that tells at once whether nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch.utils.hooks import RemovableHandle

Hook: TypeAlias = Callable[..., Any]

_own = 0


def put_hook(register: Callable[[Hook], RemovableHandle], hook: Hook) -> RemovableHandle:
    """Register a hook of ours, which does not count."""
    global _own
    before = RemovableHandle.next_id
    handle = register(hook)
    _own += RemovableHandle.next_id - before
    return handle


def is_alone(handle: RemovableHandle) -> bool:
    """Whether a hook is the only one of its kind at its place."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and len(hooks) == 1


def hooks_of_others() -> int:
    """The number of hooks that others have put on tensors, modules and operations since the process began.

    >>> import torch
    >>> before = hooks_of_others()
    >>> handle = torch.nn.Linear(1, 1).weight.register_hook(print)
    >>> hooks_of_others() - before
    1
    """
    return RemovableHandle.next_id - _own
