"""Small random models, each built from a description that prints as the code that makes it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipecut import pipe_split

WIDTH = 4
MOST_CUTS = 4
NUMBERS_OF_CUTS = (1, 2, 2, 3, 3, 4)

# The types of values, one letter each: a float tensor [batch, 4], an index tensor [batch], a mask [batch, 4], an int.
FLOAT, INDEX, MASK, NUMBER = "fimn"


# ------------------------------------------------------------------------------------------------------------- blocks


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x))


class TwiceDense(Dense):
    """Calls the same submodule two times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(torch.relu(self.lin(x))))


class Pair(Dense):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.lin(x)
        return self.act(hidden), hidden - x


class NamedPair(Dense):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.lin(x), "right": self.act(x)}


class Merge(Dense):
    """Takes its second input by name."""

    def forward(self, x: torch.Tensor, *, other: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.act(other)


class MergeList(Dense):
    def forward(self, items: list[torch.Tensor]) -> torch.Tensor:
        return self.act(torch.cat([self.lin(item)[:, :2] for item in items], dim=1))


class MergeDict(Dense):
    def forward(self, items: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.lin(items["first"]) * torch.sigmoid(items["second"])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class RunningMean(nn.Module):
    """Updates its buffers in place."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
            self.count += 1
        return x - self.mean


class RunningSum(nn.Module):
    """Assigns its buffer anew."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.total = self.total + x.detach().sum(0)
        return torch.tanh(x + self.total)


class BatchNorm(nn.BatchNorm1d):
    """Lays its input out first: of a transposed one, torch's tracer has a wrong idea of how the result is laid out."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.contiguous())


class Scale(nn.Module):
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


class Swap(nn.Module):
    """Returns its inputs untouched."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y, x


class FreshInPlace(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lin(x)
        hidden.relu_()
        return hidden


class CopyInPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(x).mul_(0.5)


class InputInPlace(nn.Module):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0)


class Transposed(Dense):
    """Its output is not contiguous."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).t().contiguous().t()


class Labels(Scale):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.factor, x.argmax(1)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x + self.table(index)


class Leaking(Dense):
    """Keeps a value for whoever called it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = Kept(self.lin(x))
        return self.act(self.kept.value)


class Kept:
    """Holds a tensor where nobody looks for one."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _read_what_is_kept(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    result = module(x)
    return result, module.kept.value


class Listening(Dense):
    """Takes an input that is put in its place beforehand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.kept.value


def _put_in_place(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.kept = Kept(y * 2)
    return module(x)


class Sized(Dense):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.lin(x), x.shape[0]


class PerSize(Scale):
    def forward(self, x: torch.Tensor, size: int) -> torch.Tensor:
        return x * self.factor / size


class Masked(Scale):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(mask, 0.0) * self.factor


class WithoutGrad(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.act(self.lin(x))


class Checkpointed(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x))


class _HalfGradient(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 0.5


class OwnBackward(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _HalfGradient.apply(self.lin(x))


def _positionally(module: nn.Module, *inputs: Any) -> Any:
    return module(*inputs)


@dataclass(frozen=True)
class Kind:
    """A kind of block: how to make one, the types of its inputs and outputs, and how it is called."""

    make: Callable[[], nn.Module]
    inputs: str
    outputs: str
    call: Callable[..., Any] = _positionally


KINDS: dict[str, Kind] = {
    "dense": Kind(Dense, "f", "f"),
    "residual": Kind(Residual, "f", "f"),
    "pair": Kind(Pair, "f", "ff"),
    "named pair": Kind(NamedPair, "f", "ff"),
    "merge": Kind(Merge, "ff", "f", lambda module, x, y: module(x, other=y)),
    "merge list": Kind(MergeList, "ff", "f", lambda module, x, y: module([x, y])),
    "merge dict": Kind(MergeDict, "ff", "f", lambda module, x, y: module({"second": y, "first": x})),
    "scale": Kind(Scale, "f", "f"),
    "transposed": Kind(Transposed, "f", "f"),
    "twice dense": Kind(TwiceDense, "f", "f"),
    "identity": Kind(nn.Identity, "f", "f"),
    "swap": Kind(Swap, "ff", "ff"),
    "dropout": Kind(lambda: nn.Dropout(0.0), "f", "f"),
    "batch norm": Kind(lambda: BatchNorm(WIDTH), "f", "f"),
    "running mean": Kind(RunningMean, "f", "f"),
    "running sum": Kind(RunningSum, "f", "f"),
    "fresh in place": Kind(FreshInPlace, "f", "f"),
    "copy in place": Kind(CopyInPlace, "f", "f"),
    "input in place": Kind(InputInPlace, "f", "f"),
    "without grad": Kind(WithoutGrad, "f", "f"),
    "checkpointed": Kind(Checkpointed, "f", "f"),
    "own backward": Kind(OwnBackward, "f", "f"),
    "leaking": Kind(Leaking, "f", "ff", _read_what_is_kept),
    "listening": Kind(Listening, "ff", "f", _put_in_place),
    "labels": Kind(Labels, "f", "fi"),
    "lookup": Kind(Lookup, "fi", "f"),
    "sized": Kind(Sized, "f", "fn"),
    "per size": Kind(PerSize, "fn", "f"),
    "masked": Kind(Masked, "fm", "f", lambda module, x, mask: module(x, mask=mask)),
}

# Blocks whose submodules run in a part that must stay whole.
NOT_CUT_INSIDE = (WithoutGrad, Checkpointed)


# -------------------------------------------------------------------------------------------- lines between the calls


@dataclass(frozen=True)
class Operation:
    """What a forward does itself: types of inputs and outputs, and the code, which may use the module's own state."""

    inputs: str
    outputs: str
    run: Callable[..., Any]


def _chunked(net: Net, x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)


def _assembled(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    result[:, :2] = x[:, 2:]
    result[:, 2:] += y[:, :2]
    return result


def _written_in_part(net: Net, x: torch.Tensor) -> torch.Tensor:
    x[:, 1:3].mul_(0.5)
    return x


OPERATIONS: dict[str, Operation] = {
    "add": Operation("ff", "f", lambda net, x, y: x + y),
    "multiply": Operation("ff", "f", lambda net, x, y: torch.sigmoid(x) * y),
    "relu": Operation("f", "f", lambda net, x: F.relu(x)),
    "gain": Operation("f", "f", lambda net, x: x * net.gain),
    "shift": Operation("f", "f", lambda net, x: x + net.shift),
    "counted": Operation("f", "f", lambda net, x: net.counted(x)),
    "view": Operation("f", "f", lambda net, x: x[:, :]),
    "transpose": Operation("f", "f", lambda net, x: x.t().contiguous().t()),
    "chunked": Operation("f", "f", _chunked),
    "largest": Operation("f", "fi", lambda net, x: (x - x.max(dim=1, keepdim=True).values, x.max(dim=1).indices)),
    "positions": Operation("f", "f", lambda net, x: x + torch.arange(x.shape[0], device=x.device)[:, None]),
    "detach": Operation("f", "f", lambda net, x: x.detach()),
    "in place": Operation("f", "f", lambda net, x: x.mul_(0.5)),
    "in part": Operation("f", "f", _written_in_part),
    "assemble": Operation("ff", "f", _assembled),
    "halves": Operation("f", "ff", lambda net, x: (x[:, :2].repeat(1, 2), x.unflatten(1, (2, 2)).flatten(1))),
    "size": Operation("f", "n", lambda net, x: x.shape[0]),
    "divide": Operation("fn", "f", lambda net, x, size: x / size),
    "mask": Operation("fm", "f", lambda net, x, mask: torch.where(mask, x, torch.zeros_like(x))),
}


# ------------------------------------------------------------------------------------------------------- descriptions


class _Brief:
    """Prints as the call that makes it, without what is as by default."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [(field, getattr(self, field.name)) for field in fields]
        texts = [
            repr(value) if field.default is dataclasses.MISSING else f"{field.name}={value!r}"
            for field, value in given
            if value != field.default
        ]
        return f"{type(self).__name__}({', '.join(texts)})"


@dataclass(frozen=True, repr=False)
class Block(_Brief):
    """A module of a kind. `tied_to` counts the dense blocks of the whole model; `same_as` is an index in the root."""

    kind: str
    frozen: bool = False
    tied_to: int | None = None
    same_as: int | None = None

    @property
    def inputs(self) -> str:
        return KINDS[self.kind].inputs

    @property
    def outputs(self) -> str:
        return KINDS[self.kind].outputs


@dataclass(frozen=True, repr=False)
class Call(_Brief):
    """Call a block with earlier values; its results are new values."""

    block: int
    inputs: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Op(_Brief):
    """Run an operation on earlier values."""

    name: str
    inputs: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Mark(_Brief):
    """A pipe_split()."""


Line = Call | Op | Mark


@dataclass(frozen=True, repr=False)
class Graph(_Brief):
    """A module that runs lines over numbered values: first its inputs, then what the lines make.

    `output` is any nesting of tuples, lists and dicts with the numbers of values, and None, as leaves.
    """

    inputs: str
    blocks: tuple[Block | Graph, ...]
    lines: tuple[Line, ...]
    output: Any

    @property
    def types(self) -> str:
        """The types of all values."""
        made = (
            self.blocks[line.block].outputs if isinstance(line, Call) else OPERATIONS[line.name].outputs
            for line in self.lines
            if not isinstance(line, Mark)
        )
        return self.inputs + "".join(made)

    @property
    def outputs(self) -> str:
        return "".join(self.types[number] for number in leaves_of(self.output))

    @property
    def marks(self) -> int:
        """How many marks one run meets."""
        called = [self.blocks[line.block] for line in self.lines if isinstance(line, Call)]
        return sum(isinstance(line, Mark) for line in self.lines) + sum(
            block.marks for block in called if isinstance(block, Graph)
        )


@dataclass(frozen=True, repr=False)
class Case(_Brief):
    """A model, how it is run, and where it is cut: before or after calls of modules, or at its own marks."""

    graph: Graph
    cuts: tuple[tuple[str, str], ...] = ()
    training: bool = True
    inputs_need_gradients: bool = False
    switches_mode: bool = False

    @property
    def looks_at_its_mode(self) -> bool:
        """Whether the model does other operations in training than in evaluation."""
        return any(
            {"counted"} & {line.name for line in graph.lines if isinstance(line, Op)}
            or {"running mean", "running sum"} & {block.kind for block in graph.blocks if isinstance(block, Block)}
            for _, graph in _graphs(self.graph)
        )

    def build(self) -> Net:
        """The model, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Root(self.graph, _Known([], [])).double()
            for tensor in model.parameters():
                tensor.data.copy_(torch.randn(tensor.shape) * 0.7)
        return model.train(self.training)  # type: ignore[return-value]

    def example(self, batch: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Arguments of a batch size, the same each time."""
        numbers = torch.Generator().manual_seed(batch)
        floats = tuple(
            torch.randn(batch, WIDTH, dtype=torch.float64, generator=numbers).requires_grad_(self.inputs_need_gradients)
            for _ in range(self.graph.inputs.count(FLOAT))
        )
        mask = torch.rand(batch, WIDTH, generator=numbers) < 0.5
        return floats, {"mask": mask} if MASK in self.graph.inputs else {}


def leaves_of(nested: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, without None."""
    if isinstance(nested, dict):
        nested = list(nested.values())
    if isinstance(nested, tuple | list):
        for item in nested:
            yield from leaves_of(item)
    elif nested is not None:
        yield nested


def _filled(nested: Any, values: Sequence[Any]) -> Any:
    if isinstance(nested, dict):
        return {key: _filled(item, values) for key, item in nested.items()}
    if isinstance(nested, tuple | list):
        return type(nested)(_filled(item, values) for item in nested)
    return None if nested is None else values[nested]


# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class _Known:
    """What was built already: the dense blocks, in order, and the blocks of the root."""

    dense: list[Dense]
    of_root: list[nn.Module]


class Net(nn.Module):
    """Runs a Graph."""

    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self, graph: Graph, known: _Known, is_root: bool = False) -> None:
        super().__init__()
        self.graph = graph
        names = {line.name for line in graph.lines if isinstance(line, Op)}
        if "gain" in names:
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if "shift" in names:
            self.register_buffer("shift", torch.full((WIDTH,), 0.25))
        if "counted" in names:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList()
        for block in graph.blocks:
            module = Net(block, known) if isinstance(block, Graph) else _module(block, known)
            self.blocks.append(module)
            if is_root:
                known.of_root.append(module)

    def forward(self, *inputs: Any) -> Any:
        values = list(inputs)
        for line in self.graph.lines:
            if isinstance(line, Mark):
                pipe_split()
                continue
            given = [values[number] for number in line.inputs]
            if isinstance(line, Op):
                result = OPERATIONS[line.name].run(self, *given)
            else:
                block = self.graph.blocks[line.block]
                call = KINDS[block.kind].call if isinstance(block, Block) else _positionally
                result = call(self.blocks[line.block], *given)
            values.extend(leaves_of(result))
        return _filled(self.graph.output, values)

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        """Counts its calls, in training mode."""
        if self.training:
            self.calls += 1
        return x * 2


class Root(Net):
    """The model itself, which takes a mask by name."""

    def __init__(self, graph: Graph, known: _Known) -> None:
        super().__init__(graph, known, is_root=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, mask: torch.Tensor | None = None) -> Any:
        return super().forward(*(value for value in (x, y, mask) if value is not None))


def _module(block: Block, known: _Known) -> nn.Module:
    if block.same_as is not None:
        return known.of_root[block.same_as]
    module = KINDS[block.kind].make()
    if isinstance(module, Dense):
        if block.tied_to is not None:
            module.lin.weight = known.dense[block.tied_to].lin.weight
        known.dense.append(module)
    return module.requires_grad_(not block.frozen)


# ------------------------------------------------------------------------------------------------------------ drawing


@dataclass(frozen=True)
class Place:
    """A side of a module's call, and how many operations run before it."""

    label: str
    side: str
    position: int


class _Counter(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def places_to_cut(case: Case) -> tuple[list[Place], int]:
    """Where the model can be cut by split_spec, in the order of the run, and how many operations there are in all."""
    model, counter = case.build(), _Counter()
    places: list[Place] = []
    numbers: dict[str, int] = {}
    labels: list[str] = []
    closed = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, NOT_CUT_INSIDE))
    paths = {module: path for path, module in model.named_modules() if path and not path.startswith(closed)}

    def enter(module: nn.Module, _: Any) -> None:
        path = paths[module]
        nth = numbers.get(path, 0)
        numbers[path] = nth + 1
        labels.append(f"{path}#{nth}" if nth else path)
        places.append(Place(labels[-1], "BEGINNING", counter.count))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        places.append(Place(labels.pop(), "END", counter.count))

    for module in paths:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    args, kwargs = case.example(3)
    with torch.no_grad(), counter:
        model(*args, **kwargs)
    return places, counter.count


class _Drawer:
    """Draws the lines of one Graph after the other."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.dense = 0
        self.root_blocks: list[Block | Graph] = []

    def one_in(self, count: int) -> bool:
        return bool(self.draw(st.integers(0, count - 1)) == count - 1)

    def pick(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    def graph(self, inputs: str, depth: int) -> Graph:
        blocks: list[Block | Graph] = self.root_blocks if depth == 0 else []
        lines: list[Line] = []
        types = inputs
        for _ in range(self.draw(st.integers(3, 8) if depth == 0 else st.integers(1, 3))):
            line = self._line(blocks, types, depth)
            lines.append(line)
            types += blocks[line.block].outputs if isinstance(line, Call) else OPERATIONS[line.name].outputs
        if self.one_in(10):
            blocks.append(Block("dense"))
            self.dense += 1
        output = self._output(types) if depth == 0 else self._results(types)
        return Graph(inputs, tuple(blocks), tuple(lines), output)

    def _line(self, blocks: list[Block | Graph], types: str, depth: int) -> Call | Op:
        what = self.pick(["new"] * 5 + ["operation"] * 3 + ["again"] * 3 + ["wrapper"] * (2 - depth) + ["shared"])
        if what == "operation":
            name = self.pick([name for name, operation in OPERATIONS.items() if set(operation.inputs) <= set(types)])
            return Op(name, self._inputs(OPERATIONS[name].inputs, types))
        if what == "again":
            fitting = [index for index, block in enumerate(blocks) if set(block.inputs) <= set(types)]
            if fitting:
                index = self.pick(fitting)
                return Call(index, self._inputs(blocks[index].inputs, types))
        block = self._new_block(what, types, depth)
        blocks.append(block)
        return Call(len(blocks) - 1, self._inputs(block.inputs, types))

    def _new_block(self, what: str, types: str, depth: int) -> Block | Graph:
        if what == "wrapper":
            has = [kind for kind in (MASK, INDEX, NUMBER) if kind in types and self.one_in(2)]
            return self.graph(FLOAT * self.pick([1, 2]) + "".join(has), depth + 1)
        if what == "shared" and depth > 0:
            of_root = [
                Block(block.kind, same_as=index)
                for index, block in enumerate(self.root_blocks)
                if isinstance(block, Block) and set(block.inputs) <= set(types)
            ]
            if of_root:
                return self.pick(of_root)  # type: ignore[no-any-return]
        kind = self.pick([name for name, kind in KINDS.items() if set(kind.inputs) <= set(types)])
        tied_to = None
        if isinstance(KINDS[kind].make, type) and issubclass(KINDS[kind].make, Dense):
            if self.dense and self.one_in(4):
                tied_to = self.draw(st.integers(0, self.dense - 1))
            self.dense += 1
        return Block(kind, self.one_in(5), tied_to)

    def _inputs(self, wanted: str, types: str) -> tuple[int, ...]:
        """Values of the wanted types: the latest one half of the time, otherwise any."""
        chosen = []
        for kind in wanted:
            known = [number for number, of_value in enumerate(types) if of_value == kind]
            chosen.append(known[-1] if self.draw(st.booleans()) else self.pick(known))
        return tuple(chosen)

    def _results(self, types: str) -> Any:
        numbers = self._some_values(types)
        if len(numbers) == 1:
            return numbers[0]
        return self.pick([tuple(numbers), numbers, {f"r{index}": number for index, number in enumerate(numbers)}])

    def _some_values(self, types: str) -> list[int]:
        """The last float and a few others, early ones too."""
        last = types.rindex(FLOAT)
        others = [number for number, kind in enumerate(types) if kind != MASK]
        return [last] + [self.pick(others) for _ in range(self.pick([0, 0, 1, 2]))]

    def _output(self, types: str) -> Any:
        numbers = self._some_values(types)
        forms: list[Any] = [
            numbers[0] if len(numbers) == 1 else tuple(numbers),
            [*numbers, None],
            {"last": numbers[0], "rest": tuple(numbers[1:])},
            {"b": None, "a": [numbers[0], {"inner": tuple(numbers)}]},
            (None, numbers, (numbers[-1],)),
        ]
        return self.pick(forms)


def _with_mark(graph: Graph, path: Sequence[int], position: int) -> Graph:
    if not path:
        return replace(graph, lines=(*graph.lines[:position], Mark(), *graph.lines[position:]))
    block = graph.blocks[path[0]]
    assert isinstance(block, Graph)
    marked = _with_mark(block, path[1:], position)
    return replace(graph, blocks=(*graph.blocks[: path[0]], marked, *graph.blocks[path[0] + 1 :]))


def _graphs(graph: Graph, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Graph]]:
    yield path, graph
    for index, block in enumerate(graph.blocks):
        if isinstance(block, Graph) and any(isinstance(line, Call) and line.block == index for line in graph.lines):
            yield from _graphs(block, (*path, index))


def _marked(drawer: _Drawer, graph: Graph) -> Graph:
    """The graph with up to MOST_CUTS marks on the way of a run."""
    for _ in range(drawer.pick(NUMBERS_OF_CUTS)):
        path, inner = drawer.pick(list(_graphs(graph)))
        between = range(1, len(inner.lines)) if not path and len(inner.lines) > 1 else range(len(inner.lines) + 1)
        marked = _with_mark(graph, path, drawer.pick(between))
        if marked.marks <= MOST_CUTS:
            graph = marked
    return graph


def _cut_by_spec(drawer: _Drawer, case: Case) -> Case:
    """The case with cuts at the sides of module calls, mostly with something to run in each stage."""
    places, total = places_to_cut(case)
    careless = drawer.one_in(20)
    chosen: list[Place] = []
    for _ in range(drawer.pick(NUMBERS_OF_CUTS)):
        taken = {place.position for place in chosen} | {0, total}
        free = [place for place in places if place.label not in {other.label for other in chosen}]
        free = [place for place in free if careless or place.position not in taken]
        if free:
            chosen.append(drawer.pick(free))
    return replace(case, cuts=tuple((place.label, place.side) for place in chosen))


@st.composite
def cases(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    """Models with their cuts."""
    drawer = _Drawer(draw)
    graph = drawer.graph(drawer.pick(["f", "fm", "ff", "ffm"]), depth=0)
    training, inputs_need_gradients, switches_mode = not drawer.one_in(5), drawer.one_in(4), drawer.one_in(4)
    case = Case(graph, (), training, inputs_need_gradients, switches_mode)
    if draw(st.booleans()):
        cut = _cut_by_spec(drawer, case)
        if cut.cuts:
            return cut
    return replace(case, graph=_marked(drawer, graph))
