"""Cuts that the user asks for, by marks, module paths or a policy, all brought to one SplitPlan."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..errors import SplitError, warn
from ..pipe_ir import HERE, Operation, Ref, Size, Span, TracedModel, is_mark
from ..text import did_you_mean, listed, plural
from .cost import ConcreteCosts


class SplitPoint(enum.Enum):
    """The side of a module on which to cut."""

    BEGINNING = 1
    END = 2


@dataclass(frozen=True)
class Cut:
    """A place to cut, as a tick of the trace, and how the user knows it."""

    tick: int
    label: str
    path: str


@dataclass(frozen=True)
class SplitPlan:
    """The ticks at which stages 1, 2, ... begin; `balance` says in words how even the stages are, where it is known."""

    cuts: tuple[Cut, ...]
    balance: str = ""

    @property
    def ticks(self) -> tuple[int, ...]:
        return tuple(cut.tick for cut in self.cuts)


def check_split_spec(model: nn.Module, split_spec: object) -> None:
    """Raise on a split_spec that is not valid, before anything is traced."""
    if not isinstance(split_spec, Mapping):
        raise SplitError(f"split_spec must be a dict of module path to SplitPoint, got {type(split_spec).__name__}")
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    faults = []
    for path, point in split_spec.items():
        if not isinstance(path, str):
            faults.append(f"split_spec has the key {path!r}; a key is a module path such as 'layers.4'")
            continue
        if not isinstance(point, SplitPoint):
            faults.append(f"split_spec[{path!r}] is {point!r}; it must be SplitPoint.BEGINNING or SplitPoint.END")
        plain, _, nth = path.partition("#")
        if plain == "" or plain not in paths:
            faults.append(
                f"split_spec names {plain!r}, which is not a module of {type(model).__name__}."
                + did_you_mean(plain, paths - {""})
            )
        elif "#" in path and not nth.isdigit():
            faults.append(
                f"split_spec names {path!r}; after # comes the number of the call: {plain}#1 is the second call"
            )
    if faults:
        raise SplitError("\n".join(faults))


def cuts_by_spec(traced: TracedModel, split_spec: Mapping[str, SplitPoint], *, warns: bool = True) -> SplitPlan:
    """Return the cuts at the beginnings and ends of modules, and at the model's own pipe_split() marks."""
    return _joined_plan(traced, [*_marked(traced), *_named(traced, split_spec)], warns)


def cuts_by_marks(traced: TracedModel, *, warns: bool = True) -> SplitPlan:
    """Return the cuts at the model's own pipe_split() marks."""
    return _joined_plan(traced, _marked(traced), warns)


def _named(traced: TracedModel, split_spec: Mapping[str, SplitPoint]) -> list[Cut]:
    first_path = {module: path for path, module in traced.model.named_modules()}
    calls: dict[str, list[Span]] = {}
    for span in traced.spans("call"):
        calls.setdefault(span.path, []).append(span)
    cuts = []
    for path, point in split_spec.items():
        plain, _, nth = path.partition("#")
        made = calls.get(first_path[traced.model.get_submodule(plain)], [])
        number = int(nth or 0)
        if number >= len(made):
            raise SplitError(_never_called(traced, plain, number, len(made)))
        span = made[number]
        tick = span.begin if point is SplitPoint.BEGINNING else span.end + 1
        side = "before" if point is SplitPoint.BEGINNING else "after"
        cuts.append(Cut(tick, f"the cut {side} {path!r}", span.path))
    return cuts


def _never_called(traced: TracedModel, path: str, number: int, calls: int) -> str:
    model, fallback = traced.model, traced.fallback(path)
    if fallback is not None and fallback.path != path:
        return (
            f"split_spec names {path!r}, inside {fallback.path!r}, which {fallback.because} ({fallback.reason}) and "
            f"cannot be cut inside; cut before or after {fallback.path!r}"
        )
    if calls:
        return (
            f"split_spec names call #{number} of {path!r}, which is called {calls} "
            f"{plural('time', calls)} (#0 to #{calls - 1})"
        )
    if traced.draws:
        return f"split_spec names {path!r}, which did not run{modules_left_out(traced)}"
    called = (
        "a container is never called itself: name one of its members"
        if isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict)
        else ("a module runs when it is called: name one that is, or call it as module(x), not module.forward(x)")
    )
    return f"split_spec names {path!r}, which the model does not call with these example inputs; {called}"


