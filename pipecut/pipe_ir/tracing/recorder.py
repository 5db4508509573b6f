"""Recorder of the module calls, checkpoints and custom autograd functions that happen while a model is traced.

torch.export keeps the operations and forgets who asked for them: a call's arguments, that a part was checkpointed,
that an operation has a backward of its own. All three are recorded here, while the traced code runs.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.function import Function
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from ...text import still
from ...torch_internals import (
    FakeTensor,
    buffers_of,
    intercepted_checkpoints,
    intercepted_differentiation,
    intercepted_functions,
    makes_higher_order,
)
from ..copies import quiet_subclass
from ..sizes.symbols import SizeDecisions
from ..structure import map_leaves
from ..traced import PLAIN_TYPES, ModuleRef, Opaque, SpanKind, Template
from .events import new_buffers
from .history import TraceHistory
from .records import (
    NOTHING,
    Attributes,
    CopiedCall,
    OpenSpan,
    RecordedNode,
    RecordedTensor,
    TracedCall,
    UntraceableError,
    attributes_of,
    changed_attributes,
    line_of,
    nodes_given,
    user_line,
)
from .repeats import Repeats


class Recorder:
    """Record of one traced run of a model, a copy of the user's; `root` is the tree of its calls."""

    def __init__(self, model: nn.Module, repeats: Repeats | None = None) -> None:
        self.model = model
        # Keyed by the modules' own dicts: the tracer hands out stand-ins that share them.
        self._paths = {id(vars(module)): path for path, module in model.named_modules()}
        self.root: OpenSpan | None = None
        self.inputs: list[RecordedTensor] = []
        self.state: list[tuple[str, RecordedTensor]] = []
        self.output: Template = NOTHING
        self.nodes: list[RecordedNode] = []
        self.constants: nn.Module | None = None
        self._stack: list[OpenSpan] = []
        self.decisions = SizeDecisions()
        self.mode_readers: set[str] = set()
        self.assigned_attributes: dict[str, tuple[str, ...]] = {}
        self._attributes_before: Attributes = {}
        self.draws: dict[str, None] = {}
        self._calls: dict[str, int] = {}
        self._tracer: Any = None
        self._constants_checked = 0
        self._copy: CopiedCall | None = None
        self.history = TraceHistory(self._paths, lambda: self.listens, repeats)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record everything that happens inside, and leave torch as it was."""
        with contextlib.ExitStack() as stack:
            for module in self.model.modules():
                self._watch_module(module)
            stack.enter_context(intercepted_functions(self._on_function))
            stack.enter_context(intercepted_checkpoints(self._on_checkpoint))
            stack.enter_context(intercepted_differentiation(self._on_differentiation))
            stack.callback(self.decisions.end)
            yield

    def note_inputs(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Begin the traced run with the model's inputs; its parameters and buffers are in place."""
        mode = get_proxy_mode()
        assert mode is not None, "the recorder only runs inside a trace"
        self._tracer = mode.tracer
        self._constants_checked = len(vars(self._tracer.root))
        self.history.begin(self.model, tensors)
        self.decisions.listen(tensors, self._stack)
        self._attributes_before = attributes_of(self.model)
        self.inputs = [self._record_tensor(tensor) for tensor in tensors]
        for named in (self.model.named_parameters, self.model.named_buffers):
            self.state += [(name, self._record_tensor(tensor)) for name, tensor in named(remove_duplicate=False)]

    def note_output(self, output: Any) -> None:
        """End the traced run: keep the graph as it is now, and the tensors and subgraphs that the tracer met."""
        self.assigned_attributes = changed_attributes(self._attributes_before, self.model)
        self.output = Template.of(output, self._record_leaf, holders=True)
        self.nodes = [RecordedNode.of(node) for node in self._tracer.graph.nodes]
        self.constants = self._tracer.root

    def note_draw(self, what: str) -> None:
        """Note that the code has decided by a random number, or may have."""
        self.draws[what] = None

    def forget(self) -> None:
        """Drop the tensors of the trace, also from its graph, which torch keeps until the next trace."""
        if self._tracer is not None:
            for node in (*self._tracer.graph.nodes, *(recorded.node for recorded in self.nodes)):
                node.meta.clear()
        self.history.forget()
        self.root, self.constants, self._tracer, self._copy = None, None, None, None
        self.inputs, self.state, self.nodes, self._stack, self.output = [], [], [], [], NOTHING

    def record(self, value: Any) -> Template:
        """Return a nested value with its tensors replaced by their records."""
        return Template.of(value, self._record_leaf)

    def _record_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._record_tensor(leaf)
        if isinstance(leaf, nn.Module):
            path = self._paths.get(id(vars(leaf)))
            return Opaque(type(leaf).__name__) if path is None else ModuleRef(path)
        if isinstance(leaf, PLAIN_TYPES):
            return leaf
        if isinstance(leaf, types.FunctionType) and not leaf.__closure__:
            return leaf
        return Opaque(type(leaf).__name__)

    def _record_tensor(self, tensor: torch.Tensor) -> Any:
        slot = get_proxy_slot(tensor, self._tracer, None)
        if slot is None:
            return tensor  # a plain attribute of the model: the tracer meets it when an operation uses it
        return RecordedTensor(slot.proxy.node, tensor.requires_grad)

    @property
    def input_values(self) -> list[torch.Tensor]:
        """The model's tensor inputs, as the tracer has them."""
        return [recorded.node.meta["val"] for recorded in self.inputs]

    @property
    def position(self) -> int:
        return len(self._tracer.graph.nodes)

    @property
    def depth(self) -> tuple[int, int]:
        """Number of spans that are open, here and in the tracer."""
        return len(self._stack), len(self._tracer.module_stack)

    def abandon(self, depth: tuple[int, int]) -> None:
        """Drop the spans that are open beyond a depth: an exception ended them."""
        del self._stack[depth[0] :]
        while len(self._tracer.module_stack) > depth[1]:
            self._tracer.module_stack.popitem()

    def _begin(self, kind: SpanKind, path: str, nth_call: int, args: Any, **options: Any) -> OpenSpan:
        span = OpenSpan(kind, path, nth_call, self.position, self.record(args), options)
        if self._stack:
            self._stack[-1].children.append(span)
        else:
            self.root = span
        self._stack.append(span)
        return span

    def _end(self, span: OpenSpan, result: Any) -> None:
        assert self._stack.pop() is span
        span.end = self.position
        span.result = Template.of(result, self._record_leaf, holders=True)

    def _watch_module(self, module: nn.Module) -> None:
        cls = type(module)
        members: dict[str, Any] = {}
        if not any("training" in vars(base) for base in cls.__mro__):
            members["training"] = property(self._read_mode, _set_mode)
        if cls.__call__ is not nn.Module.__call__:
            # The class wraps its own calls (to checkpoint them, say): what the caller passes is what counts.
            members["__call__"] = self._recorded_call(cls)
        else:
            module.register_forward_pre_hook(self._enter_module, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave_module, with_kwargs=True)
        if not isinstance(module, torch.jit.ScriptModule):
            module.__class__ = quiet_subclass(cls, members)

    def _read_mode(self, module: nn.Module) -> bool:
        """Read the attribute `training`, and note the module whose forward depends on it."""
        if self._stack:
            self.mode_readers.add(self._stack[-1].path)
        mode: bool = vars(module)["training"]
        return mode

    def _recorded_call(self, cls: type[nn.Module]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            self._enter_module(module, args, kwargs)
            return self._leave_module(module, args, kwargs, cls.__call__(module, *args, **kwargs))

        return __call__

    @property
    def listens(self) -> bool:
        """False in the branches of torch.cond and the like: these are traced into graphs of their own."""
        mode = get_proxy_mode()
        return mode is not None and mode.tracer is self._tracer

    def _enter_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.listens:
            return
        path = self._paths[id(vars(module))]
        still(f"tracing {path}")
        nth_call = self._calls.get(path, 0)
        self._calls[path] = nth_call + 1
        if self.history.following is not None:
            self.history.enter(module, args, kwargs)
            assert self._copy is not None
            self._stack.append(self._copy.enter(module))
            return
        span = self._begin("call", path, nth_call, (args, kwargs))
        span.buffers_before = dict(buffers_of(module))
        self.history.enter(module, args, kwargs)
        self._look_for_repeat(span)

    def _look_for_repeat(self, span: OpenSpan) -> None:
        """Begin to copy an earlier call, if the one that begins is like it, or to record it."""
        following, recording, numbers = self.history.following, self.history.recording, self.history.numbers
        if following is not None:
            self._copy = CopiedCall(following, span, self._tracer, self.decisions, numbers)
        elif recording is not None and recording.of_trace is None:
            recording.of_trace = nodes_given(recording, self._tracer, numbers)

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self.listens:
            return output
        if self.history.following is not None:
            return self._leave_followed(module, output)
        self.check_constants()
        span, result = self._stack[-1], output
        if len(self._stack) > 1:
            made_inside = self._made_since(span.begin)
            with self.history.paused():
                output = map_leaves(lambda leaf: self._as_own_result(leaf, made_inside), output)
        self._end(span, output)
        assigned = new_buffers(module, span.buffers_before)
        for name, tensor in assigned.items():
            recorded = self._record_tensor(tensor)
            if isinstance(recorded, RecordedTensor):
                span.assigned_buffers[name] = recorded
        recording = self.history.recording
        self.history.leave(result, output, assigned)
        if recording is not None and self.history.recording is None:
            recording.of_trace = TracedCall.of(recording, span, recording.of_trace, self._tracer, self.history.numbers)
            if recording.of_trace is None:
                self.history.forget_recorded(recording)
        return output

    def _leave_followed(self, module: nn.Module, output: Any) -> Any:
        """End a call that is like an earlier one, or a call inside it."""
        copy = self._copy
        assert copy is not None
        output = self.history.leave_followed(output, copy.leave(module))
        if self.history.following is not None:
            self._stack.pop()
            return output
        with self.history.noting_divergence():
            copy.write()
        self.mode_readers |= copy.translated(self.mode_readers)
        self._end(self._stack[-1], output)
        self._copy = None
        return output

    def check_constants(self) -> None:
        """Raise if the code since the last check took up a tensor of this trace that the tracer has not seen made."""
        known, self._constants_checked = self._constants_checked, len(vars(self._tracer.root))
        for name, value in itertools.islice(vars(self._tracer.root).items(), known, None):
            if isinstance(value, FakeTensor):
                nodes = reversed(self._tracer.graph.nodes)
                node = next(node for node in nodes if node.op == "get_attr" and node.target == name)
                line = line_of(node.meta.get("stack_trace") or "")
                raise UntraceableError(*_UNSEEN, re.sub(r'File "(.+)", line (\d+)', r"\1:\2", line))

    def _on_differentiation(self) -> None:
        if self._stack and self.listens:
            raise UntraceableError(*_DIFFERENTIATES, user_line())

    def _made_since(self, position: int) -> set[Node]:
        return set(itertools.islice(reversed(self._tracer.graph.nodes), self.position - position))

    def _as_own_result(self, leaf: Any, made_inside: set[Node]) -> Any:
        """Return an alias of an input that a module hands on: it may do something to it at another time."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        recorded = self._record_tensor(leaf)
        made_here = isinstance(recorded, RecordedTensor) and recorded.node in made_inside
        return leaf if made_here else torch.ops.aten.alias.default(leaf)

    def _on_function(self, cls: type[Function], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._stack or not self.listens or makes_higher_order(cls):
            return run(*args, **kwargs)
        self.history.cannot_be_repeated()
        if cls is torch_checkpoint.CheckpointFunction:
            function, preserve_rng_state, *inputs = args
            options = {"use_reentrant": True, "preserve_rng_state": preserve_rng_state}
            span = self._begin("checkpoint", self._stack[-1].path, 0, tuple(inputs), **options)
            # As at run time: a reentrant checkpoint none of whose inputs has a gradient gives none to its results.
            with torch.set_grad_enabled(any(isinstance(item, torch.Tensor) and item.requires_grad for item in inputs)):
                output = function(*inputs)
        else:
            span = self._begin("function", self._stack[-1].path, 0, (args, kwargs), function=cls)
            output = run(*args, **kwargs)
        self._end(span, output)
        return output

    def _on_checkpoint(self, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[None]:
        if not self.listens:
            yield
            return
        self.history.cannot_be_repeated()
        span = self._begin("checkpoint", self._stack[-1].path, 0, args, **options)
        yield
        self._end(span, None)


# What a trace cannot hold though torch.export may not notice, and what to do about it.
_UNSEEN = (
    "it uses a tensor that comes from no operation, such as x.data",
    "use x.detach() in place of x.data, and write to parameters as they are, under torch.no_grad()",
)
_DIFFERENTIATES = (
    "it computes derivatives in its forward, as with torch.autograd.grad or torch.func.grad",
    "move these lines into a module of their own: it then stays as it is, and the model is cut before and after it",
)


def _set_mode(module: nn.Module, training: bool) -> None:
    vars(module)["training"] = training
