"""Called by generated code: what a module returns is what it returned when it was traced."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PipeError


def require_items(
    result: Any, kind: type[list[Any]] | type[tuple[Any, ...]], count: int, tensors: tuple[int, ...], label: str
) -> Any:
    """A list or tuple must have as many items as then, with tensors in the same places."""
    if type(result) is kind and len(result) == count and all(result[index] is not None for index in tensors):
        return result
    expected = f"a {kind.__name__} of {count} with a tensor at {', '.join(map(str, tensors))}"
    got = f"({', '.join(map(_brief, result))})" if isinstance(result, tuple | list) else _brief(result)
    raise PipeError(
        f"{label!r} returned {expected} when the model was traced, and now {got}; "
        "a module that returns something else in another mode or after its hooks needs a new pipeline() call"
    )


def require_same(result: Any, traced: Any, label: str) -> None:
    """What a module returned besides tensors is part of the trace."""
    if result is not traced and not (type(result) is type(traced) and result == traced):
        raise PipeError(
            f"{label!r} returned {traced!r} when the model was traced, and now {_brief(result)}; the code around it "
            "was traced with that value. Return it as a tensor, or call pipeline() again in the mode that is to run"
        )


def _brief(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