def modules_left_out(traced: TracedModel) -> str:
    """Return words for the modules that did not run in a trace whose code may have decided by random numbers."""
    called = {span.path for span in traced.spans("call")}
    owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in traced.model.named_parameters())
    left = [path for path in owners if path and not any(f"{path}.".startswith(f"{each}.") for each in called if each)]
    if not left or not traced.draws:
        return ""
    return (
        f". In this trace {listed(map(repr, left), 4)} of {type(traced.model).__name__} did not run, and its forward "
        f"decides by random numbers ({traced.draws[0]}): a draw, such as that of LayerDrop, has left them out; set its "
        "probability to 0"
    )


def _marked(traced: TracedModel) -> list[Cut]:
    _check_no_mark_in_subgraphs(traced)
    return [
        Cut(op.tick, f"pipe_split() at {_place(op)}", _calls_around(traced.root, op.tick)[-1].path)
        for op in traced.operations
        if op.kind == "mark"
    ]


def _joined_plan(traced: TracedModel, cuts: Iterable[Cut], warns: bool) -> SplitPlan:
    """Return a plan in which cuts with nothing between them, by marks or by names, count as one."""
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: cut.tick):
        if not kept or _has_work(traced, kept[-1].tick, cut.tick):
            kept.append(cut)
        elif warns:
            warn(f"two cuts have nothing between them and count as one: {kept[-1].label} and {cut.label}")
    return _checked_plan(traced, kept)


def _check_no_mark_in_subgraphs(traced: TracedModel) -> None:
    for op in traced.operations:
        if isinstance(op.constant, GraphModule):
            graphs = [module.graph for module in op.constant.modules() if isinstance(module, GraphModule)]
            if any(is_mark(node.target) for graph in graphs for node in graph.nodes):
                raise SplitError(
                    "pipe_split() stands inside a function passed to torch.cond or another higher-order "
                    "operator, which cannot be cut; move the mark before or after it"
                )


def _checked_plan(traced: TracedModel, cuts: Iterable[Cut]) -> SplitPlan:
    """Order cuts; raise if one is inside a region, or has an empty stage beside it."""
    regions = Regions(traced)
    settled = []
    for cut in cuts:
        tick, inside = regions.move_outside(cut.tick)
        if inside:
            where = f"'{cut.path}'" if cut.path else "the model's forward"
            raise SplitError(
                f"{cut.label} is inside {inside} (in {where}), which must stay whole; move the cut before or after it"
            )
        settled.append(replace(cut, tick=tick))
    settled.sort(key=lambda cut: cut.tick)
    _check_no_empty_stage(traced, settled)
    return SplitPlan(tuple(settled))


def _check_no_empty_stage(traced: TracedModel, cuts: Sequence[Cut]) -> None:
    bounds = [traced.root.begin, *(cut.tick for cut in cuts), traced.root.end + 1]
    labels = ["the beginning of the model", *(cut.label for cut in cuts), "the end of the model"]
    for stage in range(len(bounds) - 1):
        if not _has_work(traced, bounds[stage], bounds[stage + 1]):
            raise SplitError(
                f"stage {stage} would be empty: there is nothing to run between {labels[stage]} and "
                f"{labels[stage + 1]}; remove one of the two"
            )


def _has_work(traced: TracedModel, begin: int, end: int) -> bool:
    return any(op.kind == "op" for op in traced.operations_within(begin, end))


def _calls_around(root: Span, tick: int) -> list[Span]:
    """Return the module calls that are going on at a tick, the innermost last."""
    around = [root]
    inner: Span | None = root
    while inner is not None:
        inner = next((child for child in inner.children if child.begin < tick <= child.end), None)
        if inner is not None and inner.kind == "call":
            around.append(inner)
    return around


def _place(mark: Operation) -> str:
    return mark.source.replace("File ", "").split(", in ")[0] or "an unknown line"


# Cuts by a `split_policy`: a function that gets the traced model as a GraphModule and inserts marks.


SplitPolicy = Callable[[GraphModule], GraphModule]


_OPERATION = "pipecut_operation"


def cuts_by_policy(traced: TracedModel, policy: SplitPolicy) -> SplitPlan:
    """Show the policy the traced model, and cut where it put marks."""
    answer = policy(_as_graph_module(traced))
    if not isinstance(answer, GraphModule):
        raise SplitError(
            f"split_policy returned {type(answer).__name__}; it must return a GraphModule: the one that it got, with "
            "marks inserted by graph.call_function(pipe_split)"
        )
    return _checked_plan(traced, [_cut_at(traced, node) for node in answer.graph.nodes if is_mark(node.target)])


