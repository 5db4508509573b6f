"""Routes torch's autograd functions and checkpoints through a listener, for as long as a trace runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.autograd.graph

from ...torch_internals import replaced

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
            stack.enter_context(replaced(owner, attribute, _noting(getattr(owner, attribute), name, note)))
        yield


def _noting(function: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        entered = isinstance(args[0], _CONTEXTS) if args else False
        note(f"{name.rpartition('.')[0]}.{type(args[0]).__name__}" if entered else name)
        return function(*args, **kwargs)

    return noted
