"""Routes torch's autograd functions and checkpoints through a listener, for as long as a trace runs."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.autograd.graph
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


# MERGED: What a forward may do that leaves nothing in a trace: seen here, so that it is not lost without a word.


# Where each thing is done, and what to call it.
_FORGOTTEN: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "register_hook", "Tensor.register_hook()"),
    (torch.inference_mode, "__enter__", "torch.inference_mode()"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__", "torch.autograd.graph.saved_tensors_hooks"),
    (torch, "manual_seed", "torch.manual_seed()"),
    (torch.random, "fork_rng", "torch.random.fork_rng()"),
    (random, "random", "random.random()"),
    (random, "uniform", "random.uniform()"),
)


# These have subclasses with names of their own: save_on_cpu.
_CONTEXTS = (torch.autograd.graph.saved_tensors_hooks,)


@contextlib.contextmanager
def watched(note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` with the name of each such thing that is done inside."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in _FORGOTTEN:
            stack.enter_context(patch.object(owner, attribute, _noting(getattr(owner, attribute), name, note)))
        yield


def _noting(function: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        entered = isinstance(args[0], _CONTEXTS) if args else False
        note(f"{name.rpartition('.')[0]}.{type(args[0]).__name__}" if entered else name)
        return function(*args, **kwargs)

    return noted