def _cut_at(traced: TracedModel, mark: Node) -> Cut:
    before = _nearest_operation(traced, mark, lambda node: node.prev)
    after = _nearest_operation(traced, mark, lambda node: node.next)
    begin = traced.root.begin if before is None else before.tick
    end = traced.root.end if after is None else after.tick
    # Calls that end between the two operations are over at the mark; calls that begin there have not begun.
    over = [span.end for span in traced.spans("call") if span.begin <= begin < span.end < end]
    tick = max(over, default=begin) + 1
    label = f"the split_policy's mark {f'before {after.name}' if after else 'at the end'}"
    return Cut(tick, label, _calls_around(traced.root, tick)[-1].path)


def _nearest_operation(traced: TracedModel, node: Node, move: Callable[[Node], Node]) -> Operation | None:
    node = move(node)
    while node.op != "root":
        if _OPERATION in node.meta:
            index: int = node.meta[_OPERATION]
            return traced.operations[index]
        node = move(node)
    return None


def _as_graph_module(traced: TracedModel) -> GraphModule:
    """Return the trace as a plain GraphModule to look at: parameters as get_attr, sizes as in the example inputs."""
    graph = Graph()
    at = ConcreteCosts(traced, traced.hints)
    attributes: dict[str, Any] = {}
    nodes: dict[int, Node] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, Ref):
            return nodes[value.index]
        if isinstance(value, Size):
            return at.number(value.expr)
        if isinstance(value, tuple | list):
            return type(value)(argument(item) for item in value)
        return traced.device if value is HERE else value

    def add(op: Operation) -> Node:
        if op.kind == "input":
            return graph.placeholder(op.name)
        if op.kind in ("state", "constant"):
            attributes[op.target] = _tensor(traced, op)
            return graph.get_attr(op.target)
        kwargs = {key: argument(value) for key, value in op.kwargs.items()}
        return graph.create_node("call_function", op.target, tuple(map(argument, op.args)), kwargs, name=op.name)

    for op in sorted(traced.operations, key=lambda op: op.tick):
        node = nodes[op.index] = add(op)
        if op.spec is not None:
            shape = list(map(at.number, op.spec.shape))
            node.meta["val"] = torch.empty(shape, dtype=op.spec.dtype, device="meta")
        if op.kind == "op":
            node.meta[_OPERATION] = op.index
            around = _calls_around(traced.root, op.tick)
            node.meta["nn_module_stack"] = {
                call.label: (call.path, type(traced.model.get_submodule(call.path))) for call in around
            }
    graph.output(tuple(nodes[index] for index in traced.output.refs))
    return GraphModule(attributes, graph)


def _tensor(traced: TracedModel, op: Operation) -> Any:
    if op.kind == "constant":
        return op.constant
    path, _, name = op.target.rpartition(".")
    return getattr(traced.model.get_submodule(path), name)


class Regions:
    """Parts of a trace that must stay whole: checkpoints, autograd functions, vmap, modules that were not traced."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        self._spans = [span for span in traced.spans() if span.kind != "call" or traced.fallback(span.path)]
        self._operations = [op for op in traced.operations if op.kind == "op"]
        self._ticks = [op.tick for op in self._operations]

    def move_outside(self, tick: int) -> tuple[int, str | None]:
        """Move a tick to the edge of regions that begin or end there; return it, and the region that it is in."""
        for span in self._spans:
            if not span.begin < tick <= span.end:
                continue
            if not self._works_between(span.begin, tick):
                tick = span.begin
            elif not self._works_between(tick, span.end):
                tick = span.end + 1
            else:
                return tick, _describe_span(span, self._traced)
        return tick, self._modes_at(tick)

    def _works_between(self, begin: int, end: int) -> bool:
        return bisect.bisect_left(self._ticks, begin) < bisect.bisect_left(self._ticks, end)

    def _modes_at(self, tick: int) -> str | None:
        """Return the block that goes on from the operation before a tick to the one after it.

        Parts of a no_grad or autocast block each enter the mode anew; those of a transform are nothing on their own.
        """
        after = bisect.bisect_left(self._ticks, tick)
        if not 0 < after < len(self._operations):
            return None
        inside = self._operations[after - 1].context.vmap and self._operations[after].context.vmap
        return "a torch.vmap call" if inside else None


def _describe_span(span: Span, traced: TracedModel) -> str:
    fallback = traced.fallback(span.path) if span.kind == "call" else None
    if fallback is not None:
        return f"{span.label!r}, which {fallback.because}"
    if span.kind == "checkpoint":
        return "a part under torch.utils.checkpoint"
    return f"the autograd function {span.options['function'].__name__}"
