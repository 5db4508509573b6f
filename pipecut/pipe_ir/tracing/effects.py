"""Effects of an operation besides making its result: writes to arguments, changes of modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...torch_internals import (
    ENTER_AUTOCAST,
    ENTER_VMAP,
    EXIT_AUTOCAST,
    EXIT_VMAP,
    SET_GRAD_ENABLED,
    is_overload,
    schema_of,
)
from ..operators import operator_of
from ..traced import Autocast, Context


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that the operation writes to."""
    if not is_overload(target):
        return []
    silent = [args[position] for position in operator_of(target).silent_writes if position < len(args)]
    declared = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(schema_of(target).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [argument for argument in (*silent, *declared) if argument is not None]


def returned_argument(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument that the operation hands back after writing to it (`x.add_(y)` is x), or None."""
    if not is_overload(target) or len(schema_of(target).returns) != 1:
        return None
    alias = schema_of(target).returns[0].alias_info
    written = written_arguments(target, args, kwargs)
    return written[0] if alias is not None and alias.is_write and written else None


class Modes:
    """Follows the mode-changing nodes of a trace, in order."""

    def __init__(self) -> None:
        self.context = Context()
        self._blocks = 0

    def follow(self, target: Any, args: Sequence[Any]) -> bool:
        """Take note of a node; return True if it did nothing but change a mode."""
        name = getattr(target, "__name__", "")
        context = self.context
        if target is SET_GRAD_ENABLED:
            self._blocks += 1
            self.context = replace(context, grad=args[0], no_grad_block=0 if args[0] else self._blocks)
        elif target is ENTER_AUTOCAST:
            self._blocks += 1
            entered = Autocast(args[0], args[1], args[2], self._blocks)
            self.context = replace(context, autocast=(*context.autocast, entered))
        elif target is EXIT_AUTOCAST:
            self.context = replace(context, autocast=context.autocast[:-1])
        elif name == ENTER_VMAP:
            self.context = replace(context, vmap=context.vmap + 1)
            return False
        elif name == EXIT_VMAP:
            self.context = replace(context, vmap=context.vmap - 1)
            return False
        else:
            return operator_of(target).is_check
        return True
