"""Any model, cut anywhere, computes what it computed whole: outputs, gradients, buffers and names."""

from __future__ import annotations

import bisect
import contextlib
import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from torch import nn

from pipecut import Pipe, SplitPoint, pipeline
from pipecut.errors import PipeError, PipeWarning, SplitError
from pipecut.pipe_ir.inputs import bind_inputs
from pipecut.pipe_ir.tracing.run import trace
from pipecut.split import SplitPlan, check_split_spec, cut_trace, cuts_by_marks, cuts_by_spec
from tests.split.random_models import Case, Net, cases, leaves_of
from tests.support.properties import examples

EXAMPLES = examples(12)
BATCH, OTHER_BATCH = 3, 5

# What pipecut refuses with good reason. Every other error is a failure.
REFUSALS = (
    r"stage \d+ would be empty",
    r"are views of one tensor, both come into stage \d+, and stage \d+ writes to one of them in place",
    r"is used in stage \d+ after stage \d+ wrote to another view of it in place",
    r"buffer [\w.]+ is updated in forward and used by stages",
)
# What autograd refuses before pipecut sees the model: it writes to what its backward needs, or to its own inputs.
NOT_A_MODEL = r"modified by an inplace operation|in-place operation|being modified inplace"

# What a module hands on untouched; and all operations that may return the very tensor that they are given.
ALIAS = "aten.alias.default"
PASSED_ON = (ALIAS, "aten.dropout.default", "aten.contiguous.default")

Arguments = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
Gradients = Mapping[str, torch.Tensor | None]


# -------------------------------------------------------------------------------------------------------- comparisons


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    if actual.dtype == torch.float64:
        actual, expected = (tensor.detach().contiguous().view(torch.int64) for tensor in (actual, expected))
    assert torch.equal(actual, expected), f"{what} differs"


def assert_nearly_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def assert_same_output(actual: Any, expected: Any, what: str = "output") -> None:
    """The same structure with the same leaves, bit for bit; what needs a gradient still does."""
    assert type(actual) is type(expected), f"{what}: {type(actual).__name__} for {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        assert_same_bits(actual, expected, what)
        assert actual.requires_grad == expected.requires_grad, f"{what}.requires_grad is {actual.requires_grad}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), what
        for key in expected:
            assert_same_output(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), what
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same_output(mine, theirs, f"{what}[{index}]")
    else:
        assert actual == expected, what


