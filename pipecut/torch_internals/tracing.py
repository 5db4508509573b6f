"""The tracer of torch.export, its symbolic sizes and its operators, seen while the traced code runs.

torch.export hands out a finished graph. What the code decided about sizes, and where, is lost by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeGuard

import sympy
import torch
import torch.utils._pytree as _pytree
from torch._ops import HigherOrderOperator, OpOverload
from torch.amp import autocast_mode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.printers import PythonPrinter

pytree = _pytree  # types that users have registered are known to this module alone

# Targets of graph nodes that change a mode; vmap's are known by name.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
ENTER_AUTOCAST: Any = autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = autocast_mode._exit_autocast
ENTER_VMAP = "_vmap_increment_nesting"
EXIT_VMAP = "_vmap_decrement_nesting"

# Functions of torch that ask for the plain number or truth value behind a symbolic one.
_PLAIN_NUMBER = ("__bool__", "__int__", "__index__", "_check_with")

# Folders in which torch builds operators on functions out of autograd functions.
_HIGHER_ORDER = ("torch._higher_order_ops", "torch._functorch", "torch._dynamo")


def makes_higher_order(cls: type) -> bool:
    """Return True for an autograd function that torch applies as a part of an operator on functions."""
    return cls.__module__.startswith(_HIGHER_ORDER)


def traced_operator(frame: FrameType) -> Any | None:
    """Return the operator that the tracer handles in a frame of the stack, None for any other frame.

    Questions about sizes that come from within an operator need not be answered by the trace: the operator asks again
    when it runs. Only the stack shows where a question comes from.
    """
    code = frame.f_code
    if code.co_name == "proxy_call" and code.co_filename.endswith("proxy_tensor.py"):
        return frame.f_locals["func"]
    return None


def asks_for_plain_number(frame: FrameType) -> bool:
    """Return True if a frame of the stack turns a symbolic number or truth value into a plain one."""
    return frame.f_code.co_name in _PLAIN_NUMBER


def watch_size_decisions(
    shape_env: Any,
    on_replaced: Callable[[sympy.Symbol, sympy.Basic], None],
    on_decided: Callable[[sympy.Basic, Any], None],
) -> None:
    """Report each decision about symbolic sizes: the symbols that it replaces, then the expression and the answer.

    The guards of a ShapeEnv lack what torch knew already, and the place in the code at which it was asked again.
    """
    decide, replacements = shape_env.evaluate_sym_node, shape_env.replacements

    def decide_and_report(node: Any, *args: Any, **kwargs: Any) -> Any:
        expr, known = node.expr, len(replacements)
        answer = decide(node, *args, **kwargs)
        for symbol in itertools.islice(replacements, known, None):
            on_replaced(symbol, replacements[symbol])
        if kwargs.get("fallback_value") is None and getattr(expr, "free_symbols", None):
            on_decided(expr, answer)
        return answer

    shape_env.evaluate_sym_node = decide_and_report


def is_transforming() -> bool:
    """Return True inside a transform of torch.func, whose tensors are wrappers without memory of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_from_data(number: Any) -> bool:
    """Return True for a symbolic number that was computed from values of tensors, also if it has become known since.

    Public torch shows a number as it is known now.
    """
    return bool(free_unbacked_symbols(number.node._expr))


def let_go(shape_env: Any) -> None:
    """End the reports of a ShapeEnv whose trace is over, and drop the inputs that it knows.

    torch keeps some environments alive: they are keys of caches of its own.
    """
    vars(shape_env).pop("evaluate_sym_node", None)
    shape_env.tracked_fakes = None


def assume(condition: Any) -> None:
    """Tell the tracer that a condition on sizes holds."""
    torch._check(condition)  # type: ignore[no-untyped-call]


def symbol_source(name: str) -> Any:
    """Return the origin that a ShapeEnv asks for when a symbol is created, for one that has none."""
    from torch._dynamo.source import ConstantSource  # slow to import, and seldom needed

    return ConstantSource(name)


def python_text(expr: sympy.Basic) -> str:
    """Return an expression of torch's symbolic sizes, with its own division and rounding, as Python code."""
    return str(PythonPrinter().doprint(expr))


# Operators of the dispatcher: their class, schema and kernels.
#
# Public torch hands out operators (`torch.ops.aten.add.Tensor`), but neither their type nor their schema.


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


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of all samples behind one of torch.vmap, whose memory cannot be asked for; others as they are.

    >>> x = torch.ones(3)
    >>> unwrapped(x) is x
    True
    """
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def wraps_for_vmap(function: object) -> bool:
    """Return True for a function with which torch.vmap wraps and unwraps tensors; only a trace shows them."""
    return getattr(function, "__name__", "") in ("_add_batch_dim", "_remove_batch_dim")
