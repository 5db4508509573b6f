"""The check that most tests rest on: a cut model gives what the uncut model gives, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pipecut
from pipecut.api import RequestedCuts
from pipecut.pipe import Pipe
from pipecut.pipe_ir import TracedModel
from pipecut.pipe_ir.tracing.run import trace
from pipecut.split import SplitPlan, SplitPoint, cut_trace, cuts_by_marks, cuts_by_spec
from tests.support.nested_values import Call, assert_same, fresh, tensors_in
from tests.support.separate_stages import SeparateRanks, backward_from
from tests.support.stage_names import Fingerprint, assert_same_names

SplitSpec = Mapping[str, SplitPoint]


def assert_equals_uncut(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    split_spec: SplitSpec | None = None,
    expect_stages: int | None = None,
    other_calls: Sequence[Call] = (),
    seed: int = 0,
    trace_twice: bool = False,
) -> Pipe:
    """Cut copies of `model` and compare them with an uncut copy: outputs, gradients, buffers, names.

    Twice: with the modules that lie in one stage kept as they are, and with all of them rebuilt from generated code.
    The pipe with the kept modules is returned. With `trace_twice` the second cut traces an object that was cut before.
    """
    call = (args, kwargs or {})
    subject = copied(model)
    untouched = Fingerprint.of(subject)
    pipes = []
    with mock.patch.object(pipecut.api, "RequestedCuts", _NotedCuts):
        traces = _NotedCuts.traces = []
        pipes.append(pipeline_once(subject, fresh(call), split_spec))
    untouched.assert_same_as(Fingerprint.of(subject))
    may_share = len(traces) == 1 and not trace_twice
    # Where the cut took several traces, with hooks or in the other mode, one more without these is the simplest.
    pipes.append(rebuild_all(subject, fresh(call), split_spec, traces[0] if may_share else None))
    untouched.assert_same_as(Fingerprint.of(subject))
    for pipe in pipes:
        assert pipe.num_stages == (expect_stages or pipe.num_stages), f"{pipe.num_stages} stages"
        assert_same_names(pipe, subject)
    assert pipes[0].num_stages == pipes[1].num_stages
    for pipe, name in zip(pipes, ("kept modules", "rebuilt modules"), strict=True):
        untouched.restore()
        reference = copied(model)
        assert_same_runs(pipe, reference, call, seed, name)
        for other in other_calls:
            assert_same_forward(pipe, reference, other, seed, name)
    return pipes[0]


def assert_same_runs(pipe: Pipe, reference: nn.Module, call: Call, seed: int, name: str) -> None:
    """Forward and backward, with the stages in one graph and then, from the state that this left behind, apart."""
    tied = {name for tie in pipe.tied_parameters for name in tie.names}
    for run in (run_in_one_graph, run_apart):
        expected = run_uncut(reference, fresh(call), seed)
        where = f"{name}, {run.__name__}"
        assert_same_run(run(pipe, fresh(call), seed), expected, where, tied if run is run_apart else set())
        assert_same_buffers(pipe, reference, where)


def pipeline_once(model: nn.Module, call: Call, split_spec: SplitSpec | None) -> Pipe:
    """The cut that users make, with all outputs in the last stage: the loss is made of every one."""
    return pipecut.pipeline(model, mb_args=call[0], mb_kwargs=call[1], split_spec=split_spec, outputs="all")


class _NotedCuts(RequestedCuts):
    """The cuts that a call of pipeline() asks for, with the traces that it made."""

    traces: list[TracedModel] = []

    def __call__(self, traced: TracedModel) -> SplitPlan:
        self.traces.append(traced)
        return super().__call__(traced)


def rebuild_all(model: nn.Module, call: Call, split_spec: SplitSpec | None, traced: TracedModel | None = None) -> Pipe:
    """The same cut, with every module rebuilt from its traced operations."""
    traced = traced or trace(model, *call)
    plan = cuts_by_spec(traced, split_spec) if split_spec else cuts_by_marks(traced)
    return cut_trace(traced, plan, Pipe, keep_modules=False)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a forward and backward gave. `inputs` are the tensors of the call, with what the model wrote to them."""

    output: Any
    inputs: list[Tensor]
    input_gradients: list[Tensor | None]
    gradients: dict[str, Tensor | None]


def run_uncut(model: nn.Module, call: Call, seed: int) -> Run:
    """The model itself, forward and backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(*call[0], **call[1])
    backward_from(output)
    return _run(output, call, model)


def run_in_one_graph(pipe: Pipe, call: Call, seed: int) -> Run:
    """All stages one after the other, in one autograd graph."""
    pipe.traced.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = pipe(*call[0], **call[1])
    backward_from(output)
    return _run(output, call, pipe.traced.model)


def run_apart(pipe: Pipe, call: Call, seed: int) -> Run:
    """Every stage in a graph of its own, as on separate ranks."""
    pipe.traced.model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    ranks = SeparateRanks(pipe, call)
    output = ranks.forward()
    ranks.backward(output)
    return _run(output, call, pipe.traced.model)


def _run(output: Any, call: Call, model: nn.Module) -> Run:
    tensors = tensors_in(call)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    return Run(output, tensors, [tensor.grad if tensor.is_leaf else None for tensor in tensors], gradients)


def assert_same_run(actual: Run, expected: Run, where: str, tied: set[str]) -> None:
    """Everything bit for bit.

    Only the gradients of `tied` parameters, which several stages add up each for itself before they are added to one
    another, may differ by the rounding of a sum in another order.
    """
    assert_same(actual.output, expected.output, f"{where}: output")
    if "apart" not in where:  # on a rank of its own a stage cannot write to its caller's tensors
        assert_same(actual.inputs, expected.inputs, f"{where}: inputs after the run")
    assert_same(actual.input_gradients, expected.input_gradients, f"{where}: gradient of input")
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        rtol = 1e-6 if name in tied else 0.0
        assert_same(actual.gradients[name], gradient, f"{where}: gradient of {name}", rtol)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that torch refuses to copy (the weight that weight_norm computes) are cloned."""
    made = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in made if not tensor.is_leaf})


def assert_same_buffers(pipe: Pipe, reference: nn.Module, where: str) -> None:
    """Every stage that has a buffer of the model has it with the value that it has in the uncut model."""
    expected = dict(reference.named_buffers(remove_duplicate=False))
    for stage in pipe.stages:
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            if name in expected:
                assert_same(buffer.detach(), expected[name].detach(), f"{where}: buffer {name}")


def assert_same_forward(pipe: Pipe, reference: nn.Module, call: Call, seed: int, where: str) -> None:
    """The outputs of a further call, for example with another batch size."""
    for run in (lambda call: pipe(*call[0], **call[1]), lambda call: SeparateRanks(pipe, call).forward()):
        torch.manual_seed(seed)
        expected = reference(*fresh(call)[0], **fresh(call)[1])
        torch.manual_seed(seed)
        assert_same(run(fresh(call)), expected, f"{where}: output of another call")