def assert_same_gradients(actual: Gradients, expected: Gradients, nearly: Iterable[str] = ()) -> None:
    """The same gradients, bit for bit but for those where the order of a sum may differ."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        mine = actual[name]
        assert (mine is None) == (gradient is None), f"gradient of {name}: {mine} for {gradient}"
        if mine is None or gradient is None:
            continue
        (assert_nearly_same if name in nearly else assert_same_bits)(mine, gradient, f"gradient of {name}")


def assert_same_buffers(stages: Iterable[nn.Module], expected: Mapping[str, torch.Tensor]) -> None:
    """Every saved buffer of the model is held by a stage, with the same value in all that hold it."""
    found = set()
    for index, stage in enumerate(stages):
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            if name in expected:
                assert_same_bits(buffer, expected[name], f"buffer {name} of stage {index}")
                found.add(name)
    saved = {name for stage in stages for name in stage.state_dict()}
    assert {name for name in expected if name in saved} <= found


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers(remove_duplicate=False)}


def gradients_of(module: nn.Module, arguments: Arguments) -> dict[str, torch.Tensor | None]:
    """The gradients of all parameters by name, and those of the inputs."""
    gradients = {name: parameter.grad for name, parameter in parameters_of(module).items()}
    return gradients | {f"input {index}": tensor.grad for index, tensor in enumerate(arguments[0])}


def backward(output: Any) -> None:
    """Backward from a sum in which each number of the output has a weight of its own."""
    terms = []
    for position, leaf in enumerate(leaves_of(output)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype) + position).reshape(leaf.shape)
            terms.append((leaf * weights).sum())
    if terms:
        torch.stack(terms).sum().backward()


# --------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Expected:
    """What the uncut model does in a training step, and then in a forward with another batch size."""

    output: Any
    gradients: Gradients
    buffers: Mapping[str, torch.Tensor]
    next_output: Any
    next_buffers: Mapping[str, torch.Tensor]


def run_whole(case: Case, model: Net) -> Expected:
    """Run a copy of the model, uncut."""
    model = copy.deepcopy(model)
    arguments = case.example(BATCH)
    output = model(*arguments[0], **arguments[1])
    backward(output)
    gradients, buffers = gradients_of(model, arguments), buffers_of(model)
    args, kwargs = case.example(OTHER_BATCH)
    return Expected(output, gradients, buffers, model(*args, **kwargs), buffers_of(model))


@dataclass
class Apart:
    """Runs stages as ranks do, each with tensors of its own: values arrive as contiguous copies, gradients go back."""

    pipe: Pipe
    stages: tuple[nn.Module, ...]

    def run(self, case: Case, arguments: Arguments) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """The output of the last stage, and the gradients as `gradients_of` gives them."""
        given = bind_inputs(self.pipe.traced.call, *arguments)
        sent: dict[tuple[int, int], torch.Tensor] = {}
        received: list[dict[int, torch.Tensor]] = []
        output: Any = None
        for info, stage in zip(self.pipe.stage_infos, self.stages, strict=True):
            received.append({value: self._receive(info.index, value, given, sent) for value in info.inputs})
            output = stage(*received[-1].values())
            if info.index < len(self.stages) - 1:
                made = (output,) if len(info.outputs) == 1 else output or ()
                sent |= {(info.index, value): tensor for value, tensor in zip(info.outputs, made, strict=True)}
        self._check_sent(sent, self.pipe.sizes(*arguments[0], **arguments[1]))
        backward(output)
        for stage_index in range(len(self.stages) - 2, -1, -1):
            self._backward(stage_index, sent, received)
        return output, self._gradients(list(given.items()), received, case)

    def _receive(
        self, stage: int, value: int, given: Mapping[int, torch.Tensor], sent: Mapping[tuple[int, int], torch.Tensor]
    ) -> torch.Tensor:
        edges = [edge for edge in self.pipe.edges if (edge.target, edge.value) == (stage, value)]
        assert len(edges) == (stage > 0) or not edges, f"stage {stage} gets value {value} {len(edges)} times"
        if not edges:
            return _copy_of(given[value], given[value].requires_grad)
        (edge,) = edges
        tensor = given[value] if edge.kind == "root input" else sent[edge.source, value]
        return _copy_of(tensor, edge.spec.requires_grad)

    def _check_sent(self, sent: Mapping[tuple[int, int], torch.Tensor], sizes: Mapping[str, int]) -> None:
        """What went over each edge is what the edge's spec says."""
        for edge in self.pipe.edges:
            if edge.kind == "activation":
                tensor, spec = sent[edge.source, edge.value], edge.spec.bind(sizes)
                actual = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
                assert actual == (spec.shape, spec.stride, spec.dtype, spec.requires_grad), f"{edge}: {actual}"

    def _backward(
        self, stage: int, sent: Mapping[tuple[int, int], torch.Tensor], received: list[dict[int, torch.Tensor]]
    ) -> None:
        """Backward of one stage from the gradients of what it sent, summed from the last receiver to the first."""
        gradients: dict[int, torch.Tensor] = {}
        for edge in sorted(self.pipe.edges, key=lambda edge: -edge.target):
            gradient = received[edge.target][edge.value].grad
            if edge.kind == "activation" and edge.source == stage and gradient is not None:
                gradients[edge.value] = gradients[edge.value] + gradient if edge.value in gradients else gradient
        if gradients:
            torch.autograd.backward([sent[stage, value] for value in gradients], list(gradients.values()))

    def _gradients(
        self, given: list[tuple[int, torch.Tensor]], received: list[dict[int, torch.Tensor]], case: Case
    ) -> dict[str, torch.Tensor | None]:
        names_of: dict[int, list[str]] = {}
        for name, parameter in parameters_of(self.pipe.traced.model).items():
            names_of.setdefault(id(parameter), []).append(name)
        gradients: dict[str, torch.Tensor | None] = {}
        for names in names_of.values():
            total = _sum_of(self._held(names))
            gradients |= dict.fromkeys(names, total)
        floats = [value for value, tensor in given if tensor.is_floating_point()]
        sources = {(edge.target, edge.value): edge.kind for edge in self.pipe.edges}
        for index, value in enumerate(floats):
            copies = [
                tensors[value].grad
                for stage, tensors in reversed(list(enumerate(received)))
                if value in tensors and sources.get((stage, value), "root input") == "root input"
            ]
            gradients[f"input {index}"] = _sum_of(copies)
        return gradients

    def _held(self, names: list[str]) -> list[torch.Tensor | None]:
        """The gradients of one parameter in each stage that has it under any of its names, from the last."""
        gradients = []
        for stage in reversed(self.stages):
            held = parameters_of(stage)
            gradients += [parameter.grad for parameter in {held[name] for name in names if name in held}]
        return gradients


