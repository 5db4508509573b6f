"""Methods of torch.distributed.pipelining that nothing here calls are refused where a user's class defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InputError

_PACKAGE = __name__.partition(".")[0]


def refuse_overrides(made: Any, not_called: Mapping[str, str]) -> None:
    """Raise if the class of an object, or the object itself, has a method of its own that would never be called.

    `not_called` has the names of such methods, and what to do instead. A method that a base class demands is allowed.

    >>> class Mine:
    ...     def choke(self) -> None: ...
    >>> Mine.__module__ = "mine"
    >>> refuse_overrides(Mine(), {"choke": "it starts by itself"})
    Traceback (most recent call last):
    pipecut.errors.InputError: Mine defines choke(), and steps are run by one executor here, which never calls it: it \
starts by itself
    """
    for name, instead in not_called.items():
        if name in getattr(made, "__dict__", {}) or _is_users(type(made), name):
            raise InputError(
                f"{type(made).__name__} defines {name}(), and steps are run by one executor here, which never calls "
                f"it: {instead}"
            )


def _is_users(cls: type, name: str) -> bool:
    """Whether the method that an object of the class has is not from this package."""
    definer = next((base for base in cls.__mro__ if name in vars(base)), None)
    if definer is None or definer.__module__.partition(".")[0] == _PACKAGE:
        return False
    return not any(name in getattr(base, "__abstractmethods__", ()) for base in cls.__mro__)
