"""What is in the parcel from one stage to another: known from the trace, or learnt from the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ...pipe_ir.ambient import ambient_autocast
from ...pipe_ir.pipe import PipeInfo
from ...pipe_ir.spec import TensorSpec
from ...stage.on_mesh import placing_of
from ...stage.ports import Item
from .description import Ends, receive_description, send_description
from .transport import Meta, Transport


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
        if got.on_mesh is not None:
            return (
                "stages of a traced model send plain tensors only: end this one with use_local_output=True or "
                "to_local(), and begin the next one with PrepareModuleInput or DTensor.from_local()"
            )
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
        if placing_of(got.on_mesh) != placing_of(expected.on_mesh):
            return (
                f"what stage {source} returns must lie alike in all microbatches of these shapes: redistribute() it "
                "there, and return either DTensors or plain tensors"
            )
        if got.dtype != expected.dtype:
            return (
                f"check what the module of stage {source} returns; torch.autocast has to be the same on all ranks, and "
                "after a change of a module's dtype the schedule has to be made again"
            )
        if got.whole_shape != expected.whole_shape:
            return f"check what the module of stage {source} returns"
        return (
            "it needs a gradient now, and did not when a microbatch of these shapes was first run; make the schedule "
            "again after unfreezing parameters"
        )

    def learn(self, kind: Kind, transport: Transport, peer: int) -> None:
        """Receive the description that goes before a parcel that is not known."""
        if kind not in self._known:
            self._known[kind] = receive_description(transport, peer)

    def tell(self, kind: Kind, transport: Transport, peer: int, parcel: Sequence[Tensor]) -> None:
        """Send a description before a parcel that is not known, unless it goes to a stage of this rank."""
        if kind in self._known:
            return
        metas = self._known[kind] = tuple(Meta.of(tensor) for tensor in parcel)
        if peer != transport.rank:
            send_description(transport, peer, kind.ends, metas, parcel[0].device if parcel else None)


Parcels = TracedParcels | LearntParcels
