"""Sizes of memory as people write them, and as they are told."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from .errors import InputError

_UNITS = {
    "": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40,
}  # fmt: skip
_TOLD = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_DIGITS = 4
Memory = float | str | Sequence[float | str] | None


def read_memory(memory: Memory, ranks: int, name: str = "memory") -> list[float] | None:
    """The bytes of each rank, from one size for all or one for each; None if it is not limited.

    >>> read_memory("24GB", 2), read_memory(["1.5 GiB", 100], 2)
    ([24000000000.0, 24000000000.0], [1610612736.0, 100.0])
    """
    if memory is None:
        return None
    if isinstance(memory, str | int | float):
        return [_bytes(memory, name)] * ranks
    if not isinstance(memory, Sequence) or len(memory) != ranks:
        raise InputError(f"{name}={memory!r}: give one size for all ranks, such as '24GB', or one for each of {ranks}")
    return [_bytes(each, name) for each in memory]


def _bytes(memory: float | str, name: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if not number and (match is None or match[2].upper() not in _UNITS):
        raise InputError(f"{name}={memory!r}: write it as 24GB, 512MiB, or a number of bytes")
    size = float(match[1]) * _UNITS[match[2].upper()] if match is not None else float(memory)
    if not size > 0:
        raise InputError(f"{name}={memory!r}: give the bytes that a rank has, more than 0")
    return size


def as_bytes(size: float) -> str:
    """A size in words.

    >>> as_bytes(2_500_000), as_bytes(12), as_bytes(math.inf)
    ('2.5 MB', '12 B', 'no limit')
    """
    if math.isinf(size):
        return "no limit"
    unit, factor = next((each for each in _TOLD if size >= each[1]), _TOLD[-1])
    return f"{size / factor:.{_DIGITS}g} {unit}"


def enough_bytes(size: float) -> str:
    """A size in words that is not less than it, and that `read_memory` can read.

    >>> enough_bytes(123_401), enough_bytes(123_400), enough_bytes(0.25), enough_bytes(12_345e9)
    ('123.5 kB', '123.4 kB', '0.25 B', '12345 GB')
    """
    unit, factor = next((each for each in _TOLD if size >= each[1]), _TOLD[-1])
    decimals = max(0, _DIGITS - max(1, len(str(int(size / factor)))))
    steps = math.ceil(size / factor * 10**decimals)
    if steps / 10**decimals * factor < size:  # the quotient was rounded down
        steps += 1
    text = f"{steps / 10**decimals:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}"
