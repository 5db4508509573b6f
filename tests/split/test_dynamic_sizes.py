"""Sizes with a name: one trace serves all of them, ties them, and says what it does not serve."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import Pipe, PipeWarning, Schedule1F1B, SplitPoint, TensorChunkSpec, pipeline
from pipecut.errors import InputError
from pipecut.run.schedule import PipelineSchedule
from tests.support.sampling import sampled
from tests.support.training import Problem, assert_evaluates_as_uncut, assert_trains_as_uncut

SIZES = [(8, 5), (6, 3), (4, 9), (7, 1), (3, 2)]


class Attention(nn.Module):
    """A small language model: positions, a mask, attention, tokens flattened for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(4))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        seq = ids.shape[1]
        hidden = self.embed(ids) + self.position(torch.arange(seq))
        seen = mask[:, None, :].bool() & torch.ones(seq, seq, dtype=torch.bool).tril()
        for block in self.blocks:
            query, key, value = block(hidden).chunk(3, dim=-1)
            hidden = hidden + F.scaled_dot_product_attention(query, key, value, seen)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.reshape(-1, 20), labels.reshape(-1), reduction="none")
        return loss.view(labels.shape)


def text(batch: int, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(20, (batch, seq)), torch.ones(batch, seq, dtype=torch.long), torch.randint(20, (batch, seq))


def schedule_of(pipe: Pipe, microbatches: int) -> PipelineSchedule:
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    return Schedule1F1B(stages, microbatches, mean_of)


def mean_of(output: Tensor, target: Any) -> Tensor:
    return output.mean()


def assert_serves(pipe: Pipe, model: nn.Module, example: Callable[..., Any], sizes: Any, microbatches: int = 3) -> None:
    """Steps and evaluations of other sizes, one after the other, beside the uncut model."""
    schedule = schedule_of(pipe, microbatches)
    for size in sizes:
        problem = Problem(model, example(*size), torch.zeros(size[0]), mean_of)
        assert_trains_as_uncut(schedule, problem, within=1e-10)
        assert_evaluates_as_uncut(schedule, problem, within=1e-10)


@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param({"ids": {1: "seq"}, "mask": {1: "seq"}, "labels": {1: "seq"}}, marks=pytest.mark.slow),
        {"ids": ("batch", "seq")},
    ],
    ids=["all named", "one named"],
)
@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_one_trace_trains_with_any_batch_and_any_length(dynamic: Any, batch: int) -> None:
    """With an example of one sample too; dims that the model ties to a name need none of their own."""
    model = Attention().double()
    pipe = pipeline(model, text(batch, 5), num_stages=3, dynamic=dynamic)
    assert {entry.path: str(entry.spec) for entry in pipe.traced.inputs} == dict.fromkeys(
        ("ids", "mask", "labels"), "int64[batch, seq]"
    )
    assert "symbolic dims, as in the example: batch=" in str(pipe)
    assert re.search(r"float64\[batch, seq, 8\]", str(pipe))
    assert_serves(pipe, model, text, SIZES)


class Rows(nn.Module):
    """Three layers; `middle` is what the forward does between the first two."""

    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), middle

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x), *others))


def cut(middle: Callable[..., Tensor], *args: Tensor, dynamic: Any, tracer: Any = "auto") -> tuple[Pipe, nn.Module]:
    model = Rows(middle).double()
    args = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    return pipeline(model, args, split_spec={"b": SplitPoint.BEGINNING}, dynamic=dynamic, tracer=tracer), model


def test_a_batch_that_is_not_the_first_dim_is_cut_where_it_is() -> None:
    pipe, model = cut(lambda h: h.cumsum(0), torch.ones(5, 4, 8), dynamic={"x": ("seq", "batch", None)})
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    schedule = Schedule1F1B(stages, 3, mean_of, output_merge_spec=TensorChunkSpec(1))
    x = torch.randn(7, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(schedule.eval(x), model(x))


def test_an_input_without_the_batch_goes_to_every_microbatch() -> None:
    pipe, model = cut(
        lambda h, bias: h + bias,
        torch.ones(4, 5, 8),
        torch.ones(5, 8),
        dynamic={"x": {1: "seq"}, "others[0]": {0: "seq"}},
    )
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, s, 8).double(), torch.randn(s, 8).double()), SIZES)


def test_one_name_is_one_size_also_where_the_model_would_take_two() -> None:
    pipe, _ = cut(
        lambda h, memory: h + memory.mean((0, 1)),
        torch.ones(4, 5, 8),
        torch.ones(4, 5, 8),
        dynamic={"x": ("batch", "seq", None), "others[0]": ("batch", "seq", None)},
    )
    pipe(torch.ones(2, 3, 8).double(), torch.ones(2, 3, 8).double())
    with pytest.raises(InputError) as caught:
        pipe(torch.ones(2, 3, 8).double(), torch.ones(2, 4, 8).double())
    assert "others[0] (dim 1) has size 4, and x (dim 1) has 3; in the trace it is seq, for both" in str(caught.value)


