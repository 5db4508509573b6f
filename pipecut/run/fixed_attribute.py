"""An attribute of a schedule that is settled when it is made: it can be read, and set to what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import PipeError


class _FixedAttributeError(PipeError, AttributeError):
    """Another value for what is settled. It is an AttributeError too, as for any attribute that cannot be set."""


class FixedAttribute:
    """What `read` makes of a schedule; `instead` says what to do for another value.

    What is set before the schedule is made is forgotten, for its making sets it anew.

    >>> class Clock:
    ...     hours = 12
    ...     _hours = FixedAttribute(lambda clock: clock.hours, "make another clock")
    >>> clock = Clock()
    >>> clock._hours = 12
    >>> clock._hours = 24
    Traceback (most recent call last):
    pipecut.run.fixed_attribute.FixedAttributeError: Clock._hours is 12 and cannot be set to 24: make another \
clock
    """

    def __init__(self, read: Callable[[Any], Any], instead: str) -> None:
        self.read = read
        self.instead = instead
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, made: Any, owner: type | None = None) -> Any:
        return self if made is None else self.read(made)

    def __set__(self, made: Any, value: Any) -> None:
        try:
            current = self.read(made)
        except AttributeError:
            return  # it is not made yet
        if value is not current and value != current:
            raise _FixedAttributeError(
                f"{type(made).__name__}.{self.name} is {current!r} and cannot be set to {value!r}: {self.instead}"
            )
