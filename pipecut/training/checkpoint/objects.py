"""Objects beside the tensors: states of user's objects, schedulers and random streams, in files that run no code.

They are written by torch.save and read with weights_only=True: numbers, texts, tensors, numpy arrays, and containers.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files import read_bytes
from ...run import PipelineSchedule
from ...stage import derive_seed
from ...text import first_line

_LARGEST = 16 << 30  # bytes of objects that are read from one file


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved, and go on from what was saved."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from a state."""


def state_of(value: Any) -> Any:
    """Return the state of a Stateful object or of a generator, and another value as it is."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if isinstance(value, Stateful) and not isinstance(value, type) else value


def load_state(value: Stateful | torch.Generator, state: Any) -> None:
    """Let an object go on from the state that `state_of` has returned."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


def serialized(name: str, value: Any, *, checked: bool = False) -> bytes:
    """Return the bytes of a value that can be read without running code, which is tried unless it was before."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        if not checked:
            _deserialized(stream.getvalue(), name)
    except (CheckpointError, pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        reason = first_line(error.__cause__ or error)
        raise CheckpointError(
            f"{name} cannot be saved, since it could not be read again without running code: {reason}. Let its "
            "state_dict() return numbers, texts, tensors, numpy arrays, and lists, tuples and dicts of these"
        ) from error
    return stream.getvalue()


def _deserialized(content: bytes, where: str) -> Any:
    """Return the value that some bytes hold; no code is run from them."""
    try:
        with torch.serialization.safe_globals(_numpy_types()):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way that Python has
        raise CheckpointError(f"{where} cannot be read: {first_line(error)}") from error


def read_objects(path: Path) -> Any:
    """Return the value in a file."""
    return _deserialized(read_bytes(path, CheckpointError, _LARGEST), str(path))


def _numpy_types() -> list[Any]:
    """Return what the pickle of a numpy array names, if numpy was imported; object arrays stay impossible."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    array = numpy.zeros(1)
    reconstruct = array.__reduce__()[0]
    kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    scalar = numpy.float64(0).__reduce__()[0]
    return [reconstruct, scalar, numpy.ndarray, numpy.dtype, *kinds]


def snapshot(value: Any) -> Any:
    """Return a value that no later change of the original reaches."""
    return copy.deepcopy(value)


# Random streams.


def random_state(schedule: PipelineSchedule) -> dict[str, Any]:
    """Return the state of the random streams of this process: Python's, numpy's, torch's, and the schedule's."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, torch.tensor(internal), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), int(place), int(has_gauss), float(cached)]
    devices = _devices(schedule)
    state["devices"] = {device.type: _device_state(device) for device in devices}
    state["evaluations"] = 0 if schedule.seeds is None else schedule.seeds.evaluations
    return state


def restore_random_state(schedule: PipelineSchedule, state: Mapping[str, Any], fork: int = 0) -> None:
    """Let all random streams go on where they were; with `fork`, a number, by streams of their own that follow."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(map(int, internal)), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(list(map(int, keys)), dtype=numpy.uint32), place, has_gauss, cached))
    for device in _devices(schedule):
        if device.type in state["devices"]:
            module: Any = torch.get_device_module(device)
            module.set_rng_state(state["devices"][device.type], *(() if device.type == "mps" else (device,)))
    if schedule.seeds is not None:
        schedule.seeds.evaluations = int(state["evaluations"])
    if fork:
        _fork(fork)


def _fork(number: int) -> None:
    torch.manual_seed(derive_seed(int(torch.randint(1 << 62, ()).item()), number))
    random.seed(derive_seed(random.getrandbits(62), number))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(derive_seed(int(numpy.random.randint(1 << 31)), number) % (1 << 32))


def _devices(schedule: PipelineSchedule) -> list[torch.device]:
    return [device for device in {stage.device for stage in schedule.stages} if device.type not in ("cpu", "meta")]


def _device_state(device: torch.device) -> Tensor:
    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state(*(() if device.type == "mps" else (device,)))
    return state.cpu()
