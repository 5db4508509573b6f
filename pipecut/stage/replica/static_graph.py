"""DistributedDataParallel with static_graph=True: it learns in its first step what to expect in the others.

Its reducer counts then how often each parameter gets a gradient, and waits for as many in every later step. A first
step of a pipeline has that of all microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ...errors import InputError

_ATTRIBUTE = "_pipecut_static_graph"


class StaticGraph:
    """What one reducer has learnt; `awaited` has the number of each parameter as often as it waits for it."""

    def __init__(self, module: Any, parameters: Mapping[str, Tensor]) -> None:
        if module._static_graph_delay_allreduce_enqueued:
            raise InputError(
                "DistributedDataParallel with static_graph=True has run outside of the pipeline, and expects each step "
                "to be like that: make it anew for the stage"
            )
        self.awaited: list[int] = []
        self.unused_here: set[str] = set()  # in the first step; what another copy uses is averaged nevertheless
        self.unused_anywhere: set[str] = set()
        self._is_first_step = True
        self._is_counting = False
        self._counters: list[RemovableHandle] = []
        self._module = module
        self._parameters = parameters

    @classmethod
    def of(cls, module: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> StaticGraph:
        """The one of a module, which may be in several stages one after the other."""
        known: StaticGraph | None = module.__dict__.get(_ATTRIBUTE)
        if known is None:
            known = module.__dict__[_ATTRIBUTE] = cls(module, parameters)
        return known

    def before_forward(self) -> None:
        """Begin to count with the reducer, and keep it from averaging after the first backward."""
        if self._is_first_step and not self._is_counting:
            self._is_counting = True
            self._module._static_graph_delay_allreduce_enqueued = True
            for number, parameter in enumerate(self._parameters.values()):
                count = functools.partial(self._count, number)
                handle = parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
                self._counters.append(handle)

    def _count(self, number: int, _: Tensor) -> None:
        self.awaited.append(number)

    def average_first_step(self) -> bool:
        """Average in the way of a first step, if this is one."""
        if not self._is_first_step:
            return False
        self._is_first_step = False
        for counter in self._counters:
            counter.remove()
        self.unused_here = self._without_gradient()
        reducer = self._module.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        reducer._delay_all_reduce()
        self.unused_anywhere = self._without_gradient()
        return True

    def _without_gradient(self) -> set[str]:
        return {name for name, parameter in self._parameters.items() if parameter.grad is None}
