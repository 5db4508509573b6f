"""Containers of which a stage holds some members, under the indices that they have in the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..pipe_ir.subclass import quiet_subclass


class _WithGaps:
    """Indexing by the index in the whole model; length and iteration over what is here."""

    _pipecut_length: int

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        return members

    def __getitem__(self, index: int | slice) -> Any:
        members = self._members()
        if isinstance(index, slice):
            return [members[str(key)] for key in range(self._pipecut_length)[index] if str(key) in members]
        return members[self._key(index)]

    def __setitem__(self, index: int, member: Any) -> None:
        """Put something else in the place of a member: itself with a wrapper around it, for instance."""
        setattr(self, self._key(index), member)

    def _key(self, index: int) -> str:
        members = self._members()
        key = str(index + self._pipecut_length if index < 0 else index)
        if key not in members:
            raise IndexError(f"member {index} is not in this stage; those here: {', '.join(members) or 'none'}")
        return key

    def __len__(self) -> int:
        return len(self._members())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members().values())

    def __repr__(self) -> str:
        # ModuleList folds equal members under their positions, which are not their indices here.
        return nn.Module.__repr__(self)  # type: ignore[arg-type]


class _ParametersWithGaps(_WithGaps):
    def _members(self) -> dict[str, Any]:
        return dict(self._parameters)  # type: ignore[attr-defined]


_MIXINS: dict[type[nn.Module], type] = {
    nn.ModuleList: _WithGaps,
    nn.Sequential: _WithGaps,
    nn.ParameterList: _ParametersWithGaps,
}


def allow_gaps(module: nn.Module, original: nn.Module) -> None:
    """Make a container work with some of its members gone; any other module is left as it is."""
    for cls, mixin in _MIXINS.items():
        numbered = isinstance(original, cls) and all(
            name.isdigit() for name in (*original._modules, *original._parameters)
        )
        if numbered:
            module.__class__ = quiet_subclass(type(module), {}, mixin)
            vars(module)["_pipecut_length"] = len(original._modules) + len(original._parameters)
    if isinstance(module, nn.ParameterDict):
        module._keys = {key: None for key in module._keys if key in module._parameters}
