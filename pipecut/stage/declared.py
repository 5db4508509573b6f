"""Whether tensors are those that a stage was made with: their number, shapes, dtypes and placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..errors import StageMetadataError
from ..pipe_ir import flatten
from .dtensor import OnMesh, placing_of, text_of

_LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda tensor: tensor.shape,
    "dtype": lambda tensor: tensor.dtype,
    "placement": lambda tensor: placing_of(OnMesh.of(tensor)),
}


def check_declared(stage_index: int, what: str, declared: Any, got: Any, *, in_part: bool) -> None:
    """Refuse tensors that are not as they were declared, number of samples included.

    With `in_part` the last of them may be elsewhere, passed by keyword.
    """
    expected, found = _tensors(declared), _tensors(got)
    wanted = expected[: len(found)] if in_part else expected
    fault = _difference(f"forward {what.removesuffix('_args')}s", wanted, found)
    if fault:
        raise StageMetadataError(
            f"Stage {stage_index} {fault}: stage {stage_index} was made with {what} {_described(expected)}, and has "
            f"{_described(found) or 'none'} in a microbatch, which _runtime_validate=True forbids: declare what is "
            "passed, or leave it False, with which the number of samples may be another"
        )


def _tensors(values: Any) -> list[Tensor]:
    leaves, _ = flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _described(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(text_of, tensors))


def _difference(called: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """In what tensors differ first; nothing if they do not."""
    if len(expected) != len(found):
        return f"{called}: expected {len(expected)} tensors, got {len(found)}"
    for place, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        for name, look in _LOOKS.items():
            if look(wanted) != look(got):
                return f"{called}[{place}]: {name} mismatch"
    return ""
