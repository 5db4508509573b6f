"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..errors import InputError

UNITS = {
    "": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40,
}  # fmt: skip
Memory = float | str | Sequence[float | str] | None


def read_memory(memory: Memory, ranks: int) -> list[float] | None:
    """The bytes of each rank, from one size for all or one for each; None if it is not limited.

    >>> read_memory("24GB", 2), read_memory(["1.5 GiB", 100], 2)
    ([24000000000.0, 24000000000.0], [1610612736.0, 100.0])
    """
    if memory is None:
        return None
    if isinstance(memory, str | int | float):
        return [_bytes(memory)] * ranks
    if not isinstance(memory, Sequence) or len(memory) != ranks:
        raise InputError(f"memory={memory!r}: give one size for all ranks, such as '24GB', or one for each of {ranks}")
    return [_bytes(each) for each in memory]


def _bytes(memory: float | str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    if isinstance(memory, bool) or (isinstance(memory, str) and (match is None or match[2].upper() not in UNITS)):
        raise InputError(f"memory={memory!r}: write it as 24GB, 512MiB, or a number of bytes")
    size = float(match[1]) * UNITS[match[2].upper()] if match is not None else float(memory)
    if not (math.isfinite(size) and size > 0):
        raise InputError(f"memory={memory!r}: give the bytes that a rank has, more than 0")
    return size
