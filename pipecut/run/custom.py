"""Custom functions: a user's own way to run an action, such as overlapping a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..schedule import Action, Op
from .executor import Executor, Handler


@dataclass(frozen=True)
class ActionContext:
    """Second argument of a custom function: the step's data on this rank, and the usual way to run an action."""

    executor: Executor

    @property
    def args(self) -> Sequence[Sequence[Any]]:
        """The positional arguments of each microbatch on the rank of the first stage; empty elsewhere."""
        return self.executor.state.args

    @property
    def kwargs(self) -> Sequence[Mapping[str, Any]]:
        """The keyword arguments of each microbatch; empty if there are none."""
        return self.executor.state.kwargs

    @property
    def targets(self) -> Sequence[Any] | None:
        """The target of each microbatch on the rank of the last stage; None elsewhere."""
        return self.executor.state.targets

    def run(self, action: Action) -> None:
        """Run an action in the usual way."""
        self.executor.usual_handlers[action.op](action, self.executor.state)


CustomFunction = Callable[[Action, ActionContext], None]


def install(executor: Executor, functions: Mapping[Op, CustomFunction]) -> None:
    """Let functions run the actions of their kinds."""
    context = ActionContext(executor)
    for op, function in functions.items():
        executor.handlers[op] = _bound(function, context)


def _bound(function: CustomFunction, context: ActionContext) -> Handler:
    return lambda action, _: function(action, context)


def checked_op(op: Op | str) -> Op:
    """Return the kind of action that `op` is, or that its text or name stands for."""
    known = {each.value: each for each in Op} | {each.name: each for each in Op}
    if str(op) not in known:
        raise InputError(f"there is no action {op!r}: custom functions are for {', '.join(each.name for each in Op)}")
    return known[str(op)]
