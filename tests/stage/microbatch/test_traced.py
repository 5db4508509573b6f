"""Calls of a traced model, cut where the trace has the batch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipeWarning, SplitPoint, pipeline
from pipecut.errors import InputError
from pipecut.pipe import Pipe
from pipecut.stage.microbatch import batch_dims, merge_chunks, split_by_dims


class Net(nn.Module):
    """Uses its arguments in the ways that tell a trace which of them are of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *more: Tensor, batch: dict[str, Any], scale: float = 1.0, **options: Any) -> Tensor:
        hidden: Tensor = self.first(x) * batch["mask"][:, None] + batch["positions"]
        return self.second(hidden + sum(more) + options["temperature"]) * scale


def call(samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = {"mask": torch.rand(samples), "positions": torch.rand(4)}
    args = (torch.randn(samples, 4), torch.randn(samples, 4), torch.randn(4))
    return args, {"batch": batch, "temperature": torch.tensor(0.5), "scale": 2.0}


def cut(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, dynamic: Any = None) -> Pipe:
    return pipeline(model, args, kwargs, split_spec={"second": SplitPoint.BEGINNING}, dynamic=dynamic)


def test_a_traced_call_is_cut_where_its_batch_is() -> None:
    model = Net()
    pipe = cut(model, *call(3))
    args, kwargs = call(7)
    batch = batch_dims(pipe.traced.call, args, kwargs)
    assert batch is not None
    assert (batch.samples, batch.exact, batch.untied) == (7, None, ())
    assert batch.dims == {
        "x": 0,
        "more[0]": 0,
        "more[1]": None,
        "batch['mask']": 0,
        "batch['positions']": None,
        "options['temperature']": None,
    }
    made = split_by_dims(args, kwargs, 3, batch.dims, pipe.traced.signature)
    assert made.sizes == (3, 2, 2)
    outputs = [pipe(*part, **named) for part, named in zip(made.args, made.kwargs, strict=True)]
    torch.testing.assert_close(merge_chunks(outputs, None, made.sizes), model(*args, **kwargs))


def test_a_trace_for_one_size_has_microbatches_of_that_size() -> None:
    class Fixed(Net):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            hidden: Tensor = self.second(self.first(x).reshape(3, 4))
            return hidden

    with pytest.warns(PipeWarning, match="dim 0 of x is always 3"):
        pipe = cut(Fixed(), (torch.zeros(3, 4),))
    batch = batch_dims(pipe.traced.call, (torch.zeros(6, 4),), {})
    assert batch is not None
    assert (batch.dims, batch.samples, batch.exact) == ({"x": 0}, 6, 3)
    assert "test_traced.py" in batch.source


def test_what_the_code_compares_with_a_batch_of_one_size_is_cut_with_it() -> None:
    """Labels of models of sound stayed whole: the forward asks for `len(x)`, and the loss compares them with that."""

    class Fixed(Net):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            hidden = self.first(x) / len(x)
            return nn.functional.mse_loss(self.second(hidden), labels)

    with pytest.warns(PipeWarning, match="dim 0 of x is always 3"):
        pipe = cut(Fixed(), (torch.zeros(3, 4), torch.zeros(3, 4)))
    batch = batch_dims(pipe.traced.call, (torch.zeros(6, 4), torch.zeros(6, 4)), {})
    assert batch is not None
    assert (batch.dims, batch.samples, batch.exact) == ({"x": 0, "labels": 0}, 6, 3)


class Lookup(Net):
    """Nothing ties the rows of its arguments."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        hidden: Tensor = self.second(self.first(x) + table[0])
        return hidden


@pytest.mark.parametrize(("example", "rows"), [(9, 9), (3, 9)])
def test_two_sizes_that_are_not_tied_and_differ_are_refused(example: int, rows: int) -> None:
    """They differ in the example, or in the call."""
    pipe = cut(Lookup(), (torch.zeros(3, 4), torch.zeros(example, 4)))
    with pytest.raises(InputError) as caught:
        batch_dims(pipe.traced.call, (torch.zeros(6, 4), torch.zeros(rows, 4)), {})
    assert str(caught.value) == (
        "the trace does not show which of batch, table_dim0 is the batch, that is to be cut:\n"
        "  x is float32[batch, 4]\n"
        "  table is float32[table_dim0, 4]\n"
        'name them in pipeline(), such as dynamic={"x": {0: "batch"}, "table": {0: "rows1"}}: the one called batch is '
        "cut; or say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or "
        "Replicate()"
    )


def test_a_size_that_is_not_the_batch_itself_is_refused() -> None:
    class Doubled(Net):
        def forward(self, x: Tensor, pairs: Tensor) -> Tensor:  # type: ignore[override]
            hidden: Tensor = self.second(self.first(x).repeat(2, 1) + pairs)
            return hidden

    pipe = cut(Doubled(), (torch.zeros(3, 4), torch.zeros(6, 4)))
    with pytest.raises(InputError) as caught:
        batch_dims(pipe.traced.call, (torch.zeros(3, 4), torch.zeros(6, 4)), {})
    assert str(caught.value) == (
        "pairs is float32[2*batch, 4] in the trace, which cannot be cut along batch: "
        "say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or Replicate()"
    )


def dims_of(pipe: Pipe, *rows: int) -> dict[str, int | None]:
    batch = batch_dims(pipe.traced.call, tuple(torch.zeros(each, 4) for each in rows), {})
    assert batch is not None
    return dict(batch.dims)


def test_inputs_that_are_as_large_in_the_example_and_in_the_call_belong_together() -> None:
    pipe = cut(Lookup(), (torch.zeros(3, 4), torch.zeros(3, 4)))
    assert dims_of(pipe, 6, 6) == {"x": 0, "table": 0}
    assert dims_of(pipe, 6, 1) == {"x": 0, "table": None}  # one row is for all samples
    batch = batch_dims(pipe.traced.call, (torch.zeros(6, 4), torch.zeros(6, 4)), {})
    assert batch is not None
    assert batch.untied == ("table",)


def test_a_size_of_another_name_is_not_the_batch() -> None:
    """Also if the example or the call has as many of both."""
    for dynamic in ({"table": {0: "rows"}}, {"x": {0: "batch"}, "table": {0: "rows"}}):
        pipe = cut(Lookup(), (torch.zeros(3, 4), torch.zeros(3, 4)), dynamic=dynamic)
        assert dims_of(pipe, 6, 6) == {"x": 0, "table": None}


def test_beside_a_size_that_is_called_batch_one_that_was_another_in_the_example_is_not_it() -> None:
    pipe = cut(Lookup(), (torch.zeros(3, 4), torch.zeros(9, 4)), dynamic={"x": {0: "batch"}})
    assert dims_of(pipe, 6, 6) == {"x": 0, "table": None}


# split_by_dims alone


def signature_of(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def forward(x: Tensor, batch: dict[str, Any], *rest: Tensor, flag: bool = False, **named: Any) -> None: ...


def test_arguments_are_named_by_the_parameters_however_they_are_passed() -> None:
    dims = {"x": 1, "batch['ids']": 0, "rest[0]": None, "named['y']": 0}
    x, ids, y = torch.zeros(2, 4), torch.arange(4), torch.arange(4)
    made = split_by_dims((x, {"ids": ids}, ids), {"y": y, "flag": True}, 2, dims, signature_of(forward))
    assert [each[0].shape for each in made.args] == [(2, 2)] * 2
    assert [each[1]["ids"].tolist() for each in made.args] == [[0, 1], [2, 3]]
    assert all(each[2] is ids for each in made.args)
    assert [(each["y"].tolist(), each["flag"]) for each in made.kwargs] == [([0, 1], True), ([2, 3], True)]
    by_name = split_by_dims((), {"batch": {"ids": ids}, "x": x}, 2, dims, signature_of(forward))
    assert [each["batch"]["ids"].tolist() for each in by_name.kwargs] == [[0, 1], [2, 3]]
    assert [list(each) for each in by_name.kwargs] == [["batch", "x"]] * 2


def refusal(args: tuple[Any, ...], kwargs: dict[str, Any], dims: dict[str, int | None]) -> str:
    with pytest.raises(InputError) as caught:
        split_by_dims(args, kwargs, 2, dims, signature_of(forward))
    return str(caught.value)


def test_a_tensor_of_which_nothing_is_known() -> None:
    x = torch.zeros(4)
    assert refusal((x, {"ids": x}), {}, {"x": 0}) == (
        "batch['ids'] is a tensor [4], and it is not known in which dim its samples are: they are known of x"
    )
    assert refusal((x, {}), {}, {}).endswith("they are known of no argument")


def test_sizes_that_differ() -> None:
    assert refusal((torch.zeros(4), {"ids": torch.zeros(3, 5)}), {}, {"x": 0, "batch['ids']": 1}) == (
        "the arguments to be cut into 2 microbatches do not have the same number of samples:\n"
        "  x of shape [4] has 4 along dim 0\n"
        "  batch['ids'] of shape [3, 5] has 5 along dim 1\n"
        "for the model they are the samples of one batch: pass as many in each"
    )


def test_fewer_samples_than_microbatches() -> None:
    assert refusal((torch.zeros(1), {}), {}, {"x": 0}) == (
        "1 sample cannot be cut into 2 microbatches (x has shape [1], cut along dim 0): "
        "pass at least 2, or ask for fewer microbatches, at most 1"
    )


def test_arguments_that_do_not_fit_the_signature() -> None:
    assert refusal((), {"x": torch.zeros(4)}, {"x": 0}).endswith(": missing a required argument: 'batch'")
    assert refusal((), {"x": torch.zeros(4)}, {"x": 0}).startswith("the arguments do not fit forward(x: ")
