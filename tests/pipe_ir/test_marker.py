"""pipe_split(): a mark that means nothing to a model until it is cut."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from pipecut import pipe_split, pipeline
from pipecut.errors import PipeWarning
from pipecut.pipe_ir.operators import MARK, is_mark
from tests.support.equality import assert_equals_uncut


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()
        return self.b(x)


def test_a_mark_does_nothing_in_eager_mode() -> None:
    model, x = Marked(), torch.randn(3, 4, requires_grad=True)
    output = model(x)
    assert torch.equal(output, model.b(model.a(x)))
    output.sum().backward()
    assert x.grad is not None
    assert pipe_split() is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_mark_does_not_break_a_compiled_graph(backend: str) -> None:
    torch._dynamo.reset()
    model, x = Marked(), torch.randn(3, 4)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), model(x))


def test_a_mark_works_under_vmap_and_inference_mode() -> None:
    model, x = Marked(), torch.randn(3, 4)
    with torch.inference_mode():
        assert model(x).shape == (3, 2)
    assert torch.vmap(model)(x).shape == (3, 2)


def test_a_mark_survives_export() -> None:
    program = torch.export.export(Marked(), (torch.randn(3, 4),), strict=False)
    assert [node for node in program.graph.nodes if is_mark(node.target)]


def test_a_mark_survives_the_removal_of_dead_code() -> None:
    graph = torch.fx.Graph()
    graph.placeholder("x")
    graph.call_function(MARK)
    graph.output(None)
    graph.eliminate_dead_code()
    assert any(is_mark(node.target) for node in graph.nodes)


@pytest.mark.parametrize("target", [MARK, pipe_split, torch.ops.pipecut.pipe_split])
def test_a_mark_is_known_by_each_of_its_names(target: object) -> None:
    assert is_mark(target)


@pytest.mark.parametrize("target", [torch.relu, torch.ops.aten.add.Tensor, "pipe_split", None, torch.ones(2)])
def test_nothing_else_is_a_mark(target: object) -> None:
    assert not is_mark(target)


class MarkedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        pipe_split()  # the first
        pipe_split()  # the second
        return self.b(x)


def line_of(comment: str) -> int:
    lines, first = inspect.getsourcelines(MarkedTwice)
    return next(first + number for number, line in enumerate(lines) if comment in line)


def test_two_marks_together_are_one_and_a_warning_names_both_lines() -> None:
    with pytest.warns(PipeWarning) as caught:
        pipe = pipeline(MarkedTwice(), (torch.randn(3, 4),))
    (warning,) = (entry for entry in caught if entry.category is PipeWarning)
    assert re.findall(r"test_marker\.py\", line (\d+)", str(warning.message)) == [
        str(line_of("the first")), str(line_of("the second")),
    ]  # fmt: skip
    assert [set(stage.state_dict()) for stage in pipe.stages] == [{"a.weight", "a.bias"}, {"b.weight", "b.bias"}]


def test_the_warning_points_to_the_line_that_calls_pipeline() -> None:
    with pytest.warns(PipeWarning) as caught:
        pipeline(MarkedTwice(), (torch.randn(3, 4),))
    assert [entry.filename for entry in caught if entry.category is PipeWarning] == [__file__]


@pytest.mark.filterwarnings("ignore::pipecut.errors.PipeWarning")
def test_a_model_with_two_marks_together_computes_the_same() -> None:
    assert_equals_uncut(MarkedTwice(), (torch.randn(3, 4),), expect_stages=2)


def test_marks_with_work_between_them_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipeWarning)
        assert pipeline(Marked(), (torch.randn(3, 4),)).num_stages == 2