def test_sizes_of_different_names_stay_apart() -> None:
    pipe, model = cut(
        lambda h, memory: h + memory.sum((0, 1)),
        torch.ones(4, 5, 8),
        torch.ones(4, 5, 8),
        dynamic={"x": ("batch", "seq", None), "others[0]": ("rows", "length", None)},
    )
    x, memory = torch.randn(3, 2, 8).double(), torch.randn(6, 7, 8).double()
    torch.testing.assert_close(pipe(x, memory), model(x, memory))
    with torch.no_grad():
        torch.testing.assert_close(schedule_of(pipe, 2).eval(x, memory), model(x, memory))


def fixes_the_length(h: Tensor) -> Tensor:
    return h.reshape(h.shape[0], 5, 8)


def test_a_size_that_the_model_fixes_is_warned_of_once_with_its_line() -> None:
    with pytest.warns(UserWarning, match="sizes only") as told:
        pipe, model = cut(fixes_the_length, torch.ones(4, 5, 8), dynamic={"x": {1: "seq"}})
    (warning,) = [str(warning.message) for warning in told if "sizes only" in str(warning.message)]
    assert warning.startswith("the trace of Rows holds for some sizes only:\n  seq (dim 1 of x) is always 5: fixed at ")
    assert "in fixes_the_length: return h.reshape(h.shape[0], 5, 8)" in warning
    x = torch.randn(3, 5, 8).double()
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(InputError) as caught:
        pipe(torch.ones(3, 6, 8).double())
    assert "x has size 6 in dim 1 (seq); the trace holds for 5 only (it was fixed by the model's code at " in str(
        caught.value
    )
    assert "in fixes_the_length: return h.reshape" in str(caught.value)


def test_a_batch_that_the_model_fixes_is_warned_of_without_being_named() -> None:
    with pytest.warns(UserWarning, match=r"dim 0 of x is always 4: fixed at .*, in <lambda>: "):
        cut(lambda h: h.reshape(4, 5, 8), torch.ones(4, 5, 8), dynamic=None)


def test_two_names_that_the_model_makes_one_size_are_warned_of() -> None:
    x = torch.ones(4, 5, 8)
    with pytest.warns(
        UserWarning, match=r"length \(dim 1 of others\[0\]\) is always seq: fixed at .* If they may differ"
    ):
        pipe, _ = cut(lambda h, y: h + y, x, x, dynamic={"x": {1: "seq"}, "others[0]": {1: "length"}})
    assert str(pipe.traced.inputs[1].spec) == "float64[batch, seq, 8]"


def test_a_size_that_nobody_named_says_how_to_name_it() -> None:
    pipe, _ = cut(lambda h: h, torch.ones(4, 5, 8), dynamic=None)
    with pytest.raises(InputError) as caught:
        pipe(torch.ones(4, 6, 8).double())
    assert (
        "x has size 6 in dim 1; the trace holds for 5 only (it was fixed by the example: call pipeline() with "
        "dynamic={'x': {1: 'a name'}}, or with dynamic='auto', which finds all sizes that may change)"
    ) in str(caught.value)
    pipe, model = cut(lambda h: h, torch.ones(4, 5, 8), dynamic="auto")
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, s, 8).double(),), [(4, 6)])


@pytest.mark.parametrize("batch", sampled([4, 1], lambda batch: batch == 1))
def test_all_sizes_that_the_code_leaves_free_are_found(batch: int) -> None:
    """The sequence of one input is tied to that of another by the code; the width of a weight is fixed."""
    model = Attention().double()
    pipe = pipeline(model, text(batch, 5), num_stages=2, dynamic="auto")
    specs = {entry.path: str(entry.spec) for entry in pipe.traced.inputs}
    assert specs == dict.fromkeys(("ids", "mask", "labels"), "int64[batch, ids_dim1]")
    assert_serves(pipe, model, text, SIZES)


def test_what_the_code_fixes_is_no_reason_for_a_warning_if_nobody_named_it() -> None:
    def unrolled(h: Tensor, rotations: Tensor, bias: Tensor) -> Tensor:
        steps = [h[:, :, step] for step in range(h.shape[2])]
        return torch.stack(steps, 2) * rotations[:, None] + bias

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = torch.ones(4, 5, 3, 8), torch.ones(5, 8), torch.ones(1, 3, 1)
        pipe, model = cut(unrolled, *inputs, dynamic="auto")
    specs = [str(entry.spec) for entry in pipe.traced.inputs]
    # The first dim of the rotations is the length of the sequence, and no batch; a size of 1 is broadcast.
    assert specs == ["float64[batch, x_dim1, 3, 8]", "float64[x_dim1, 8]", "float64[1, 3, 1]"]
    bias = torch.ones(1, 3, 1).double()
    make = lambda b, s: (torch.randn(b, s, 3, 8).double(), torch.randn(s, 8).double(), bias)  # noqa: E731
    assert_serves(pipe, model, make, SIZES)
    with pytest.raises(
        InputError, match="x has size 4 in dim 2; the trace holds for 3 only .*fixed by the model's code"
    ):
        pipe(torch.ones(4, 5, 4, 8).double(), torch.ones(5, 8).double(), bias)


