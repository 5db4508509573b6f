"""What is alive in this process: tensors that Python knows, and the bytes that torch has allocated."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def live_tensors() -> list[Tensor]:
    """All tensors that a Python object stands for, whoever holds it; not those from before the first test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        return [value for value in gc.get_objects() if issubclass(type(value), Tensor)]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Only what nobody refers to is freed: what sits in a reference cycle stays.

    What is there before is not looked at again, so that a test may call the collector itself, and often.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_bytes(run: Callable[[], object]) -> int:
    """How many bytes a run has allocated at most, beyond what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak
