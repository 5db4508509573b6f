"""Random generators that go on as if a run had not been."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def kept_random_numbers(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put all generators back: torch's on the CPU and on the devices of these tensors, Python's and numpy's.

    >>> before = torch.get_rng_state()
    >>> with kept_random_numbers([]):
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices}:
            indices = [device.index for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
