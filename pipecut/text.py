"""Text of messages: names, lists, counts, tensors and sizes of memory, and lines about work that takes long.

Without torch."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn


# Names, lists and counts.


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a sentence that offers the nearest known names, or nothing; `cutoff` is how near, up to 1.

    >>> did_you_mean("layer.3", ["layers.3", "head"])
    " Did you mean 'layers.3'?"
    """
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def listed(items: Iterable[object], at_most: int | None = None) -> str:
    """Join items by commas; of more than `at_most`, the first ones and the number of the others.

    >>> listed([0, 1, 2]), listed("abcde", at_most=3)
    ('0, 1, 2', 'a, b, c and 2 more')
    """
    texts = list(map(str, items))
    shown = ", ".join(texts[:at_most])
    return shown if at_most is None or len(texts) <= at_most else f"{shown} and {len(texts) - at_most} more"


def lines_of(items: Sequence[object], at_most: int) -> str:
    r"""Write items on indented lines of their own, at most so many.

    >>> lines_of(["a", "b", "c"], at_most=2)
    '\n  a\n  b\n  and 1 more'
    """
    more = [f"and {len(items) - at_most} more"] if len(items) > at_most else []
    return "".join(f"\n  {line}" for line in (*items[:at_most], *more))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has none.

    >>> first_line(ValueError("it is odd\\nand long")), first_line(EOFError())
    ('it is odd', 'EOFError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def plural(noun: str, count: int) -> str:
    """Return a noun in the number that the count asks for.

    >>> plural("stage", 1), plural("stage", 2), plural("microbatch", 0)
    ('stage', 'stages', 'microbatches')
    """
    return noun if count == 1 else f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "stage"), counted(3, "microbatch")
    ('1 stage', '3 microbatches')
    """
    return f"{count} {plural(noun, count)}"


def numbered(noun: str, numbers: Sequence[object], joint: str = ", ") -> str:
    """Return a noun with the numbers of the things meant.

    >>> numbered("rank", [3]), numbered("stage", [0, 2]), numbered("stage", [0, 2], " and ")
    ('rank 3', 'stages 0, 2', 'stages 0 and 2')
    """
    return f"{plural(noun, len(numbers))} {joint.join(map(str, numbers))}"


# Tensors.


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`.

    >>> import torch
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Iterable[Any]) -> str:
    """Return the sizes of a tensor, numbers or symbols, in brackets.

    >>> shape_text((2, 3))
    '[2, 3]'
    """
    return f"[{', '.join(map(str, shape))}]"


def tensor_text(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor, or of anything that has both.

    >>> import torch
    >>> tensor_text(torch.ones(2, 3))
    'float32[2, 3]'
    """
    return f"{dtype_name(tensor.dtype)}{shape_text(tensor.shape)}"


def structure_text(module: nn.Module) -> str:
    """Return how many modules, parameters and buffers a module holds, and a digest of all their names and shapes.

    >>> from torch import nn
    >>> structure_text(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    '3 modules and 2 tensors (ae785dd9)'
    """
    from torch.nn.parameter import is_lazy

    modules = [f"{path}: {type(part).__name__}" for path, part in module.named_modules()]
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = [f"{name}: {'lazy' if is_lazy(tensor) else tensor_text(tensor)}" for name, tensor in named]
    digest = hashlib.sha256("\n".join([*modules, *tensors]).encode()).hexdigest()[:8]
    return f"{counted(len(modules), 'module')} and {counted(len(tensors), 'tensor')} ({digest})"


# Sizes of memory.

Memory = float | str | Sequence[float | str] | None

_UNITS = {
    "": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40,
}  # fmt: skip
_WRITTEN_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_DIGITS = 4


