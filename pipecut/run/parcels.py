"""Contents of the parcels between stages: known from the trace, or learnt from the first one of its kind."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PipeError
from ..pipe_ir import PipeInfo, TensorSpec, active_autocast
from ..stage import Item, MeshLayout, PipelineStage, placement_of
from .transport import Arrival, Meta, Transport

Ends = tuple[int, int]  # source stage, target stage
_LENGTH = 256  # numbers of the first message, which has all of most descriptions; a second one has the rest
_WORD = 8  # bytes of a number
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def send_description(
    transport: Transport, peer: int, ends: Ends, metas: Sequence[Meta], device: torch.device | None
) -> None:
    """Tell another rank what will be in a parcel."""
    numbers = _written(ends, metas)
    numbers = [len(numbers), *numbers]
    numbers += [0] * (_LENGTH - len(numbers))
    for message in (numbers[:_LENGTH], numbers[_LENGTH:]):
        if message:
            send_numbers(transport, peer, message, device)


def receive_description(transport: Transport, peer: int) -> tuple[Meta, ...]:
    """Receive the description of a parcel from another rank."""
    count, *numbers = receive_numbers(transport, peer, _LENGTH)
    if count > len(numbers):
        numbers += receive_numbers(transport, peer, count - len(numbers))
    return _read(numbers)


def send_numbers(transport: Transport, peer: int, numbers: Sequence[int], device: torch.device | None) -> None:
    """Send numbers to another rank, which knows how many there are."""
    transport.send(peer, [torch.tensor(numbers, dtype=torch.int64, device=device)])


def receive_numbers(transport: Transport, peer: int, length: int) -> list[int]:
    """Receive numbers from another rank."""
    (numbers,) = transport.receive(peer, [Meta((length,), torch.int64, False)]).wait()
    return numbers.tolist()


def _written(ends: Ends, metas: Sequence[Meta]) -> list[int]:
    numbers = [len(metas)]
    for place, meta in enumerate(metas):
        if meta.dtype not in _DTYPES:
            raise PipeError(
                f"output {place} of stage {ends[0]} is {meta.dtype}, which cannot be sent to stage {ends[1]}"
            )
        numbers += [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
        words = [] if meta.on_mesh is None else _as_words(meta.on_mesh)
        numbers += [len(words), *words]
    return numbers


def _read(numbers: list[int]) -> tuple[Meta, ...]:
    rest = iter(numbers)
    metas = []
    for _ in range(next(rest)):
        dtype, requires_grad, dims = (next(rest) for _ in range(3))
        shape = tuple(next(rest) for _ in range(dims))
        words = [next(rest) for _ in range(next(rest))]
        metas.append(Meta(shape, _DTYPES[dtype], bool(requires_grad), _from_words(words) if words else None))
    return tuple(metas)


def _as_words(on_mesh: MeshLayout) -> list[int]:
    """Pickle, as torch sends objects: placements, of which users may have their own, know best how to be written."""
    data = pickle.dumps(on_mesh)
    data += bytes(-len(data) % _WORD)  # a pickle knows where it ends
    return list(struct.unpack(f"{len(data) // _WORD}q", data))


def _from_words(words: list[int]) -> MeshLayout:
    found: MeshLayout = pickle.loads(struct.pack(f"{len(words)}q", *words))
    return found


class Kind(NamedTuple):
    """The key of parcels that have the same contents, but for the values."""

    ends: Ends
    sizes: tuple[int, ...]  # of the microbatch: its symbolic dims, or a number that stands for all shapes
    training: bool


@dataclass(frozen=True)
class Contents:
    """The values in a parcel, and those of them that get a gradient."""

    metas: tuple[Meta, ...]
    gradient_places: tuple[int, ...]
    gradient_metas: tuple[Meta, ...]  # if it is plain; that of a DTensor may be placed in another way than the value
    bytes: int
    is_plain: bool  # False if there is a DTensor

    @classmethod
    def of(cls, metas: tuple[Meta, ...]) -> Contents:
        """Make it from the metas of all values."""
        places = tuple(place for place, meta in enumerate(metas) if meta.requires_grad)
        gradients = tuple(metas[place] for place in places)
        is_plain = all(meta.on_mesh is None for meta in metas)
        return cls(metas, places, gradients, sum(meta.bytes for meta in metas), is_plain)


@dataclass(frozen=True)
class _SizesFromData:
    """The parcels with sizes that depend on the data; a message with these goes before each of them.

    `dims` has the place of each such value in its parcel, and the dim.
    """

    dims: Mapping[Ends, tuple[tuple[int, int], ...]]

    @classmethod
    def find(cls, items: Mapping[Ends, Sequence[Item]], symbols: Sequence[str]) -> _SizesFromData:
        """Find the dims that do not follow from the symbolic dims of a microbatch."""
        found = {
            ends: tuple(
                (place, dim)
                for place, item in enumerate(parcel)
                for dim, size in enumerate(item.spec.shape)
                if not isinstance(size, int) and not {str(symbol) for symbol in size.free_symbols} <= set(symbols)
            )
            for ends, parcel in items.items()
        }
        return cls({ends: dims for ends, dims in found.items() if dims})

    def in_parcel(self, ends: Ends, parcel: Sequence[Tensor]) -> list[int]:
        """Return these sizes of a parcel; 0 for a dim that a value does not have."""
        return [parcel[place].shape[dim] if dim < parcel[place].dim() else 0 for place, dim in self.dims[ends]]

    def contents(self, ends: Ends, metas: Sequence[Meta], sizes: Sequence[int]) -> Contents:
        """Return what is in a parcel with these sizes."""
        shapes = [list(meta.shape) for meta in metas]
        for (place, dim), size in zip(self.dims[ends], sizes, strict=True):
            shapes[place][dim] = size
        return Contents.of(tuple(meta._replace(shape=tuple(each)) for meta, each in zip(metas, shapes, strict=True)))


class TracedParcels:
    """Parcels of a traced model: their shapes follow from the symbolic dims of a microbatch, or are `from_data`."""

    are_learnt = False

    def __init__(self, info: PipeInfo, items: Mapping[Ends, Sequence[Item]]) -> None:
        self.symbols = sorted(str(symbol) for symbol in info.call.dims)
        self.items = items
        self.autocast = info.call.autocast
        self.from_data = _SizesFromData.find(items, self.symbols)
        self._bound: dict[tuple[Ends, tuple[int, ...]], tuple[Meta, ...]] = {}

    def metas(self, kind: Kind) -> tuple[Meta, ...]:
        """Return the metas of the values in a parcel; a size that depends on the data is 0."""
        key = (kind.ends, kind.sizes)
        if key not in self._bound:
            by_name = dict(zip(self.symbols, kind.sizes, strict=True))
            items = self.items.get(kind.ends, ())
            from_data = {str(symbol): 0 for item in items for symbol in item.spec.symbols}
            self._bound[key] = tuple(_meta(item.spec.bind({**from_data, **by_name})) for item in items)
        return self._bound[key]

    def names(self, ends: Ends) -> list[str]:
        """Return the names of the values in a parcel."""
        return [item.name for item in self.items[ends]]

    def remedy(self, source: int, got: Meta, expected: Meta) -> str:
        """Say what to do about a value that is not as in the trace."""
        if got.on_mesh is not None:
            return (
                "stages of a traced model send plain tensors only: end this one with use_local_output=True or "
                "to_local(), and begin the next one with PrepareModuleInput or DTensor.from_local()"
            )
        now = active_autocast()
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
        """Do nothing: everything is known."""

    def send_description_if_new(self, kind: Kind, transport: Transport, peer: int, parcel: Sequence[Tensor]) -> None:
        """Do nothing: everything is known."""


def _meta(spec: TensorSpec) -> Meta:
    return Meta(tuple(int(size) for size in spec.shape), spec.dtype, spec.requires_grad)


class LearntParcels:
    """Parcels of modules that were cut by hand: the first one of its kind goes with a description.

    So does the first one of gradients of DTensors, from the user of a value to its maker.
    """

    are_learnt = True
    from_data = _SizesFromData({})  # none: what a module makes of equal shapes has equal shapes

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[Meta, ...]] = {}

    def metas(self, kind: Kind) -> tuple[Meta, ...] | None:
        """Return the metas of the values in a parcel, if one like it has been seen."""
        return self._known.get(kind)

    def names(self, ends: Ends) -> list[str]:
        """Return names for the values, which have none: what a stage returns is output 0, output 1..."""
        known = [metas for kind, metas in self._known.items() if kind.ends == ends]
        return [f"output {place}" for place in range(max(map(len, known), default=0))]

    def remedy(self, source: int, got: Meta, expected: Meta) -> str:
        """Say what to do about a value that is not as it was in the first microbatch of its kind."""
        if placement_of(got.on_mesh) != placement_of(expected.on_mesh):
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

    def send_description_if_new(self, kind: Kind, transport: Transport, peer: int, parcel: Sequence[Tensor]) -> None:
        """Send a description before a parcel that is not known, unless it goes to a stage of this rank."""
        if kind in self._known:
            return
        metas = self._known[kind] = tuple(Meta.of(tensor) for tensor in parcel)
        if peer != transport.rank:
            send_description(transport, peer, kind.ends, metas, parcel[0].device if parcel else None)


Parcels = TracedParcels | LearntParcels


# DTensors are sent as their local parts, of which the receiver makes the whole again.


_Joint = tuple[int, MeshLayout, Any]  # the place in a parcel, how the DTensor lies there, its mesh


def joints_of(metas: Sequence[Meta], stage: PipelineStage) -> list[_Joint]:
    """Return the DTensors in a parcel for a stage; a mesh that the stage does not know raises an error."""
    return [
        (place, meta.on_mesh, stage.mesh_for(meta.on_mesh.mesh))
        for place, meta in enumerate(metas)
        if meta.on_mesh is not None
    ]


class WholeTensors:
    """A parcel of local parts that arrives as the DTensors that they are parts of; the rest of it as it is."""

    def __init__(self, arrival: Arrival, joints: Sequence[_Joint]) -> None:
        self._arrival = arrival
        self._joints = joints

    def wait(self) -> list[Tensor]:
        tensors = list(self._arrival.wait())
        for place, on_mesh, mesh in self._joints:
            tensors[place] = on_mesh.whole(tensors[place], mesh)
        return tensors
