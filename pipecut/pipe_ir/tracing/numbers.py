"""Numbers of the tensors of a run, in the order in which they appear."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...torch_internals import FakeTensor, storage_id, unwrapped

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass
class Numbers:
    """Numbers of the tensors of one run, or of several in a row: what one leaves behind, the next may use.

    The tensors are kept alive, as their identities count.
    """

    count: int = 0
    known: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)  # the first of each number
    met: set[int] = field(default_factory=set)  # numbers of tensors from elsewhere
    unseen: int = 0  # tensors that came about unseen, in the memory of others
    constants: dict[int, Tensor] = field(default_factory=dict)
    _storages: dict[Any, int] = field(default_factory=dict)
    _last_made: dict[int, int] = field(default_factory=dict)  # in each storage
    _alive: list[Tensor] = field(default_factory=list)

    def of(self, tensor: Tensor) -> int:
        """Return the number of a tensor; one that is met for the first time comes from elsewhere.

        If it lies in the memory of one that is known, it is that one: torch.vmap wraps and unwraps tensors unseen.
        """
        number = self.known.get(id(tensor))
        if number is None:
            number = self._last_made.get(self.storage(tensor))
            if number is None:
                number = self._next(tensor)
                self.met.add(number)
                if not isinstance(unwrapped(tensor), FakeTensor):
                    self.constants[number] = tensor
            else:
                self.known[id(tensor)] = number
                self._alive.append(tensor)
                self.unseen += 1
        return number

    def new(self, tensor: Tensor) -> int:
        """Return the number of a tensor that the run itself has made."""
        number = self.known.get(id(tensor))
        if number is None:
            number = self._next(tensor)
            self._last_made[self.storage(tensor)] = number
        self.constants.pop(number, None)
        self.met.discard(number)
        return number

    def storage(self, tensor: Tensor) -> int:
        """Return the number of the memory that a tensor is in; a negative one if it has none to speak of."""
        try:
            memory = storage_id(unwrapped(tensor))
        except (NotImplementedError, RuntimeError):  # sparse tensors and the like
            return -1 - id(tensor)
        return self._storages.setdefault(memory, len(self._storages))

    def share(self, one: Tensor, other: Tensor) -> None:
        """Treat the memory of one tensor as that of another."""
        with contextlib.suppress(NotImplementedError, RuntimeError):  # as above
            self._storages[storage_id(unwrapped(one))] = self.storage(other)

    @property
    def storages(self) -> int:
        """The number that the next memory gets."""
        return len(self._storages)

    def is_before(self, memory: int, storages: int) -> bool:
        """Return True if a memory was known when there were so many of them."""
        return self._storages.get(memory, storages) < storages

    def new_storage(self) -> int:
        """Return the number of a memory that no tensor is in."""
        return self._storages.setdefault(object(), len(self._storages))

    def adopt(self, tensor: Tensor, number: int, memory: int) -> None:
        """Give a tensor that the run itself has made a number, and its memory another."""
        self._keep(tensor, number)
        self._storages[storage_id(tensor)] = memory
        self._last_made[memory] = number

    def _next(self, tensor: Tensor) -> int:
        number, self.count = self.count, self.count + 1
        self._keep(tensor, number)
        return number

    def _keep(self, tensor: Tensor, number: int) -> None:
        self.known[id(tensor)] = number
        self.tensors[number] = tensor
