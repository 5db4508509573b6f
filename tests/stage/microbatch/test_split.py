"""Arguments cut into microbatches: sizes, structures, specs, and that chunks are views of the whole."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pipecut.stage.microbatch import (
    Replicate,
    TensorChunkSpec,
    split_args_kwargs_into_chunks,
    split_by_specs,
    split_tensor,
)
from pipecut.stage.microbatch.split import even_sizes
from tests.support.nested_values import assert_same


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None
    name: str = "batch"


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Both a dict and a dataclass, keys and attributes the same."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


def rows(count: int, *rest: int) -> Tensor:
    """A tensor in which every row can be told from the others."""
    return torch.arange(float(count)).reshape(count, *(1 for _ in rest)).expand(count, *rest).contiguous()


def kwargs_of(value: Any, chunks: int, spec: Any = None) -> list[Any]:
    """The chunks of one keyword argument."""
    kwarg_spec = None if spec is None else {"value": spec}
    args, kwargs = split_args_kwargs_into_chunks((), {"value": value}, chunks, None, kwarg_spec)
    assert args == [()] * chunks
    return [each["value"] for each in kwargs]


@pytest.mark.parametrize(
    ("samples", "chunks", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (7, 4, [2, 2, 2, 1]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])],
)
def test_sizes_differ_by_one_at_most_and_the_larger_come_first(samples: int, chunks: int, sizes: list[int]) -> None:
    assert list(even_sizes(samples, chunks)) == sizes
    x = rows(samples, 3)
    made = split_by_specs((x,), None, chunks)
    assert made.sizes == tuple(sizes)
    assert [len(chunk) for (chunk,) in made.args] == sizes
    assert torch.equal(torch.cat([chunk for (chunk,) in made.args]), x)


def test_positional_and_keyword_arguments_keep_their_places() -> None:
    args, kwargs = split_args_kwargs_into_chunks((rows(5), "gelu", None), {"y": rows(5), "scale": 0.5}, 2)
    assert [[type(part) for part in each] for each in args] == [[Tensor, str, type(None)]] * 2
    assert [list(each) for each in kwargs] == [["y", "scale"]] * 2
    assert [each[0].tolist() for each in args] == [each["y"].tolist() for each in kwargs] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("kwargs", [None, {}])
def test_a_call_without_arguments_needs_no_specs(kwargs: dict[str, Any] | None) -> None:
    spec = (TensorChunkSpec(0),)
    assert split_args_kwargs_into_chunks((), kwargs, 3, spec, {"y": Replicate()}) == ([(), (), ()], [{}, {}, {}])
    assert split_by_specs((), kwargs, 3).sizes is None


STRUCTURES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"ids": x, 3: [x, (x, None)]},
    "list": lambda x: [x, True, 3, 2.5, "text", None, torch.float32, ...],
    "namedtuple": lambda x: Pair(x, [x, 7]),
    "dataclass": lambda x: Batch(x, mask={"causal": x}),
    "ModelOutput": lambda x: ModelOutput(x, None),
    "OrderedDict": lambda x: OrderedDict(b=x, a=x),
    "defaultdict": lambda x: defaultdict(list, {"a": x}),
    "empty": lambda x: [x, (), [], {}],
}


@pytest.mark.parametrize("made_of", STRUCTURES.values(), ids=STRUCTURES)
def test_every_kind_of_structure_is_cut_inside_and_kept_outside(made_of: Callable[[Tensor], Any]) -> None:
    x = rows(5, 2)
    first, second = kwargs_of(made_of(x), 2)
    assert_same(first, made_of(x[:3]), "first")
    assert_same(second, made_of(x[3:]), "second")


def test_attributes_of_a_model_output_are_cut_as_its_keys() -> None:
    first, second = kwargs_of(ModelOutput(rows(4), rows(4)), 2)
    assert first.logits is first["logits"]
    assert second.logits.tolist() == second["logits"].tolist() == [2, 3]


def test_microbatches_do_not_share_containers() -> None:
    first, second = kwargs_of({"x": rows(2), "options": {"dropout": 0.1}}, 2)
    first["options"]["dropout"] = 0.9
    del first["x"]
    assert second["options"] == {"dropout": 0.1}
    assert second["x"].tolist() == [1]


def test_a_tensor_without_dims_goes_to_every_microbatch() -> None:
    temperature = torch.tensor(0.5)
    assert all(each["t"] is temperature for each in kwargs_of({"x": rows(4), "t": temperature}, 2))


def test_objects_without_tensors_go_to_every_microbatch() -> None:
    class Config:
        def __init__(self) -> None:
            self.depth = 3

    values = (Config(), torch.nn.Linear(2, 2), torch.nn.Linear, torch.Generator(), torch.relu)
    args, _ = split_args_kwargs_into_chunks((rows(4), *values), None, 2)
    assert all(part is value for each in args for part, value in zip(each[1:], values, strict=True))


# Specs


@pytest.mark.parametrize("dim", [1, -1])
def test_a_spec_names_the_dim_also_from_the_end(dim: int) -> None:
    x = torch.arange(10).reshape(2, 5)
    first, second = kwargs_of(x, 2, TensorChunkSpec(dim))
    assert torch.equal(first, x[:, :3])
    assert torch.equal(second, x[:, 3:])


@pytest.mark.parametrize("replicate", [Replicate, Replicate()], ids=repr)
def test_replicate_gives_the_same_object_to_all(replicate: Any) -> None:
    table = rows(7)
    args, _ = split_args_kwargs_into_chunks((rows(4), table), None, 2, (None, replicate))
    assert all(each[1] is table for each in args)
    assert [each[0].tolist() for each in args] == [[0, 1], [2, 3]]


def test_one_spec_for_a_nested_argument_holds_inside_it() -> None:
    value = {"x": rows(4).reshape(1, 4), "deep": [rows(4).reshape(1, 4), torch.tensor(1.0), 5, None]}
    first, _ = kwargs_of(value, 2, TensorChunkSpec(1))
    assert first["x"].tolist() == first["deep"][0].tolist() == [[0, 1]]
    assert first["deep"][1:] == [torch.tensor(1.0), 5, None]


def test_one_spec_for_all_arguments() -> None:
    args, kwargs = split_args_kwargs_into_chunks(
        (torch.zeros(1, 4), torch.zeros(2, 4)), {"table": torch.zeros(9)}, 2, TensorChunkSpec(1), Replicate()
    )
    assert [[part.shape for part in each] for each in args] == [[(1, 2), (2, 2)]] * 2
    assert [each["table"].shape for each in kwargs] == [(9,)] * 2


@pytest.mark.parametrize(
    "spec",
    [
        Batch(TensorChunkSpec(0), {"causal": TensorChunkSpec(1)}, name=Replicate()),  # type: ignore[arg-type]
        {"mask": {"causal": TensorChunkSpec(1)}},
        {"mask": TensorChunkSpec(1)},
        {"ids": None, "mask": {"causal": TensorChunkSpec(1)}, "name": Replicate},
    ],
    ids=["the same type", "a dict", "a dict, one spec inside", "None and Replicate"],
)
def test_a_nested_spec_matches_by_keys_and_leaves_the_rest_to_the_default(spec: Any) -> None:
    first, second = kwargs_of(Batch(rows(4), {"causal": rows(4).reshape(1, 4)}), 2, spec)
    assert_same(first, Batch(rows(4)[:2], {"causal": rows(4).reshape(1, 4)[:, :2]}), "first")
    assert_same(second, Batch(rows(4)[2:], {"causal": rows(4).reshape(1, 4)[:, 2:]}), "second")


def test_specs_from_dims() -> None:
    assert TensorChunkSpec.from_tuple((0, None, 1)) == (TensorChunkSpec(0), None, TensorChunkSpec(1))
    assert TensorChunkSpec.from_dict({"y": 0, "z": [1]}) == {"y": TensorChunkSpec(0), "z": [TensorChunkSpec(1)]}


def test_nothing_but_replicated_values() -> None:
    made = split_by_specs((rows(3),), None, 5, (Replicate(),))
    assert made.sizes is None
    assert all(torch.equal(chunk, rows(3)) for (chunk,) in made.args)
    assert len(made.args) == 5


# Chunks are views


def test_chunks_share_the_memory_of_the_whole() -> None:
    x = rows(10, 3)
    chunks = kwargs_of(x, 4)
    assert all(chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for chunk in chunks)
    chunks[1].zero_()
    assert x[:, 0].tolist() == [0, 1, 2, 0, 0, 0, 6, 7, 8, 9]


def test_gradients_of_chunks_reach_the_whole_tensor() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    shared = torch.randn(3, requires_grad=True)
    args, _ = split_args_kwargs_into_chunks((x, shared), None, 3, (None, Replicate()))
    for chunk, weight in args:
        (chunk * chunk * weight).sum().backward()
    got = x.grad, shared.grad
    x.grad = shared.grad = None
    (x * x * shared).sum().backward()
    torch.testing.assert_close(got, (x.grad, shared.grad))


def test_chunks_may_be_written_to_as_the_whole_may() -> None:
    x = torch.ones(4, requires_grad=True) * 2
    for chunk in kwargs_of(x, 2):
        chunk.mul_(3)
    x.sum().backward()
    assert x.tolist() == [6, 6, 6, 6]


def test_a_tensor_that_is_passed_twice_stays_one() -> None:
    x = rows(4)
    args, kwargs = split_args_kwargs_into_chunks((x, [x]), {"again": x}, 2)
    for each, others in zip(args, kwargs, strict=True):
        assert each[0] is each[1][0] is others["again"]


def test_split_tensor() -> None:
    x = torch.arange(10).reshape(2, 5)
    chunks = split_tensor(x, TensorChunkSpec(1), 3)
    assert [chunk.tolist() for chunk in chunks] == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]


def test_other_devices_and_dtypes_are_kept() -> None:
    first, second = kwargs_of(torch.zeros(3, 2, dtype=torch.bfloat16, device="meta"), 2)
    assert (first.shape, second.shape) == ((2, 2), (1, 2))
    assert first.is_meta
    assert second.dtype == torch.bfloat16
