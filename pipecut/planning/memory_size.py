"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

from ..errors import InputError

UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30}


def read_memory(memory: float | str | None) -> float | None:
    """Bytes, from a number or a text.

    >>> read_memory("24GB"), read_memory("1.5 GiB"), read_memory(100)
    (24000000000.0, 1610612736.0, 100.0)
    """
    if memory is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(memory)) if isinstance(memory, str) else None
    if isinstance(memory, str) and (match is None or match[2].upper() not in UNITS):
        raise InputError(f"memory={memory!r}: write it as 24GB, 512MiB, or a number of bytes")
    size = float(match[1]) * UNITS[match[2].upper()] if match is not None else float(memory)
    if not (math.isfinite(size) and size > 0):
        raise InputError(f"memory={memory!r}: give the bytes that a rank has, more than 0")
    return size
