"""What is in the parcel from one stage to another: known from the trace, or learnt from the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import PipeError
from ...pipe_ir.ambient import ambient_autocast
from ...pipe_ir.pipe import PipeInfo
from ...pipe_ir.spec import TensorSpec
from ...stage.ports import Item
from .transport import Meta, Transport

Ends = tuple[int, int]  # source stage, target stage
LENGTH = 256  # numbers that describe a parcel whose contents are not known yet
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
DESCRIPTION = (Meta((LENGTH,), torch.int64, False),)


class Kind(NamedTuple):
    """What parcels have in common that have the same contents, but for the values."""

    ends: Ends
    sizes: tuple[int, ...]  # of the microbatch: its symbolic dims, or a number that stands for all shapes
    training: bool


class TracedParcels:
    """Parcels of a traced model: their shapes follow from the symbolic dims of a microbatch."""

    def __init__(self, info: PipeInfo, items: Mapping[Ends, Sequence[Item]]) -> None:
        self.symbols = sorted(str(symbol) for symbol in info.call.dims)
        self.items = items
        self.autocast = info.call.autocast
        self._bound: dict[tuple[Ends, tuple[int, ...]], tuple[Meta, ...]] = {}

    def metas(self, kind: Kind) -> tuple[Meta, ...]:
        """What is in a parcel."""
        key = (kind.ends, kind.sizes)
        if key not in self._bound:
            by_name = dict(zip(self.symbols, kind.sizes, strict=True))
            self._bound[key] = tuple(_meta(item.spec.bind(by_name)) for item in self.items.get(kind.ends, ()))
        return self._bound[key]

    def names(self, ends: Ends) -> list[str]:
        """The names of the values in a parcel."""
        return [item.name for item in self.items[ends]]

    def remedy(self, source: int, got: Meta, expected: Meta) -> str:
        """What to do about a value that is not as in the trace."""
        now = ambient_autocast()
        if got.dtype != expected.dtype and now != self.autocast:
            is_, was = (f"on ({state})" if state else "off" for state in (now, self.autocast))
            return (
                f"torch.autocast is {is_} here, and was {was} when the model was traced: call pipeline() and the "
                "schedule under the same torch.autocast"
            )
        if got[:2] != expected[:2]:
            return f"check what the module of stage {source} returns"
        return (
            "it needs a gradient now, and did not when the model was traced; call pipeline() again after unfreezing "
            "parameters"
        )

    def learn(self, kind: Kind, transport: Transport, peer: int) -> None:
        """Nothing: all is known."""

    def tell(self, kind: Kind, transport: Transport, peer: int, parcel: Sequence[Tensor]) -> None:
        """Nothing: all is known."""


def _meta(spec: TensorSpec) -> Meta:
    return Meta(tuple(int(size) for size in spec.shape), spec.dtype, spec.requires_grad)


class LearntParcels:
    """Parcels of modules that were cut by hand: the first one of its kind goes with a description."""

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[Meta, ...]] = {}

    def metas(self, kind: Kind) -> tuple[Meta, ...] | None:
        """What is in a parcel, if one like it has been seen."""
        return self._known.get(kind)

    def names(self, ends: Ends) -> list[str]:
        """The values have no names: what stage 2 returns is output 0, output 1..."""
        known = [metas for kind, metas in self._known.items() if kind.ends == ends]
        return [f"output {place}" for place in range(max(map(len, known), default=0))]

    def remedy(self, source: int, got: Meta, expected: Meta) -> str:
        """What to do about a value that is not as it was in the first microbatch of its kind."""
        if got.dtype != expected.dtype:
            return (
                f"check what the module of stage {source} returns; torch.autocast has to be the same on all ranks, and "
                "after a change of a module's dtype the schedule has to be made again"
            )
        if got.shape != expected.shape:
            return f"check what the module of stage {source} returns"
        return (
            "it needs a gradient now, and did not when a microbatch of these shapes was first run; make the schedule "
            "again after unfreezing parameters"
        )

    def learn(self, kind: Kind, transport: Transport, peer: int) -> None:
        """Receive the description that goes before a parcel that is not known."""
        if kind not in self._known:
            (numbers,) = transport.receive(peer, DESCRIPTION).wait()
            self._known[kind] = _read(numbers.tolist())

    def tell(self, kind: Kind, transport: Transport, peer: int, parcel: Sequence[Tensor]) -> None:
        """Send a description before a parcel that is not known, unless it goes to a stage of this rank."""
        if kind in self._known:
            return
        metas = self._known[kind] = tuple(Meta.of(tensor) for tensor in parcel)
        if peer != transport.rank:
            device = parcel[0].device if parcel else None
            transport.send(peer, [torch.tensor(_written(kind.ends, metas), dtype=torch.int64, device=device)])


def _written(ends: Ends, metas: Sequence[Meta]) -> list[int]:
    numbers = [len(metas)]
    for place, meta in enumerate(metas):
        if meta.dtype not in DTYPES:
            raise PipeError(
                f"output {place} of stage {ends[0]} is {meta.dtype}, which cannot be sent to stage {ends[1]}"
            )
        numbers += [DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
    if len(numbers) > LENGTH:
        raise PipeError(
            f"stage {ends[0]} returns {len(metas)} tensors, too many to describe; return fewer, or larger, ones"
        )
    return numbers + [0] * (LENGTH - len(numbers))


def _read(numbers: list[int]) -> tuple[Meta, ...]:
    metas, place = [], 1
    for _ in range(numbers[0]):
        dtype, requires_grad, dims = numbers[place : place + 3]
        place += 3
        metas.append(Meta(tuple(numbers[place : place + dims]), DTYPES[dtype], bool(requires_grad)))
        place += dims
    return tuple(metas)


Parcels = TracedParcels | LearntParcels