def parse_memory(memory: Memory, ranks: int, name: str = "memory") -> list[float] | None:
    """Return the bytes of each rank, from one size for all or one for each; None if it is not limited.

    >>> parse_memory("24GB", 2), parse_memory(["1.5 GiB", 100], 2)
    ([24000000000.0, 24000000000.0], [1610612736.0, 100.0])
    """
    if memory is None:
        return None
    if isinstance(memory, str | int | float):
        return [_parse_size(memory, name)] * ranks
    if not isinstance(memory, Sequence) or len(memory) != ranks:
        raise InputError(f"{name}={memory!r}: give one size for all ranks, such as '24GB', or one for each of {ranks}")
    return [_parse_size(each, name) for each in memory]


def _parse_size(memory: float | str, name: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if not number and (match is None or match[2].upper() not in _UNITS):
        raise InputError(f"{name}={memory!r}: write it as 24GB, 512MiB, or a number of bytes")
    size = float(match[1]) * _UNITS[match[2].upper()] if match is not None else float(memory)
    if not size > 0:
        raise InputError(f"{name}={memory!r}: give the bytes that a rank has, more than 0")
    return size


def format_bytes(size: float, digits: int = _DIGITS) -> str:
    """Return a size with a unit that fits it.

    >>> format_bytes(2_500_000), format_bytes(12), format_bytes(1_336_000_000, digits=3), format_bytes(math.inf)
    ('2.5 MB', '12 B', '1.34 GB', 'no limit')
    """
    if math.isinf(size):
        return "no limit"
    unit, factor = _unit_for(size)
    return f"{size / factor:.{digits}g} {unit}"


def format_bytes_rounded_up(size: float) -> str:
    """Return a size that is not less than the given one, and that `parse_memory` can read.

    >>> format_bytes_rounded_up(123_401), format_bytes_rounded_up(123_400), format_bytes_rounded_up(0.25)
    ('123.5 kB', '123.4 kB', '0.25 B')
    >>> format_bytes_rounded_up(12_345e9)
    '12345 GB'
    """
    unit, factor = _unit_for(size)
    decimals = max(0, _DIGITS - max(1, len(str(int(size / factor)))))
    steps = math.ceil(size / factor * 10**decimals)
    if steps / 10**decimals * factor < size:  # the quotient was rounded down
        steps += 1
    text = f"{steps / 10**decimals:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}"


def _unit_for(size: float) -> tuple[str, float]:
    return next((each for each in _WRITTEN_UNITS if size >= each[1]), _WRITTEN_UNITS[-1])


# Lines about work that takes long, on a terminal; what it does is also in the log.

_PATIENCE = 2.0  # seconds of silence before the first line, and between lines about one phase


class _Work(threading.local):
    """The work of a thread: when it began, and the last line about it."""

    begin: float | None = None
    last: str = ""
    said: float = 0.0


_WORK = _Work()


@contextlib.contextmanager
def phase(logger: logging.Logger, what: str) -> Iterator[None]:
    """Log what a block does and how long it took; on a terminal, say so if all of the work takes longer than 2 seconds.

    >>> with phase(logging.getLogger("pipecut.example"), "counting"):
    ...     sum(range(4))
    6
    """
    begin, outermost = time.monotonic(), _WORK.begin is None
    if outermost:
        _WORK.begin, _WORK.last, _WORK.said = begin, "", begin
    _say(what)
    try:
        yield
        logger.debug("%s took %.2f s", what, time.monotonic() - begin)
    finally:
        if outermost:
            _WORK.begin = None


def still(what: str) -> None:
    """Say how far a phase is, if nothing was said for a while; outside of any phase, nothing."""
    if time.monotonic() - _WORK.said >= _PATIENCE:
        _say(what)


def _say(what: str) -> None:
    now = time.monotonic()
    if _WORK.begin is None or what == _WORK.last or now - _WORK.begin < _PATIENCE:
        return
    _WORK.last, _WORK.said = what, now
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"pipecut: {what} ({now - _WORK.begin:.0f} s so far)", file=sys.stderr)
