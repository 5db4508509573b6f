"""Questions about sizes that concern how tensors lie in memory, and not what a model computes.

Whether a tensor is contiguous depends on which of its dims have size 1. torch asks that to know the result of an
operation. The operation itself is in the trace, and asks anew when it runs.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch

from .effects import operator_name

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)

# Operations whose results have shapes that follow by arithmetic, whatever the sizes are.
_SHAPE_BY_ARITHMETIC = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "clone", "contiguous", "copy_", "detach", "permute", "reshape", "select", "t",
        "_to_copy", "to", "transpose", "unsqueeze", "view", "_unsafe_view",
    )
}  # fmt: skip


def is_about_layout(expr: sympy.Basic, answer: Any) -> bool:
    """Whether what is asked now is such a question, and was answered as for any size but 0 and 1."""
    return _is_general(expr, answer) and _is_asked_by_torch(_says_unequal(expr, answer))


def _says_unequal(expr: sympy.Basic, answer: Any) -> bool:
    return isinstance(expr, sympy.Ne if answer else sympy.Eq)


@functools.lru_cache(maxsize=4096)
def _is_general(expr: sympy.Basic, answer: Any) -> bool:
    symbols = sorted(expr.free_symbols, key=str)
    large = {symbol: sympy.prime(1000 + nth) for nth, symbol in enumerate(symbols)}
    return bool(expr.subs(large) == answer)


def _is_asked_by_torch(unequal: bool) -> bool:
    """Asked within an operation, or by a method of a tensor that makes no operation, like contiguous().

    An operation that asks whether a size is 1, and is told no, gives a result whose shape is right for 1 too: a size
    that is broadcast has been tied to the other one. Only squeeze is different. What else is asked may decide on a
    shape, as in `x[:2]`.
    """
    frame: FrameType | None = sys._getframe(2)
    by_python = False
    while frame is not None:
        filename, name = frame.f_code.co_filename, frame.f_code.co_name
        if name == "proxy_call" and filename.endswith("proxy_tensor.py"):
            operation = operator_name(frame.f_locals["func"])
            return operation in _SHAPE_BY_ARITHMETIC or (unequal and operation != "aten::squeeze")
        if not filename.startswith((_TORCH, _OWN)):
            return not by_python
        by_python = by_python or name in ("__bool__", "__int__", "__index__", "_check_with")
        frame = frame.f_back
    return False
