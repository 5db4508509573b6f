"""What a checkpoint is to a stage: names, their shapes and dtypes, and a way to read some of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """What a checkpoint says of one tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_name(self.dtype)}{list(self.shape)}"


class Checkpoint(Protocol):
    """Saved tensors by name. Nothing is read before it is asked for."""

    @property
    def where(self) -> str:
        """The place, for messages."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors and objects."""

    def entry(self, name: str) -> Entry | None:
        """Shape and dtype of a tensor; None for an object that is no tensor."""

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Write the values of some tensors into others of their shapes, converted to their dtypes and devices."""

    def load_object(self, name: str) -> Any:
        """What is saved under a name, as it is."""


class InMemory:
    """A state dict."""

    def __init__(self, values: Mapping[str, Any], where: str = "this state dict") -> None:
        self.where = where
        self.values = values

    @property
    def names(self) -> Collection[str]:
        return self.values.keys()

    def entry(self, name: str) -> Entry | None:
        value = self.values[name]
        return Entry(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None

    def read(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            if self.values[name].device.type == "meta":
                raise CheckpointError(f"{name} is on the meta device in {self.where}: it has no values to read")
            target.copy_(self.values[name])

    def load_object(self, name: str) -> Any:
        return self.values[name]


def short_name(dtype: torch.dtype) -> str:
    """As users write it, without `torch.`.

    >>> short_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
