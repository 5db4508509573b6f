"""Checkpoints as a stage sees them: names, shapes and dtypes, and a way to read some tensors.

One class each for state dicts, files of torch.save, directories of torch.distributed.checkpoint, and safetensors files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import CheckpointError
from ...files import check_regular, open_regular, write_whole
from ...text import dtype_name, first_line, shape_text

if TYPE_CHECKING:
    from .distributed import DistributedReader


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of a saved tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{shape_text(self.shape)}"


class Checkpoint(Protocol):
    """Saved tensors and objects by name, each read when it is asked for."""

    @property
    def where(self) -> str:
        """The path, or what messages say instead."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors and objects."""

    def entry(self, name: str) -> Entry | None:
        """Return shape and dtype of a tensor; None for an object that is not a tensor."""

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into others of their shapes, converted to their dtypes and devices."""

    def load_object(self, name: str) -> Any:
        """Return the tensor or object that is saved under a name."""


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


def open_torch_file(path: Path) -> InMemory:
    """Open a file of torch.save: a state dict whose tensors stay in the file until they are used."""
    check_regular(path, CheckpointError)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way that Python has
        raise CheckpointError(
            f"{path} cannot be read as a state dict: {first_line(error)}. Save "
            "model.state_dict() alone with torch.save, in its default format"
        ) from error
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path} holds {_summary(content)} and no tensors by name: save model.state_dict() alone, or pass the part "
            "that has them: checkpoint=torch.load(path, mmap=True)[...]"
        )
    return InMemory(content, str(path))


def _summary(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a {type(content).__name__} of {', '.join(map(repr, list(content)[:6])) or 'nothing'}"
    return f"a {type(content).__name__}"


class DistributedCheckpoint:
    """A directory that torch.distributed.checkpoint has written, from any number of ranks.

    With a `prefix`, only what is saved under names that begin with it, without it.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.where = str(path)
        self._prefix = prefix
        self._reader = open_distributed(path)
        saved = self._reader.metadata.state_dict_metadata
        self._saved = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}

    @property
    def names(self) -> Collection[str]:
        return self._saved.keys()

    def entry(self, name: str) -> Entry | None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        saved = self._saved[name]
        return Entry(tuple(saved.size), saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else None

    def read(self, targets: Mapping[str, Tensor]) -> None:
        self._reader.read({f"{self._prefix}{name}": target.detach() for name, target in targets.items()})

    def load_object(self, name: str) -> Any:
        entry = self.entry(name)
        saved = f"{self._prefix}{name}"
        into: dict[str, Any] = {saved: None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)}
        self._reader.read(into)
        return into[saved]


# The safetensors format: a length, a JSON header, and the bytes of the tensors. Its library checks the header; tensors
# are read and written piece by piece, since the library maps whole files, and copies what it writes.


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PIECE = 4 << 20  # bytes that are in memory beside the tensor that they go to


@dataclass(frozen=True)
class _Place:
    entry: Entry
    begin: int


class SafetensorsFile:
    """A safetensors file: its header is read at once, tensors when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)
        self.metadata, self._places = _read_header(path)

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def entry(self, name: str) -> Entry:
        return self._places[name].entry

    def read(self, targets: Mapping[str, Tensor]) -> None:
        # Not from the mapped file: its pages would count as memory of this process.
        with open_regular(self.path, CheckpointError) as file:
            for name, target in sorted(targets.items(), key=lambda item: self._places[item[0]].begin):
                place = self._places[name]
                if target.is_contiguous():
                    _read_into(file, place, target.detach().view(-1), self.where)
                else:
                    whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                    _read_into(file, place, whole.view(-1), self.where)
                    target.copy_(whole)

    def load_object(self, name: str) -> Any:
        entry = self.entry(name)
        value = torch.empty(entry.shape, dtype=entry.dtype)
        self.read({name: value})
        return value


def _read_into(file: BinaryIO, place: _Place, flat: Tensor, where: str) -> None:
    dtype = place.entry.dtype
    step = max(1, _PIECE // dtype.itemsize)
    piece = bytearray(min(place.entry.nbytes, step * dtype.itemsize))
    file.seek(place.begin)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        view = memoryview(piece)[: part.numel() * dtype.itemsize]
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise CheckpointError(
                f"{where} ends in the middle of a tensor: it was not written to the end; copy it anew"
            )
        part.copy_(torch.frombuffer(view, dtype=dtype))


def _read_header(path: Path) -> tuple[Mapping[str, str], dict[str, _Place]]:
    """Return the metadata of a file and the place of each tensor.

    The library has checked that the tensors lie one behind the other and fill the file, so their places follow from
    their order and sizes. It maps the file, and is asked for nothing but the header.
    """
    check_regular(path, CheckpointError)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            entries = {name: _entry(path, name, file.get_slice(name)) for name in file.offset_keys()}
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{path} cannot be mapped into memory: {first_line(error)}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is neither a safetensors file nor one that torch.save has written: {error}. If it was downloaded "
            "or copied, do so again"
        ) from error
    begin = path.stat().st_size - sum(entry.nbytes for entry in entries.values())
    places = {}
    for name, entry in entries.items():
        places[name] = _Place(entry, begin)
        begin += entry.nbytes
    return metadata, places


def _entry(path: Path, name: str, saved: Any) -> Entry:
    code = saved.get_dtype()
    if code not in _DTYPES:
        raise CheckpointError(f"{name} in {path} has the dtype {code}; those that can be read are {', '.join(_DTYPES)}")
    return Entry(tuple(saved.get_shape()), _DTYPES[code])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file at once or not at all, one piece of a tensor in memory at a time.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_safetensors(path, {"weight": torch.eye(2)})
    >>> str(SafetensorsFile(path).entry("weight"))
    'float32[2, 2]'
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"{name} is of dtype {dtype_name(tensor.dtype)}, which safetensors files cannot hold")
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            _write(file, tensor)

    write_whole(path, write, CheckpointError)


def _write(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.detach().contiguous().view(-1)
    step = max(1, _PIECE // tensor.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step].cpu().view(torch.uint8)
        file.write(piece.numpy().data)


def open_distributed(path: Path) -> DistributedReader:
    """Open a directory of torch.distributed.checkpoint, for DTensors too."""
    from .distributed import DistributedReader  # slow to import, and rarely used

    return DistributedReader(path)
