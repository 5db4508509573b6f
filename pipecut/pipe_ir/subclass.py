"""Subclasses made at run time, without telling the user's class about them."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Quiet:
    """Comes first among the bases, so that the __init_subclass__ of the user's class does not run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def quiet_subclass(cls: type[nn.Module], members: dict[str, Any], *bases: type) -> type[nn.Module]:
    """A class that reads as `cls`, is one, and has other members."""
    name = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    quiet = () if issubclass(cls, _Quiet) else (_Quiet,)
    return type(cls.__name__, (*quiet, *bases, cls), {**name, **members})