def numbers_only(h: Tensor) -> Tensor:
    if isinstance(h.shape[1], torch.SymInt):
        raise RuntimeError("this needs a plain number")
    return h * h.shape[1]


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_a_model_that_cannot_be_traced_with_all_sizes_symbolic(tracer: Any) -> None:
    with pytest.warns(PipeWarning) as caught:
        pipe, model = cut(numbers_only, torch.ones(4, 5, 8), dynamic="auto", tracer=tracer)
    (warning,) = caught
    assert "Rows cannot be traced with dynamic='auto' (RuntimeError: this needs a plain number" in str(warning.message)
    assert "All sizes but the batch are those of the example: name the ones that change, " in str(warning.message)
    assert str(pipe.traced.inputs[0].spec) == "float64[batch, 5, 8]"
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, 5, 8).double(),), [(6, 5)])


def branches(h: Tensor) -> Tensor:
    return h * 2 if 2 < h.shape[1] <= 64 else h


def test_a_size_that_was_ruled_out_is_refused_with_the_allowed_range() -> None:
    pipe, model = cut(branches, torch.ones(4, 5, 8), dynamic={"x": {1: "seq"}})
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, s, 8).double(),), [(3, 3), (4, 64)])
    for size in (2, 65):
        with pytest.raises(InputError) as caught:
            pipe(torch.ones(4, size, 8).double())
        told = str(caught.value)
        assert re.search(rf"seq = {size}: the model's code found .*seq.* in the example \(at .*, in branches: ", told)
        assert (
            "and the trace holds for that only (allowed: seq from 3 to 64); for other sizes call pipeline() with an "
            "example of that size"
        ) in told


def test_a_list_of_dims_gives_names_by_itself() -> None:
    pipe, model = cut(lambda h: h.mean(1), torch.ones(4, 5, 8), dynamic={"x": [1]})
    assert pipe.traced.hints == {"batch": 4, "x_dim1": 5}
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, s, 8).double(),), SIZES)


def test_a_size_that_happens_to_be_as_large_as_a_named_one_is_no_size_of_its_own() -> None:
    """The width of the table is 5 as the sequence is; nothing in the model says that they change together."""
    pipe, model = cut(
        lambda h, table: h + table.sum(),
        torch.ones(4, 5, 8),
        torch.ones(2, 5),
        dynamic={"x": {1: "seq"}, "others[0]": {0: "n"}},
    )
    assert str(pipe.traced.inputs[1].spec) == "float64[n, 5]"
    assert_serves(pipe, model, lambda b, s: (torch.randn(b, s, 8).double(), torch.randn(3, 5).double()), SIZES)


def test_nothing_is_warned_of_where_all_names_hold() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe, model = cut(lambda h: h, torch.ones(1, 1, 8), dynamic={"x": {1: "seq"}})
    uncut = copy.deepcopy(model)
    x = torch.randn(6, 7, 8).double()
    torch.testing.assert_close(pipe(x), uncut(x))


@pytest.mark.parametrize("name", ["value", "function", "x", "a", "stage"])
def test_any_word_can_be_the_name_of_a_size(name: str) -> None:
    """Names of sizes are variables of generated code, beside those of values, modules and functions."""
    pipe, model = cut(
        lambda h: h.reshape(h.shape[0] * h.shape[1], 8) * h.shape[1], torch.ones(4, 5, 8), dynamic={"x": {1: name}}
    )
    x = torch.randn(2, 3, 8).double()
    torch.testing.assert_close(pipe(x), model(x))


class Pooled(nn.Module):
    """A module that treats one row apart, as attention over one query that is expanded to the batch does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x + x


def test_an_example_of_one_row_that_a_whole_module_treats_apart_holds_for_all() -> None:
    """A module that is not cut decides anew at each call; its decision kept the trace to batches of one row."""
    model = nn.Sequential(nn.Linear(8, 8), Pooled(), nn.Linear(8, 8)).double()
    pipe = pipeline(model, (torch.ones(1, 8).double(),), split_spec={"2": SplitPoint.BEGINNING})
    for rows in (1, 4):
        x = torch.randn(rows, 8).double()
        torch.testing.assert_close(pipe(x), model(x))


def test_an_example_of_one_row_that_the_model_treats_apart_holds_for_one_row() -> None:
    """`squeeze` drops a dim of size 1 and keeps any other: no trace holds for both."""
    pipe, model = cut(lambda h: h.unsqueeze(1).squeeze(), torch.ones(1, 5, 8), dynamic=None)
    x = torch.randn(1, 5, 8).double()
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(InputError) as caught:
        pipe(torch.ones(4, 5, 8).double())
    assert (
        "x has size 4 in dim 0; the trace holds for 1 only (it was fixed by the example, which has one row: call "
        "pipeline() with an example of several)"
    ) in str(caught.value)
