"""Whether what a custom function passes to a stage in a step is what the executor holds, and works with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PipeError
from ..pipe_ir import flatten


class StageCallError(PipeError, AssertionError):
    """A call of a stage is not in order. It is an AssertionError too, which code written for the peer expects."""


class OnTheirWay(tuple[Tensor, ...]):
    """In the place of gradients that the executor hands on by itself: they can be passed on, and not looked into."""

    def __iter__(self) -> Any:
        raise StageCallError(
            "the gradients of get_local_bwd_output() are on their way already in a step, and cannot be looked into or "
            "changed: pass what it returned to set_local_bwd_input(), and put a hook on a tensor to change its gradient"
        )

    def __getitem__(self, place: Any) -> Any:
        return self.__iter__()


def are_same(given: Any, held: Any) -> bool:
    """Whether two nested values have the same tensors, by memory and layout, in the same places, and equal rest.

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
    """In a step, gradients are scaled where they begin; a call that scales them can only ask for the same.

    >>> refuse_another_factor("scale_grads", 4, 4)
    >>> refuse_another_factor("scale_grads", 8, 4)
    Traceback (most recent call last):
    pipecut.stage.passed_values.StageCallError: scale_grads(8) in a step whose gradients are scaled already, as if \
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
