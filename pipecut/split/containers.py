"""ModuleList and Sequential of which a stage holds some members, under the indices that they have in the model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class _Sparse:
    """Indexing by the index in the whole model; length and iteration over what is here."""

    _modules: dict[str, nn.Module]

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            highest = max(map(int, self._modules), default=-1)
            wanted = range(*index.indices(highest + 1))
            return nn.ModuleList(self._modules[str(key)] for key in wanted if str(key) in self._modules)
        if str(index) not in self._modules:
            here = ", ".join(self._modules) or "none"
            raise IndexError(f"member {index} is not in this stage; those here: {here}")
        return self._modules[str(index)]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __repr__(self) -> str:
        # ModuleList folds equal members under their positions, which are not their indices here.
        return nn.Module.__repr__(self)  # type: ignore[arg-type]


class SparseModuleList(_Sparse, nn.ModuleList):  # type: ignore[misc]
    """A ModuleList with gaps."""


class SparseSequential(_Sparse, nn.Sequential):  # type: ignore[misc]
    """A Sequential with gaps."""


for _cls, _name in ((SparseModuleList, "ModuleList"), (SparseSequential, "Sequential")):
    _cls.__name__ = _name  # in `print(stage)` they read as what they are in the model


def sparse_class(module: nn.Module) -> type[nn.Module]:
    """The class that a container needs once members are missing; any other module keeps its own."""
    if type(module) is nn.ModuleList:
        return SparseModuleList
    return SparseSequential if type(module) is nn.Sequential else type(module)
