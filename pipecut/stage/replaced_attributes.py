"""Attributes of torch.distributed.pipelining's stages and schedules that have no meaning here, and what has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import PipeError


class ReplacedAttributeError(PipeError, AttributeError):
    """An attribute that pipecut replaces by something else. It is an AttributeError too, so that hasattr() is False."""


class ReplacedAttributes:
    """A class whose `_replaced` says, by the name of an attribute that it does not have, what to use instead.

    >>> class Engine(ReplacedAttributes):
    ...     _replaced = {"choke": "it starts by itself"}
    >>> hasattr(Engine(), "choke")
    False
    >>> Engine().choke
    Traceback (most recent call last):
    pipecut.stage.replaced_attributes.ReplacedAttributeError: Engine.choke is not part of pipecut: it starts by itself
    """

    _replaced: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker would take every attribute for one of these

        def __getattr__(self, name: str) -> Any:
            instead = type(self)._replaced.get(name)
            if instead is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise ReplacedAttributeError(f"{type(self).__name__}.{name} is not part of pipecut: {instead}")
