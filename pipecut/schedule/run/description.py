"""What is in a parcel, told to its receiver as numbers that go before it."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence

import torch

from ...errors import PipeError
from ...stage.on_mesh import OnMesh
from .transport import Meta, Transport

Ends = tuple[int, int]  # source stage, target stage
LENGTH = 256  # numbers of the first message, which has all of most descriptions; a second one has the rest
WORD = 8  # bytes of a number
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def send_description(
    transport: Transport, peer: int, ends: Ends, metas: Sequence[Meta], device: torch.device | None
) -> None:
    """Tell another rank what will be in a parcel."""
    numbers = _written(ends, metas)
    numbers = [len(numbers), *numbers]
    numbers += [0] * (LENGTH - len(numbers))
    for message in (numbers[:LENGTH], numbers[LENGTH:]):
        if message:
            transport.send(peer, [torch.tensor(message, dtype=torch.int64, device=device)])


def receive_description(transport: Transport, peer: int) -> tuple[Meta, ...]:
    """What another rank tells of a parcel."""
    count, *numbers = _received(transport, peer, LENGTH)
    if count > len(numbers):
        numbers += _received(transport, peer, count - len(numbers))
    return _read(numbers)


def _received(transport: Transport, peer: int, length: int) -> list[int]:
    (numbers,) = transport.receive(peer, [Meta((length,), torch.int64, False)]).wait()
    return numbers.tolist()


def _written(ends: Ends, metas: Sequence[Meta]) -> list[int]:
    numbers = [len(metas)]
    for place, meta in enumerate(metas):
        if meta.dtype not in DTYPES:
            raise PipeError(
                f"output {place} of stage {ends[0]} is {meta.dtype}, which cannot be sent to stage {ends[1]}"
            )
        numbers += [DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
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
        metas.append(Meta(shape, DTYPES[dtype], bool(requires_grad), _from_words(words) if words else None))
    return tuple(metas)


def _as_words(on_mesh: OnMesh) -> list[int]:
    """As torch sends objects: placements, of which users may have their own kinds, know best how to be written."""
    data = pickle.dumps(on_mesh)
    data += bytes(-len(data) % WORD)  # a pickle knows where it ends
    return list(struct.unpack(f"{len(data) // WORD}q", data))


def _from_words(words: list[int]) -> OnMesh:
    found: OnMesh = pickle.loads(struct.pack(f"{len(words)}q", *words))
    return found
