"""Checks of what code written for torch.distributed.pipelining passes to a stage, or declares of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PipeError, StageMetadataError
from ..pipe_ir import flatten
from ..stage import MeshLayout, describe_tensor, placement_of

_LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda tensor: tensor.shape,
    "dtype": lambda tensor: tensor.dtype,
    "placement": lambda tensor: placement_of(MeshLayout.of(tensor)),
}


class StageCallError(PipeError, AssertionError):
    """A call of a stage is out of order; also an AssertionError, as with upstream."""


class GradientsInTransit(tuple[Tensor, ...]):
    """Stands for gradients that the executor hands on by itself: to be passed on, not looked into."""

    def __iter__(self) -> Any:
        raise StageCallError(
            "the gradients of get_local_bwd_output() are on their way already in a step, and cannot be looked into or "
            "changed: pass what it returned to set_local_bwd_input(), and put a hook on a tensor to change its gradient"
        )

    def __getitem__(self, place: Any) -> Any:
        return self.__iter__()


def are_same(given: Any, held: Any) -> bool:
    """Return True if nested values hold the same tensors, by memory and layout, in the same places, and equal rest.

    >>> x = torch.ones(4)
    >>> are_same(([x[:2]], 1), ([x[:2]], 1)), are_same(x * 1, x), are_same((x,), x)
    (True, False, False)
    """
    if given is held:
        return True
    leaves, structure = flatten(given)
    wanted, wanted_structure = flatten(held)
    if list(structure.paths()) != list(wanted_structure.paths()):
        return False
    return all(map(_is_same_leaf, leaves, wanted))


def refuse_another_factor(call: str, factor: float, wanted: int) -> None:
    """Raise if a call during a step asks for another scale than the one that gradients have from their beginning.

    >>> refuse_another_factor("scale_grads", 4, 4)
    >>> refuse_another_factor("scale_grads", 8, 4)
    Traceback (most recent call last):
    pipecut.compat.checks.StageCallError: scale_grads(8) in a step whose gradients are scaled already, as if \
divided by 4: pass 4, with which nothing is scaled twice, or make the schedule with scale_grads=False, where it is 1; \
scale in loss_fn, or the gradients after step()
    """
    if factor != wanted:
        other = "pass scale_grads=True to the schedule for the mean over the batch"
        done = "are not scaled, for the schedule has scale_grads=False: pass 1"
        if wanted != 1:
            done = f"are scaled already, as if divided by {wanted}: pass {wanted}, with which nothing is scaled twice"
            other = "make the schedule with scale_grads=False, where it is 1"
        raise StageCallError(
            f"{call}({factor}) in a step whose gradients {done}, or {other}; scale in loss_fn, or the gradients after "
            "step()"
        )


def _is_same_leaf(given: Any, held: Any) -> bool:
    if given is held:
        return True
    if not isinstance(given, Tensor) or not isinstance(held, Tensor):
        return not isinstance(given, Tensor) and not isinstance(held, Tensor) and bool(given == held)
    plain = all(type(each) in (Tensor, nn.Parameter) and each.layout == torch.strided for each in (given, held))
    return plain and _memory(given) == _memory(held)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()


def check_declared(stage_index: int, what: str, declared: Any, got: Any, *, in_part: bool) -> None:
    """Raise unless tensors are as they were declared, number of samples included.

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
    return ", ".join(map(describe_tensor, tensors))


def _difference(called: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """Describe the first difference; an empty text if there is none."""
    if len(expected) != len(found):
        return f"{called}: expected {len(expected)} tensors, got {len(found)}"
    for place, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        for name, look in _LOOKS.items():
            if look(wanted) != look(got):
                return f"{called}[{place}]: {name} mismatch"
    return ""
