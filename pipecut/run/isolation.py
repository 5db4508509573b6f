"""Isolation of ranks: the first training step on ranks shows whether one uses or changes what others hold.

The process of a rank usually has the whole model, of which it trains its own stages. What reaches the rest of it past
the trace (a loss_fn over all of the model's parameters, a hook or a closure with another layer's weight) gets values
there that nobody updates, and gives gradients that nobody adds up. A list that a hook fills is empty where loss_fn
reads it. The first training step is watched for this:

- graphs of autograd must lead to no parameter that other ranks hold; none may get a gradient or be written to;
- where hooks, closures or loss_fn lead to such a parameter, no operation of a forward may use it;
- lists, dicts, attributes and variables that the code of loss_fn names may change on its own rank only;
- neither may numbers there that the code of a module names which did something else when the model ran again: a count
  that layers of several stages share is another one on each rank.

That takes about a microsecond for each operation of a forward and each tensor of other ranks, and is over with the
step. Hooks count as code of their modules; state that hooks of several stages name is a warning, for they may be no
more than statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import Node

from ..errors import IsolationError, warn
from ..pipe_ir import KeptValue, NamedState, Reads, functions_around, storages_of, tensors_in_reach
from ..schedule import Action, Op
from ..stage import PipelineStage, held_elsewhere
from ..text import listed
from ..torch_internals import hooks_of, storage_id, version_of
from .executor import Executor, Handler
from .state import StepState

_WATCHED = (Op.FORWARD, Op.FULL_BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_SHOWN = 4
_REMEDY = (
    "A loss of parameters, such as a regularisation, is added by schedule.add_loss(). Anything else has to go through "
    "the forward of the model, where the trace sees it and ties or sends it; or cut so that both are in one stage"
)


class Isolation:
    """Watches training steps: on ranks the first one, and any that is asked for."""

    def __init__(self, stages: Sequence[PipelineStage], loss_fn: object, *, in_process: bool) -> None:
        self._in_process = in_process
        self._origin, self._infos = stages[0].origin, stages[0].pipe_info
        self._loss_fn = loss_fn
        self._is_due = not in_process
        self._is_checked = False  # that loss_fn uses nothing which stages do not keep for it
        self._has_watched = False  # a whole training step, for what loss_fn uses

    def begin(self, executors: Iterable[Executor], *, training: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a step: of a training step that is watched, one that raises if stages leave their rank.

        Here is all that may fail: what hooks and closures lead to is looked for in objects of any kind.
        """
        if not self._is_checked:
            self._check_loss_fn()
        if training and self._is_due:
            return self._watching([(executor, self._watch_of(executor)) for executor in executors])
        if training and not self._has_watched:
            watches = [(executor, self._watch_of_copies(executor)) for executor in executors]
            return self._watching([(executor, watch) for executor, watch in watches if watch is not None])
        return contextlib.nullcontext()

    def _check_loss_fn(self) -> None:
        """Raise if loss_fn uses what a forward changes in objects of Python's, and stages do not: once."""
        origin = self._origin
        model = None if origin is None else origin.model
        if origin is not None and model is not None and origin.kept:
            state = NamedState(self._loss_fn, "loss_fn")
            for kept in origin.kept:
                slot = state.slot_of(kept.holder_in(model), kept.name)
                if slot is not None and kept.is_lost:
                    raise IsolationError(_KEPT.format(place=slot.of(str(kept.name)), who=kept.who(model)))
            self._check_modules(model, [kept for kept in origin.kept if not kept.settles])
        self._is_checked = True

    def _check_modules(self, model: nn.Module, changed: Sequence[KeptValue]) -> None:
        """Raise if a module that differs from call to call uses what the forward of another stage changes."""
        if self._in_process:  # where it finds what stages keep; what they lose was found with the other runs
            changed = [kept for kept in changed if kept.is_lost and not kept.is_copied]
        for info in self._infos.stages if changed and self._infos is not None else ():
            here = tuple(f"{label.partition('#')[0]}." for label in info.modules)
            others = [kept for kept in changed if not f"{kept.path}.".startswith(here)]
            for path in info.changing if others else ():
                state = _state_of(model.get_submodule(path))
                for kept in others:
                    slot = state.slot_of(kept.holder_in(model), kept.name)
                    if slot is not None:
                        meaning = _OTHER_MODULE.format(path=path, stage=info.index)
                        raise IsolationError(
                            f"{kept.changer(model)} changes {slot.of(str(kept.name))}, which {meaning}"
                        )

    def ask(self) -> None:
        """Let the next training step be watched."""
        self._is_due = True

    @contextlib.contextmanager
    def _watching(self, watches: Sequence[tuple[Executor, _Watch]]) -> Iterator[None]:
        usual = [(executor, {op: executor.handlers[op] for op in _WATCHED}) for executor, _ in watches]
        for executor, watch in watches:
            for op in _WATCHED:
                executor.handlers[op] = watch.around(executor.handlers[op])
        try:
            yield
        finally:
            for executor, handlers in usual:
                executor.handlers.update(handlers)
        self._is_due, self._has_watched = False, True

    def _watch_of(self, executor: Executor) -> _Watch:
        origin = self._origin
        model = None if origin is None else origin.model
        own = {id(tensor) for stage in executor.stages.values() for tensor in _tensors_of(stage.submod).values()}
        every = {} if model is None else _tensors_of(model)
        others = {name: tensor for name, tensor in every.items() if id(tensor) not in own}
        where = {name: "" if origin is None else held_elsewhere(origin.holders, name) for name in others}
        has_loss = any(stage.is_last for stage in executor.stages.values())
        named = NamedState(self._loss_fn, "loss_fn")
        touched = [_Touched(named.moved(_copies_in(executor)), _COPY), *_modules_of_others(executor, model)]
        if not self._in_process:
            touched += _hooks_of_others(executor, model)
        if not has_loss:
            touched.append(_Touched(named, _LOSS_FN))
        loss_fn = self._loss_fn if has_loss else None
        return _Watch(executor.stages, others, where, touched, loss_fn, sees_others=self._in_process)

    def _watch_of_copies(self, executor: Executor) -> _Watch | None:
        """Return a watch over what loss_fn reads in the model, and stages have in copies; None if there is nothing."""
        state = NamedState(self._loss_fn, "loss_fn").moved(_copies_in(executor))
        if not state.slots:
            return None
        return _Watch(executor.stages, {}, {}, [_Touched(state, _COPY)], None, sees_others=True)


