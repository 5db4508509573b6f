"""The part of a microbatch's backward that is still to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ...errors import InputError


class Waiting(Protocol):
    """One of the things that wait for `weight_backward`; the gradient that it begins with may be exchanged."""

    gradient: Tensor | None


class PendingWeights:
    """What `input_backward` left for `weight_backward`; it can be used once."""

    __slots__ = ("_finish", "_waiting")

    def __init__(self, finish: Callable[[], None], waiting: Callable[[], Sequence[Waiting]] | None = None) -> None:
        self._finish: Callable[[], None] | None = finish
        self._waiting = waiting

    def waiting(self) -> Sequence[Waiting]:
        """What waits, as far as it can be told apart."""
        return () if self._waiting is None else self._waiting()

    @property
    def done(self) -> bool:
        """Whether it was used."""
        return self._finish is None

    def take(self) -> Callable[[], None]:
        """The work to do; all that it needs is released with it."""
        finish, self._finish = self._finish, None
        self._waiting = None
        if finish is None:
            raise InputError(
                "the weight gradients of this microbatch were added already: "
                "weight_backward() takes what an input_backward() returned once, and then lets go of it"
            )
        return finish


def nothing() -> None:
    """The rest of a backward that has none."""
