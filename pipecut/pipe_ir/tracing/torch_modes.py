"""Modes of torch functions that are active while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

# Of a number in [0, 1): what is known of a comparison with a bound, if that is at or beyond an end.
_COMPARISONS: dict[Any, Callable[[float], bool | None]] = {}
for _names, _answer in {
    ("lt", "less", "__lt__"): lambda bound: False if bound <= 0 else True if bound >= 1 else None,
    ("le", "less_equal", "__le__"): lambda bound: False if bound < 0 else True if bound >= 1 else None,
    ("gt", "greater", "__gt__"): lambda bound: True if bound < 0 else False if bound >= 1 else None,
    ("ge", "greater_equal", "__ge__"): lambda bound: True if bound <= 0 else False if bound >= 1 else None,
}.items():
    for _name in _names:
        for _owner in (torch, Tensor):
            if hasattr(_owner, _name):
                _COMPARISONS[getattr(_owner, _name)] = _answer


class FoldCertainRandomBranches(TorchFunctionMode):
    """Answers `if` for comparisons of `torch.rand([])` whose outcome is certain: `torch.rand([]) < 0.0` is never true.

    Models write layer dropout like that, and most configurations leave its probability at 0. With any other the way
    through the model is not known until it runs, and no trace can hold it.

    >>> with FoldCertainRandomBranches():
    ...     bool(torch.rand([]) < 0.0), bool(torch.rand([]) < 1)
    (False, True)
    """

    def __init__(self) -> None:
        super().__init__()
        self._chances = WeakIdKeyDictionary()
        self._answers = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and args[0] in self._answers:
            return self._answers[args[0]]
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self._chances[result] = None
        elif func in _COMPARISONS and args[0] in self._chances and isinstance(args[1], int | float):
            answer = _COMPARISONS[func](args[1])
            if answer is not None:
                self._answers[result] = answer
        return result


class TraceNoopContiguous(TorchFunctionMode):
    """Sends `contiguous()` through the dispatcher, so that every trace has it.

    Of a tensor that is contiguous, torch returns the tensor itself. In another mode or size it may not be contiguous,
    and two traces of one code would not match.

    >>> x = torch.ones(2)
    >>> with TraceNoopContiguous():
    ...     x.contiguous() is not None
    True
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.contiguous:
            # Of an alias: where there is nothing to do the result is the argument itself, and a tracer would from then
            # on take the argument for something that this call has made.
            alias = torch.ops.aten.alias.default(args[0])
            return torch.ops.aten.contiguous.default(alias, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