def _copy_of(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(requires_grad)


def _sum_of(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


# ------------------------------------------------------------------------------------------------------------- checks


class Sums:
    """Where the gradient of a value is a sum that the cut model groups in another way, so that it rounds differently.

    One graph adds a value's gradients from its last use to its first.
    """

    def __init__(self, pipe: Pipe, plan: SplitPlan) -> None:
        operations = pipe.traced.operations
        self.origin: dict[int, int] = {}
        for op in operations:
            passes_on = str(op.target) in PASSED_ON
            self.origin[op.index] = self.origin[op.refs[0]] if passes_on else op.index
        self.uses: dict[int, Counter[int]] = {}
        for op in operations:
            if str(op.target) not in PASSED_ON:
                self._note(op.refs, bisect.bisect_right(plan.ticks, op.tick))
        self._note(pipe.traced.output.refs, len(plan.ticks))
        self.received = {self.origin[edge.value] for edge in pipe.edges}
        self.made_in = {value: bisect.bisect_right(plan.ticks, operations[value].tick) for value in self.received}
        self.handed_on = {self.origin[op.index] for op in operations if str(op.target) == ALIAS}

    def _note(self, values: Iterable[int], stage: int) -> None:
        for value in values:
            self.uses.setdefault(self.origin[value], Counter())[stage] += 1

    def differ(self) -> bool:
        """A value that a module hands on untouched is one of its own in a trace, with a sum of its own."""
        return any(self.uses[value].total() > 2 for value in self.handed_on if value in self.uses)

    def differ_apart(self) -> bool:
        """Apart, each stage adds the gradients of its own uses first: another sum if any but the last has several."""
        for value in self.received & self.uses.keys():
            receivers = sorted(stage for stage in self.uses[value] if stage > self.made_in[value])
            if any(self.uses[value][stage] > 1 for stage in receivers[:-1]):
                return True
        return self.differ()


def gradients_may_be_transposed(pipe: Pipe) -> bool:
    """Whether a gradient may be laid out in another way than in the uncut model when it goes back over a cut.

    It is then laid out like the value that it belongs to, and a matrix product may round differently.
    """
    return any("aten.t." in str(op.target) for op in pipe.traced.operations)


def check_names(pipe: Pipe, model: Net) -> None:
    """The stages' names are the model's, their parameters are its parameters, and none is missing."""
    names = [set(stage.state_dict()) for stage in pipe.stages]
    assert set().union(*names) == set(model.state_dict())
    whole = parameters_of(model)
    for stage in pipe.stages:
        for name, parameter in parameters_of(stage).items():
            assert parameter is whole[name], f"{name} of a stage is not the model's own"


def check_in_one_graph(case: Case, pipe: Pipe, plan: SplitPlan, model: Net, expected: Expected) -> None:
    arguments = case.example(BATCH)
    output = pipe(*arguments[0], **arguments[1])
    assert_same_output(output, expected.output)
    backward(output)
    gradients = gradients_of(model, arguments)
    assert_same_gradients(gradients, expected.gradients, nearly=gradients if Sums(pipe, plan).differ() else ())
    assert_same_buffers(pipe.stages, expected.buffers)
    args, kwargs = case.example(OTHER_BATCH)
    assert_same_output(pipe(*args, **kwargs), expected.next_output)
    assert_same_buffers(pipe.stages, expected.next_buffers)


def check_apart(case: Case, pipe: Pipe, plan: SplitPlan, expected: Expected, tally: Counter[str]) -> None:
    apart = Apart(pipe, tuple(copy.deepcopy(stage) for stage in pipe.stages))
    output, gradients = apart.run(case, case.example(BATCH))
    assert_same_output(output, expected.output)
    if Sums(pipe, plan).differ_apart() or gradients_may_be_transposed(pipe):
        nearly = set(gradients)
    else:
        tally["gradients bit for bit apart"] += 1
        nearly = {name for tied in pipe.tied_parameters for name in tied.names}
        nearly |= {name for name in gradients if name.startswith("input ")}
    assert_same_gradients(gradients, expected.gradients, nearly)
    assert_same_buffers(apart.stages, expected.buffers)


def is_a_refusal(error: SplitError) -> bool:
    return any(re.search(refusal, str(error)) for refusal in REFUSALS)


def check_other_mode(case: Case, model: Net, tally: Counter[str]) -> None:
    """A model cut in one mode computes the same in the other, or says that it was not cut for it."""
    args, kwargs = case.example(BATCH)
    try:
        with ignored_warnings():
            pipe = pipeline(model, args, kwargs, split_spec=case_spec(case) or None)
    except SplitError as error:
        if not is_a_refusal(error):
            raise
        tally["refused for the other mode"] += 1
        return
    whole = copy.deepcopy(model).train(not case.training)
    expected = whole(*args, **kwargs)
    pipe.train(not case.training)
    args, kwargs = case.example(BATCH)
    try:
        output = pipe(*args, **kwargs)
    except PipeError as error:
        if not case.looks_at_its_mode or not re.search(r"was cut in (training|evaluation) mode", str(error)):
            raise
        tally["bound to its mode"] += 1
        return
    assert_same_output(output, expected)
    assert_same_buffers(pipe.stages, buffers_of(whole))
    tally["switched mode"] += 1


def restore(model: Net, stages: Iterable[nn.Module], buffers: Mapping[str, torch.Tensor]) -> None:
    """Undo what a run did to buffers and gradients."""
    model.zero_grad(set_to_none=True)
    for module in (model, *stages):
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in buffers:
                buffer.copy_(buffers[name])


def case_spec(case: Case) -> dict[str, SplitPoint]:
    return {label: SplitPoint[side] for label, side in case.cuts}


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    """Marks with nothing between them are drawn now and then; so are checkpoints in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PipeWarning)
        yield


def cut_both_ways(case: Case, model: Net) -> tuple[SplitPlan, list[Pipe]]:
    """One trace, cut with modules kept whole where possible, and with all modules rebuilt from their operations."""
    args, kwargs = case.example(BATCH)
    spec = case_spec(case)
    if spec:
        check_split_spec(model, spec)
    with ignored_warnings():
        traced = trace(model, args, kwargs)
        plan = cuts_by_spec(traced, spec) if spec else cuts_by_marks(traced)
    return plan, [cut_trace(traced, plan, Pipe, keep_modules=keep_modules) for keep_modules in (True, False)]


def check_case(case: Case, tally: Counter[str]) -> None:
    """All checks of one case; what is no model and what pipecut may refuse is counted and rejected."""
    model = case.build()
    try:
        expected = run_whole(case, model)
    except RuntimeError as error:
        if not re.search(NOT_A_MODEL, str(error)):
            raise
        tally["not a model"] += 1
        reject()
    before = buffers_of(model)
    try:
        plan, pipes = cut_both_ways(case, model)
    except SplitError as error:
        if not is_a_refusal(error):
            raise
        tally["refused"] += 1
        reject()
    assert_same_buffers([model], before)
    for pipe in pipes:
        assert pipe.num_stages == len(plan.cuts) + 1
        check_names(pipe, model)
        check_apart(case, pipe, plan, expected, tally)
        check_in_one_graph(case, pipe, plan, model, expected)
        restore(model, pipe.stages, before)
    if case.switches_mode:
        check_other_mode(case, model, tally)
    tally["checked"] += 1
    tally[f"{pipes[0].num_stages} stages"] += 1


@pytest.mark.hypothesis
def test_random_models_cut_anywhere_compute_the_same() -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(cases())
    def check(case: Case) -> None:
        tally["drawn"] += 1
        check_case(case, tally)

    check()
    print(dict(tally))
    assert tally["checked"] >= EXAMPLES
    assert tally["refused"] < 0.25 * tally["drawn"], tally
    assert tally["not a model"] < 0.25 * tally["drawn"], tally
