"""The parameters of a stage, and whether somebody waits for autograd to add gradients to them.

autograd adds a gradient to a parameter in a node of its own, the accumulator. Wrappers such as DistributedDataParallel
put hooks on it, which cannot be listed. But they must hold on to the accumulator, for it dies with the graph otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .hook_count import hooks_of_others
from .worth import least_rows, rows_of, sizes_of

_MARK = "pipecut looks who holds this node"


class StageWeights:
    """The parameters of one stage. Make it before a forward, while no graph over them is alive.

    With it `input_backward` can tell that nobody listens to the gradients of a stage, and need not make a detour then.
    Hooks on tensors are always seen, those that were put on accumulators since then only by `look_again()`.

    >>> layer = torch.nn.Linear(4, 4)
    >>> weights = StageWeights(layer.parameters())
    >>> weights.are_free()
    True
    >>> handle = layer.bias.register_post_accumulate_grad_hook(print)
    >>> weights.are_free()
    False
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = tuple({id(parameter): parameter for parameter in parameters}.values())
        plain = [parameter for parameter in self.parameters if type(parameter) in (Tensor, torch.nn.Parameter)]
        sizes = sizes_of(plain)
        self._least_rows = {on_cpu: least_rows(sizes, on_cpu) for on_cpu in (False, True)}
        # A subclass may be more than it seems: a shard of a parameter, say, of which the graph knows the whole.
        self._are_plain = len(plain) == len(self.parameters)
        self._are_held = True
        self._hooks_at_look = self._hooks_when_free = -1
        self.look_again()

    def look_again(self) -> None:
        """Find out anew who holds the accumulators. Only right while no graph over them is alive: between two steps.

        It takes next to no time if nobody has put a hook on anything since.
        """
        if self._are_plain and (self._are_held or self._hooks_at_look != hooks_of_others()):
            self._hooks_at_look = hooks_of_others()
            self._are_held = any(map(_is_held, self.parameters))

    def pay_for(self, values: Iterable[Tensor], on_cpu: bool) -> bool:
        """Whether it pays to put weight gradients off, if the stage ran on these values."""
        return rows_of(values) >= self._least_rows[on_cpu]

    def are_free(self) -> bool:
        """Whether it makes no difference who adds gradients to `.grad`: nobody waits for autograd to do it."""
        if self._are_held:
            return False
        if self._hooks_when_free != hooks_of_others():
            if any(map(_has_hooks, self.parameters)):
                return False
            self._hooks_when_free = hooks_of_others()
        return True


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_held(parameter: Tensor) -> bool:
    """Whether the accumulator outlives a look at it."""
    if not parameter.requires_grad:
        return False
    _notes_of(parameter)[_MARK] = token = object()
    return _notes_of(parameter).get(_MARK) is token


def _notes_of(parameter: Tensor) -> dict[str, Any]:
    """A dict that lives and dies with the accumulator."""
    notes: Any = get_gradient_edge(parameter).node.metadata
    return cast(dict[str, Any], notes)
