"""Routes torch's autograd functions and checkpoints through a listener, for as long as a trace runs."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.function import Function


@contextlib.contextmanager
def intercepted_functions(on_apply: Callable[..., Any]) -> Iterator[None]:
    """Route `Function.apply` of every class through `on_apply`.

    People keep `relu6 = MyRelu6.apply` in a global, so replacing the attribute is not enough: it is the code of
    the one function behind all of them that is exchanged, and put back.
    """
    function = Function.apply.__func__  # type: ignore[attr-defined]
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, "apply", function.__defaults__, function.__closure__)

    def route(cls: type[Function], args: Any, kwargs: Any) -> Any:
        return on_apply(cls, lambda *a, **k: original(cls, *a, **k), args, kwargs)

    _ROUTES.append(route)
    function.__code__ = _routed_code(code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code
        _ROUTES.pop()


_ROUTES: list[Callable[..., Any]] = []


def _routed_code(free_names: tuple[str, ...]) -> types.CodeType:
    """Code that calls the innermost route, with the free variables that the exchanged function's closure has."""
    lines = [
        "def outer():",
        *[f"    {name} = None" for name in free_names],
        "    def apply(cls, *args, **kwargs):",
        *[f"        {name}" for name in free_names],
        f"        from {__name__} import _ROUTES",
        "        return _ROUTES[-1](cls, args, kwargs)",
        "    return apply",
    ]
    namespace: dict[str, Any] = {}
    exec("\n".join(lines), namespace)
    code: types.CodeType = namespace["outer"]().__code__
    return code


@contextlib.contextmanager
def intercepted_checkpoints(on_checkpoint: Callable[..., Iterator[None]]) -> Iterator[None]:
    """Route non-reentrant `checkpoint` calls through `on_checkpoint`; the reentrant ones are autograd functions."""
    name = "_checkpoint_without_reentrant_generator"
    original = getattr(torch_checkpoint, name)

    def generator(
        function: Any, preserve: bool, context_fn: Any, determinism: str, debug: bool, early_stop: bool,
        *args: Any, **kwargs: Any,
    ) -> Iterator[None]:  # fmt: skip
        options = {
            "use_reentrant": False,
            "preserve_rng_state": preserve,
            "context_fn": context_fn,
            "determinism_check": determinism,
        }
        return on_checkpoint((*args, *kwargs.values()), options)

    setattr(torch_checkpoint, name, generator)
    try:
        yield
    finally:
        setattr(torch_checkpoint, name, original)
