"""A user's own way to do an action, such as overlapping a forward and a backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError, PipeWarning
from ..schedule import Action, Op
from .executor import Executor


@dataclass(frozen=True)
class ActionContext:
    """What a custom function may need: the step's data on this rank, and the usual way to do an action."""

    executor: Executor
    schedule: Callable[[], Any] = lambda: None  # a weak reference

    @property
    def schedule_ref(self) -> Any:
        """The schedule that runs."""
        return self.schedule()

    @property
    def arg_mbs(self) -> Sequence[Sequence[Any]]:
        """The positional arguments of each microbatch, on the rank of the first stage; elsewhere there are none."""
        return self.executor.batch.args or [()] * len(self.executor.batch.samples)

    @property
    def kwarg_mbs(self) -> Sequence[Mapping[str, Any]]:
        """The keyword arguments of each microbatch."""
        return self.executor.batch.kwargs or [{}] * len(self.executor.batch.samples)

    @property
    def target_mbs(self) -> Sequence[Any] | None:
        """The targets of each microbatch, on the rank of the last stage."""
        return self.executor.batch.targets

    @property
    def losses(self) -> list[Tensor] | None:
        """The list that was passed to the step, which is filled at its end; None if there is none."""
        return self.executor.batch.losses_to_fill

    def run(self, action: Action) -> None:
        """Do an action in the usual way."""
        self.executor.usual_handlers[action.op](action)


CustomFunction = Callable[[Action, ActionContext], None]


def install(executor: Executor, functions: Mapping[Op, CustomFunction], schedule: Callable[[], Any]) -> None:
    """Let functions do the actions of their kinds."""
    context = ActionContext(executor, schedule)
    for op, function in functions.items():
        executor.handlers[op] = _bound(function, context)


def _bound(function: CustomFunction, context: ActionContext) -> Callable[[Action], None]:
    return lambda action: function(action, context)


def checked_op(op: Op | str) -> Op:
    """An op, or its text."""
    known = {each.value: each for each in Op} | {each.name: each for each in Op}
    if str(op) not in known:
        raise InputError(f"there is no action {op!r}: custom functions are for {', '.join(each.name for each in Op)}")
    return known[str(op)]


def warn_of_scaled_gradients() -> None:
    """With the peer the division belongs to REDUCE_GRAD, and so to a function that takes its place."""
    warnings.warn(
        "a custom function for REDUCE_GRAD finds gradients that are those of the mean over the batch already, for they "
        "are scaled where they begin: do not divide them again in it, or make the schedule with scale_grads=False",
        PipeWarning,
        stacklevel=3,  # the user's call of register_custom_function()
    )