def _modules_of_others(executor: Executor, model: nn.Module | None) -> list[_Touched]:
    """Return the state of Python that modules of other stages use, of those by which it makes a difference."""
    infos = next((stage.pipe_info for stage in executor.stages.values()), None)
    if infos is None or model is None:
        return []
    return [
        _Touched(
            _state_of(model.get_submodule(path), plain=True),
            _OTHER_MODULE.format(path=path, stage=info.index),
        )
        for info in infos.stages
        if info.index not in executor.stages
        for path in info.changing
    ]


def _hooks_of_others(executor: Executor, model: nn.Module | None) -> Iterator[_Touched]:
    """Yield the state of Python that hooks of other stages name; they may only write to it, as statistics."""
    infos = next((stage.pipe_info for stage in executor.stages.values()), None)
    if infos is None or model is None:
        return
    for info in [info for info in infos.stages if info.index not in executor.stages]:
        within = tuple(f"{label.partition('#')[0]}." for label in info.modules)
        for path, module in model.named_modules():
            hooks = hooks_of(module)
            if hooks and f"{path}.".startswith(within):
                state = NamedState(None, "a hook", also=hooks)
                yield _Touched(state, _OTHER_HOOK.format(path=path, stage=info.index), only_warns=True)


def _state_of(module: nn.Module, *, plain: bool = False) -> NamedState:
    """Return the state that the forward of a module and its hooks name."""
    return NamedState(module.forward, "the module", plain=plain, also=hooks_of(module))


def _copies_in(executor: Executor) -> dict[int, nn.Module]:
    """Return the parts of the stages of a rank, by the id of the attributes of the model's modules in their place."""
    origins = [stage.origin for stage in executor.stages.values() if stage.origin is not None]
    return {id(vars(theirs)): ours for origin in origins for theirs, ours in origin.parts()}


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_buffers(remove_duplicate=False)), **dict(module.named_parameters())}


