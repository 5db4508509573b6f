"""What an operation does besides making its result: writing to arguments, changing modes, blocking gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.amp import autocast_mode

from ..traced import Autocast, Context

# Operations that update running statistics although their schemas do not say so: positions of the arguments.
_SILENT_WRITES = {"aten::batch_norm": (3, 4), "aten::instance_norm": (3, 4)}

# Operations that may hand back their first argument as it is (in evaluation mode), though a trace shows a new tensor.
PASS_THROUGH = frozenset(
    f"aten::{name}" for name in "dropout feature_dropout alpha_dropout feature_alpha_dropout".split()
)

# Results that never carry a gradient although an argument does.
WITHOUT_GRADIENT = frozenset(
    f"aten::{name}"
    for name in (
        "detach detach_ zeros_like ones_like empty_like full_like rand_like randn_like randint_like "
        "new_zeros new_ones new_full new_empty new_empty_strided"
    ).split()
)

# Checks that the tracer adds; what they check holds by construction of the stages.
_CHECKS = frozenset(
    f"aten::{name}"
    for name in "_assert_scalar _assert_tensor_metadata sym_constrain_range sym_constrain_range_for_size".split()
)


def operator_name(target: Any) -> str:
    """`aten::add` for an operator overload; the plain name for any other callable."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target))


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that the operation writes to."""
    if not isinstance(target, torch._ops.OpOverload):
        return []
    silent = [args[position] for position in _SILENT_WRITES.get(operator_name(target), ()) if position < len(args)]
    declared = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [argument for argument in (*silent, *declared) if argument is not None]


def returned_argument(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that the operation hands back after writing to it (`x.add_(y)` is x), or None."""
    if not isinstance(target, torch._ops.OpOverload) or len(target._schema.returns) != 1:
        return None
    alias = target._schema.returns[0].alias_info
    written = written_arguments(target, args, kwargs)
    return written[0] if alias is not None and alias.is_write and written else None


class Modes:
    """Follows the mode-changing nodes of a trace, in order."""

    def __init__(self) -> None:
        self.context = Context()
        self._blocks = 0

    def follow(self, target: Any, args: Sequence[Any]) -> bool:
        """Take note of a node; whether it did nothing but change a mode."""
        name = getattr(target, "__name__", "")
        context = self.context
        if target is torch._C._set_grad_enabled:
            self._blocks += 1
            self.context = replace(context, grad=args[0], no_grad_block=0 if args[0] else self._blocks)
        elif target is autocast_mode._enter_autocast:
            self._blocks += 1
            entered = Autocast(args[0], args[1], args[2], self._blocks)
            self.context = replace(context, autocast=(*context.autocast, entered))
        elif target is autocast_mode._exit_autocast:
            self.context = replace(context, autocast=context.autocast[:-1])
        elif name == "_vmap_increment_nesting":
            self.context = replace(context, vmap=context.vmap + 1)
            return False
        elif name == "_vmap_decrement_nesting":
            self.context = replace(context, vmap=context.vmap - 1)
            return False
        else:
            return operator_name(target) in _CHECKS
        return True
