"""Operators of the dispatcher: their class, schema and kernels.

Public torch hands out operators (`torch.ops.aten.add.Tensor`), but neither their type nor their schema.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload


def is_overload(target: object) -> TypeGuard[OpOverload]:
    """Return True if a callable is an overload of an operator, such as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, OpOverload)


def is_higher_order(target: object) -> bool:
    """Return True if a callable is an operator on functions, such as torch.cond."""
    return isinstance(target, HigherOrderOperator)


def schema_of(operator: Any) -> Any:
    """Return the schema of an overload: `name`, `arguments` and `returns` with their aliases, `is_mutable`.

    >>> schema_of(torch.ops.aten.relu.default).name
    'aten::relu'
    """
    return operator._schema


def overload_name(operator: OpOverload) -> str:
    """Return the name of an overload among those of its operator.

    >>> overload_name(torch.ops.aten.add.Tensor)
    'Tensor'
    """
    return operator._overloadname


def is_composite(operator: OpOverload) -> bool:
    """Return True if an operator is implemented by other operators, which a dispatch mode sees in its place."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