class _Trace:
    """Signs that a tensor of another rank was changed here: its version, and its gradient with its own version."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._has_version = not tensor.is_inference()
        self._version = version_of(tensor) if self._has_version else 0
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._gradient_version = 0 if self._gradient is None else version_of(self._gradient)

    def change(self) -> str:
        """Return how the tensor was changed since, in words; nothing if it was not."""
        tensor, gradient = self._tensor, self._gradient
        if self._has_version and version_of(tensor) != self._version:
            return "changes"
        is_new = tensor.is_leaf and tensor.grad is not gradient
        is_added_to = gradient is not None and version_of(gradient) != self._gradient_version
        return "gives a gradient to" if is_new or is_added_to else ""


@dataclass(frozen=True)
class _Touched:
    """State of Python that stages may not change; `meaning` is what a change says of it, in words."""

    state: NamedState
    meaning: str
    only_warns: bool = False


class _Watch:
    """Looks after the stages of one rank: `others` are the model's tensors that these do not hold."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        others: Mapping[str, Tensor],
        holders: Mapping[str, str],
        touched: Sequence[_Touched],
        loss_fn: object,
        *,
        sees_others: bool,
    ) -> None:
        self._stages = stages
        self._names = {id(tensor): name for name, tensor in others.items()}
        self._holders = holders
        self._touched = list(touched)
        roots = [root for stage in stages.values() for root in functions_around(stage.submod)]
        parts = [part for stage in stages.values() for part in stage.submod.modules()]
        own = {storage for stage in stages.values() for storage in storages_of(stage.submod)}
        self._in_reach = {
            storage_id(tensor): self._names[id(tensor)]
            for tensor in tensors_in_reach([*roots, loss_fn], apart=parts)
            if id(tensor) in self._names and tensor.requires_grad and storage_id(tensor) not in own
        }
        # In one process they change in the steps of the ranks that hold them.
        self._before = {} if sees_others else {name: _Trace(tensor) for name, tensor in others.items()}
        self._kept = list(others.values())  # their ids stay theirs

    def around(self, handler: Handler) -> Handler:
        """Return a handler of actions that looks at what they have done."""

        def watched(action: Action, state: StepState) -> None:
            stage = self._stages[action.stage]
            for each in self._touched:
                each.state.note()
            with self._reads(stage) if self._in_reach and action.op is Op.FORWARD else contextlib.nullcontext():
                handler(action, state)
            if action.op is Op.FORWARD:
                flight = None if action.microbatch is None else stage.flights.get(action.microbatch)
                if flight is not None:
                    roots = flight.outputs if flight.loss is None else [flight.loss]
                    self._check_graph(stage, roots)
            self._check_changes(stage, action)
            self._check_touched(stage, action)

        return watched

    def _reads(self, stage: PipelineStage) -> Reads:
        """Return a context in which operations on what others train raise: here its values are never updated."""

        def found(name: str, line: str) -> None:
            raise IsolationError(
                f"stage {stage.stage_index} uses {name} (of {self._holders[name]}) at {line}, past the values that are "
                f"sent. On separate ranks its gradient is lost, and its value here is never updated. {_REMEDY}"
            )

        return Reads(self._in_reach, found)

    def _check_graph(self, stage: PipelineStage, roots: Iterable[object]) -> None:
        reached = {id(leaf) for leaf in _leaves_of(root for root in roots if isinstance(root, Tensor))}
        found = [f"{name} (of {self._holders[name]})" for number, name in self._names.items() if number in reached]
        if found:
            place = "the loss" if stage.is_last else "an output"
            raise IsolationError(
                f"{place} of stage {stage.stage_index} depends on {listed(found, _SHOWN)}, past the values that are "
                f"sent: {self._way(stage)}. On separate ranks that gradient is lost, and the value here is never "
                f"updated. {_REMEDY}"
            )

    def _check_changes(self, stage: PipelineStage, action: Action) -> None:
        for name, trace in self._before.items():
            change = trace.change()
            if change:
                raise IsolationError(
                    f"stage {stage.stage_index} {change} {name} (of {self._holders[name]}) in {action}: "
                    f"{self._way(stage)}. That does not reach the rank that holds it. {_REMEDY}"
                )

    def _check_touched(self, stage: PipelineStage, action: Action) -> None:
        for each in list(self._touched):
            change = each.state.change()
            if change and each.only_warns:
                self._touched.remove(each)
                warn(f"stage {stage.stage_index} changes {change}, which {each.meaning}")
            elif change:
                raise IsolationError(f"stage {stage.stage_index} changes {change} in {action}, which {each.meaning}")

    def _way(self, stage: PipelineStage) -> str:
        ways = "a hook, a closure or an attribute that refers to the model"
        return f"by loss_fn, or by {ways}" if stage.is_last else f"by {ways}"


def _leaves_of(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors at which the graphs of some tensors begin."""
    waiting: list[Node] = []
    for root in roots:
        if root.grad_fn is not None:
            waiting.append(root.grad_fn)
        elif root.requires_grad:
            yield root
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions if following is not None]


# The state of Python that a loss_fn uses, or a module of another stage.

_LOSS_FN = (
    "loss_fn uses: on separate ranks loss_fn runs in another process, and finds its own as it was. Let the model "
    "return what loss_fn needs in its output, which is sent; or, if loss_fn reads nothing of it, give it an object of "
    "its own"
)
_COPY = (
    "loss_fn uses as that of the model: the stage has a copy of the module, and loss_fn finds the model's own as it "
    "was. Let the model return what loss_fn needs in its output"
)
_KEPT = (
    "loss_fn uses {place}, which the forward of {who}. loss_fn would find it as it was before. Let the model return "
    "what loss_fn needs in its output, which is sent; or, if loss_fn reads nothing of it, give it an object of its own"
)
_OTHER_HOOK = (
    "a hook on {path!r} of stage {stage} names too: on separate ranks each has its own, and a hook that reads what "
    "others write finds it as it was. pipecut.verify() tells whether that makes a difference; if it does, hand the "
    "value over as a tensor, in arguments and results, or cut so that both are in one stage"
)
_OTHER_MODULE = (
    "{path!r} of stage {stage} uses, and that module does something else from call to call: on separate ranks each has "
    "its own. Cut so that both are in one stage, let each module have an object of its own, or hand the value over as "
    "a tensor, in arguments and results"
)
