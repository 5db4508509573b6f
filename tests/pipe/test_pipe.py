"""A Pipe: what it tells of itself, and that a broken one cannot be made."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from pipecut import (
    Edge,
    InputError,
    Pipe,
    PipeError,
    PipeInfo,
    SplitPoint,
    StageInfo,
    TensorSpec,
    TiedParameter,
    pipeline,
)
from pipecut.pipe_ir.traced import TracedCall, TracedInput

X, Y = torch.randn(4, 8), torch.randn(4, 8)


class Model(nn.Module):
    """Three layers, the first and the last with one weight, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.spare = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c(self.drop(self.b(self.a(x)))) + y


@pytest.fixture(scope="module")
def pipe() -> Pipe:
    """A Model in three stages; nothing changes it."""
    return pipeline(Model(), (X, Y), split_spec={"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING})


def fresh_pipe() -> Pipe:
    return pipeline(Model(), (X, Y), split_spec={"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING})


def test_the_info_tells_the_stages_and_what_goes_between_them(pipe: Pipe) -> None:
    info = pipe.info()
    assert isinstance(info, PipeInfo)
    assert info.num_stages == pipe.num_stages == len(info.stages) == 3
    assert all(isinstance(stage, StageInfo) for stage in info.stages)
    assert [stage.index for stage in info.stages] == [0, 1, 2]
    assert [stage.input_names for stage in info.stages] == [("x",), ("a",), ("y", "drop")]
    assert [stage.output_names for stage in info.stages[:2]] == [("a",), ("drop",)]
    assert [stage.modules for stage in info.stages] == [("a",), ("b", "drop"), ("c",)]
    assert all("def forward(self" in "".join(stage.code.values()) for stage in info.stages)
    assert {edge.name: (edge.kind, edge.source, edge.target, str(edge.spec)) for edge in info.edges} == {
        "a": ("activation", 0, 1, "float32[batch, 8] grad"),
        "drop": ("activation", 1, 2, "float32[batch, 8] grad"),
        "y": ("root input", 0, 2, "float32[batch, 8]"),
    }
    assert info.tied_parameters == (TiedParameter(("a.weight", "c.weight"), (0, 2), 0),)
    assert info.unused_parameters == ("spare.weight", "spare.bias")


def test_the_info_counts_operations_in_the_users_symbol(pipe: Pipe) -> None:
    batch = pipe.info().stages[0].flops.free_symbols
    assert {str(symbol) for symbol in batch} == {"batch"}
    assert pipe.info().stages[0].flops.subs(dict.fromkeys(batch, 4)) == 2 * 4 * 8 * 8


def test_the_info_is_sent_by_pickle(pipe: Pipe) -> None:
    assert pickle.loads(pickle.dumps(pipe.info())) == pipe.info()


def parts(value: Any) -> Iterator[Any]:
    """A nested value and all that is in it."""
    yield value
    inner: Any = ()
    if dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, tuple | list):
        inner = value
    for part in inner:
        yield from parts(part)


def test_the_info_has_no_modules_and_no_tensors_in_it(pipe: Pipe) -> None:
    known = (PipeInfo, StageInfo, Edge, TiedParameter, TensorSpec, sympy.Basic, torch.dtype)
    known += (TracedCall, TracedInput, inspect.Signature)
    plain = (str, int, bool, tuple, Mapping, type(None))
    assert [part for part in parts(pipe.info()) if not isinstance(part, known + plain)] == []


def test_sizes_are_those_of_a_call(pipe: Pipe) -> None:
    assert pipe.sizes(X, Y) == {"batch": 4}
    assert pipe.sizes(y=Y[:3], x=X[:3]) == {"batch": 3}
    sizes = pipe.sizes(X[:2], Y[:2])
    assert pipe.edges[0].spec.bind(sizes).shape == (2, 8)
    with pytest.raises(InputError, match="x has size 7 in dim 1"):
        pipe.sizes(torch.randn(4, 7), Y)


def test_all_modules_of_all_stages_follow_train_and_eval() -> None:
    pipe = fresh_pipe()
    for change, training in ((pipe.eval, False), (pipe.train, True), (lambda: pipe.train(False), False)):
        assert change() is pipe
        assert {module.training for stage in pipe.stages for module in stage.modules()} == {training}
    assert pipe.traced.model.training, "the user's model is left alone"
    assert torch.equal(pipe(X, Y), pipe.traced.model.eval()(X, Y))


def test_all_stages_move_to_a_device() -> None:
    pipe = fresh_pipe()
    assert pipe.to("cpu") is pipe
    assert pipe.to(torch.device("meta")) is pipe
    assert {tensor.device.type for stage in pipe.stages for tensor in stage.parameters()} == {"meta"}
    assert pipe(X.to("meta"), Y.to("meta")).shape == (4, 8)


def test_stages_are_counted_from_zero(pipe: Pipe) -> None:
    assert [pipe.get_stage_module(index) for index in range(3)] == list(pipe.stages)
    for index in (-1, 3, "0", 1.0, None):
        with pytest.raises(PipeError, match=f"no stage {index!r}: this pipe has stages 0 to 2"):
            pipe.get_stage_module(index)  # type: ignore[arg-type]


def edges(pipe: Pipe, name: str, **changes: Any) -> dict[str, Any]:
    """The pipe's edges with one of them changed, or left out if there are no changes."""
    changed = [dataclasses.replace(edge, **changes) for edge in pipe.edges if edge.name == name and changes]
    return {"edges": (*(edge for edge in pipe.edges if edge.name != name), *changed)}


def without_a_parameter(pipe: Pipe) -> tuple[nn.Module, ...]:
    stage = copy.deepcopy(pipe.stages[1])
    del stage.get_submodule("b").bias
    return pipe.stages[0], stage, pipe.stages[2]


BROKEN: dict[str, tuple[Callable[[Pipe], dict[str, Any]], str]] = {
    "stages swapped": (lambda pipe: {"stages": (pipe.stages[1], pipe.stages[0], pipe.stages[2])}, "stage [01]"),
    "a stage lost": (lambda pipe: {"stages": pipe.stages[:2]}, r"stage 2|2 stages|3 stage|c\.bias"),
    "an edge lost": (lambda pipe: edges(pipe, "a"), "nothing brings a to stage 1"),
    "a root input lost": (lambda pipe: edges(pipe, "y"), "nothing brings y to stage 2"),
    "an edge twice": (lambda pipe: {"edges": pipe.edges * 2}, r"\bdrop\b.*\b2\b"),
    "an edge to nowhere": (lambda pipe: edges(pipe, "drop", target=9), r"\bdrop\b.*\b9\b|\b9\b.*\bdrop\b"),
    "an edge from nowhere": (lambda pipe: edges(pipe, "drop", source=-2), r"\bdrop\b.*-2|-2.*\bdrop\b"),
    "an edge backwards": (
        lambda pipe: edges(pipe, "drop", source=2, target=1),
        "drop goes from stage 2 (back )?to stage 1",
    ),
    "another source": (lambda pipe: edges(pipe, "drop", source=0), "stage 0 does not make drop, which stage 2 uses"),
    "another source of a root input": (lambda pipe: edges(pipe, "y", source=1), r"stage 1\b.*\by\b|\by\b.*stage 1\b"),
    "another target": (lambda pipe: edges(pipe, "a", target=2), "stage 2 does not use a, which stage 0 sends to it"),
    "a tie lost": (lambda pipe: {"tied_parameters": ()}, r"[ac]\.weight"),
    "an info lost": (lambda pipe: {"stage_infos": pipe.stage_infos[:2]}, "stage_infos|stage 2|3 stages"),
    "a parameter lost": (lambda pipe: {"stages": without_a_parameter(pipe)}, r"b\.bias of the model is in no stage"),
}


@pytest.mark.parametrize(("breaking", "culprit"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_pipe_cannot_be_made(pipe: Pipe, breaking: Callable[[Pipe], dict[str, Any]], culprit: str) -> None:
    dataclasses.replace(pipe)
    with pytest.raises(PipeError) as error:
        dataclasses.replace(pipe, **breaking(pipe))
    assert re.search(culprit, str(error.value)), str(error.value)
