"""What a forward may do that leaves nothing in a trace: seen here, so that it is not lost without a word."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.autograd.graph

# Where each thing is done, and what to call it.
FORGOTTEN: tuple[tuple[Any, str, str], ...] = (
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
        for owner, attribute, name in FORGOTTEN:
            stack.enter_context(patch.object(owner, attribute, _noting(getattr(owner, attribute), name, note)))
        yield


def _noting(function: Callable[..., Any], name: str, note: Callable[[str], None]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        entered = isinstance(args[0], _CONTEXTS) if args else False
        note(f"{name.rpartition('.')[0]}.{type(args[0]).__name__}" if entered else name)
        return function(*args, **kwargs)

    return noted
