"""Containers of which a stage holds some members, under the indices that they have in the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class _Sparse:
    """Indexing by the index in the whole model; length and iteration over what is here."""

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        return members

    def __getitem__(self, index: int | slice) -> Any:
        members = self._members()
        if isinstance(index, slice):
            highest = max(map(int, members), default=-1)
            wanted = range(*index.indices(highest + 1))
            return [members[str(key)] for key in wanted if str(key) in members]
        if str(index) not in members:
            raise IndexError(f"member {index} is not in this stage; those here: {', '.join(members) or 'none'}")
        return members[str(index)]

    def __len__(self) -> int:
        return len(self._members())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members().values())

    def __repr__(self) -> str:
        # ModuleList folds equal members under their positions, which are not their indices here.
        return nn.Module.__repr__(self)  # type: ignore[arg-type]


class SparseModuleList(_Sparse, nn.ModuleList):
    """A ModuleList with gaps."""


class SparseSequential(_Sparse, nn.Sequential):
    """A Sequential with gaps."""


class SparseParameterList(_Sparse, nn.ParameterList):
    """A ParameterList with gaps."""

    def _members(self) -> dict[str, Any]:
        return dict(self._parameters)


_SPARSE = {nn.ModuleList: SparseModuleList, nn.Sequential: SparseSequential, nn.ParameterList: SparseParameterList}

for _whole, _sparse in _SPARSE.items():
    _sparse.__name__ = _whole.__name__  # in `print(stage)` they read as what they are in the model


def allow_gaps(module: nn.Module) -> None:
    """Make a container work with some of its members gone; any other module is left as it is."""
    module.__class__ = _SPARSE.get(type(module), type(module))
    if isinstance(module, nn.ParameterDict):
        module._keys = {key: None for key in module._keys if key in module._parameters}
