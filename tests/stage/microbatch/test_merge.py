"""Results of microbatches put together: what is joined, averaged, folded, kept, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from pipecut.errors import InputError
from pipecut.stage.microbatch import (
    CustomReducer,
    LossReducer,
    Replicate,
    TensorChunkSpec,
    merge_chunks,
    sum_reducer,
)
from tests.support.nested_values import assert_same


def refusal(*args: Any, **kwargs: Any) -> str:
    """The text of the InputError that a merge raises."""
    with pytest.raises(InputError) as caught:
        merge_chunks(*args, **kwargs)
    return str(caught.value)


# Tensors


@pytest.mark.parametrize("spec", [None, TensorChunkSpec(0), (TensorChunkSpec(0),), (None,)], ids=repr)
def test_tensors_are_joined_along_dim_0(spec: Any) -> None:
    (merged,) = merge_chunks([(tensor([1, 2]),), (tensor([3]),)], spec)
    assert merged.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dim", [1, -1])
def test_tensors_are_joined_along_the_dim_of_the_spec(dim: int) -> None:
    merged = merge_chunks([torch.zeros(2, 3), torch.ones(2, 1)], TensorChunkSpec(dim))
    assert merged.tolist() == [[0, 0, 0, 1]] * 2


def test_the_gradient_of_the_merged_result_reaches_the_chunks() -> None:
    chunks = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    merge_chunks(chunks, None).mul(tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [None if chunk.grad is None else chunk.grad.tolist() for chunk in chunks] == [[1, 2], [3]]


def test_a_single_chunk_is_not_copied() -> None:
    x = torch.zeros(3)
    assert merge_chunks([x], None) is x


def test_replicate_takes_the_first() -> None:
    assert merge_chunks([{"a": tensor([1]), "b": 3}, {"a": tensor([2]), "b": 4}], Replicate) == {
        "a": tensor([1]),
        "b": 3,
    }


@pytest.mark.parametrize("reducer", [CustomReducer, LossReducer])
def test_a_reducer_folds_in_order(reducer: Callable[..., Any]) -> None:
    spec = {"words": reducer("=", lambda so_far, word: so_far + word), "loss": reducer(tensor(1.0), torch.add)}
    chunks = [{"words": word, "loss": tensor(2.0)} for word in "abc"]
    assert merge_chunks(chunks, spec) == {"words": "=abc", "loss": tensor(7.0)}


def test_the_sum_reducer() -> None:
    assert merge_chunks([tensor(2.0), tensor(3.0)], sum_reducer) == tensor(5.0)


# Numbers in tensors


def test_a_tensor_without_dims_is_averaged() -> None:
    assert merge_chunks([tensor(1.0), tensor(4.0)], None) == tensor(2.5)


def test_the_mean_has_the_weights_of_the_sizes() -> None:
    x = torch.randn(5)
    chunks = [(part, part.mean()) for part in x.split(3)]
    joined, mean = merge_chunks(chunks, None, sizes=[3, 2])
    torch.testing.assert_close((joined, mean), (x, x.mean()))


def test_the_mean_of_low_precision_is_taken_in_high_precision() -> None:
    values = [tensor(1.0, dtype=torch.bfloat16)] * 2 + [tensor(1 + 2**-7, dtype=torch.bfloat16)] * 1022
    assert merge_chunks(values, None) == tensor(1 + 2**-7, dtype=torch.bfloat16)


def test_the_mean_is_differentiable() -> None:
    chunks = [tensor(1.0, requires_grad=True), tensor(2.0, requires_grad=True)]
    merge_chunks(chunks, None, sizes=(3, 1)).backward()
    assert [chunk.grad for chunk in chunks] == [tensor(0.75), tensor(0.25)]


def test_a_spec_around_a_tensor_without_dims_leaves_it_to_the_mean() -> None:
    y, loss = merge_chunks([(torch.zeros(1, 2), tensor(1.0)), (torch.ones(1, 1), tensor(3.0))], TensorChunkSpec(1))
    assert (y.tolist(), loss) == ([[0, 0, 1]], tensor(2.0))


def test_counts_are_not_averaged() -> None:
    assert merge_chunks([tensor(3), tensor(3)], None) == tensor(3)
    assert refusal([{"count": tensor(3)}, {"count": tensor(4)}], None) == (
        "output['count'] is a tensor of torch.int64 without dims, with [3, 4] in the microbatches, and how to merge it "
        "is not known: CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"
    )


# Other values


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, "text", True, math.nan, torch.float32, object()], ids=lambda value: type(value).__name__
)
def test_a_value_that_all_have_is_kept(value: Any) -> None:
    assert merge_chunks([(value, 1), (value, 1)], None)[0] is value


def test_equal_values_need_not_be_one_object() -> None:
    assert merge_chunks([float("nan"), float("nan")], None) != 0
    assert merge_chunks([["a" * 2], ["aa"]], None) == ["aa"]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (0.5, 0.25, "0.5 in microbatch 0 and 0.25 in microbatch 1"),
        (1, True, "1 in microbatch 0 and True in microbatch 1"),
        ("a", None, "'a' in microbatch 0 and None in microbatch 1"),
    ],
)
def test_values_that_differ_are_refused(one: Any, other: Any, text: str) -> None:
    assert refusal([{"stats": (0, one)}, {"stats": (0, other)}], None) == (
        f"output['stats'][1] is {text}, and how to merge it is not known: "
        "CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"
    )


def test_objects_that_are_not_the_same_are_refused() -> None:
    class Cache: ...

    assert refusal([Cache(), Cache()], None).startswith("output is <")


# What does not fit together


def test_nothing_to_merge() -> None:
    assert refusal([], None) == "there is nothing to merge: the list of chunks is empty"


def test_the_number_of_sizes() -> None:
    assert refusal([1, 1], None, sizes=(3,)) == "sizes has 1 entries for 2 chunks"


def test_another_structure() -> None:
    assert refusal([{"y": 1}, {"y": 1}, {"y": 1, "aux": 2}], None) == (
        "the outputs of the microbatches differ in structure and cannot be merged: that of microbatch 0 is "
        "a dict with output['y'], and that of microbatch 2 is a dict with output['y'], output['aux']"
    )


def test_a_tensor_in_one_microbatch_only() -> None:
    assert refusal([(torch.zeros(2),), (None,)], None) == (
        "output[0] is a tensor in some microbatches only (Tensor, NoneType), and cannot be merged"
    )


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.zeros(2, 4), "float32[2, 4] on cpu"),
        (torch.zeros(2, 3, dtype=torch.float64), "float64[2, 3] on cpu"),
        (torch.zeros(2, 3, device="meta"), "float32[2, 3] on meta"),
        (torch.zeros(2, 3, 1), "float32[2, 3, 1] on cpu"),
    ],
    ids=["shape", "dtype", "device", "dims"],
)
def test_chunks_that_differ_in_more_than_the_dim(other: Tensor, text: str) -> None:
    assert refusal([torch.zeros(2, 3), other], TensorChunkSpec(0)) == (
        f"output is float32[2, 3] on cpu in microbatch 0 and {text} in microbatch 1: "
        "to be joined along dim 0 they may differ in that dim only"
    )


@pytest.mark.parametrize(("value", "dim"), [(torch.zeros(2), 1), (torch.tensor(1.0), 0)])
def test_a_dim_that_is_not_there(value: Tensor, dim: int) -> None:
    assert refusal([value, value], TensorChunkSpec(dim)) == (
        f"output cannot be joined along dim {dim}: its shape is {list(value.shape)} in microbatch 0; "
        "CustomReducer(init_value, reduce_fn) in output_merge_spec folds it, Replicate() takes the first"
    )


REMEDY = (
    "say in output_merge_spec how to merge such an output: TensorChunkSpec(dim) joins it along a dim, Replicate() "
    "takes that of the first microbatch, CustomReducer(init_value, reduce_fn) folds it"
)


def test_dim_0_that_is_not_the_samples() -> None:
    """Hidden states with the sequence in front would come out three times as long, without a word."""
    chunks = [torch.zeros(7, 2, 4)] * 3
    assert refusal([(chunk,) for chunk in chunks], None, sizes=(2, 2, 2)) == (
        "the outputs of the microbatches cannot be joined along dim 0, which does not hold the samples in all:\n"
        "  the microbatches have [2, 2, 2] samples\n"
        "  output[0] has [7, 7, 7] along dim 0\n"
        f"{REMEDY}"
    )
    assert merge_chunks([(chunk,) for chunk in chunks], TensorChunkSpec(1), sizes=(2, 2, 2))[0].shape == (7, 6, 4)


def test_without_sizes_the_outputs_must_agree_among_themselves() -> None:
    chunks = [{"y": torch.zeros(size), "load": torch.ones(4), "loss": tensor(1.0)} for size in (3, 2)]
    assert refusal(chunks, None) == (
        "the outputs of the microbatches cannot be joined along dim 0, which does not hold the samples in all:\n"
        "  output['y'] has [3, 2] along dim 0\n"
        "  output['load'] has [4, 4] along dim 0\n"
        f"{REMEDY}"
    )
    merged = merge_chunks(chunks, {"load": sum_reducer}, sizes=(3, 2))
    assert_same(merged, {"y": torch.zeros(5), "load": torch.full((4,), 2.0), "loss": tensor(1.0)}, "merged")


def test_a_spec_that_is_not_one() -> None:
    assert refusal([tensor([1])], 0) == "output_merge_spec is 0 (builtins.int), not a spec: write TensorChunkSpec(0)"
    assert refusal([{"y": tensor([1])}], {"y": "sum"}) == (
        "output_merge_spec['y'] is 'sum' (builtins.str), not a spec: write TensorChunkSpec(dim), Replicate(), "
        "CustomReducer(init_value, reduce_fn) of pipecut, or None"
    )


def test_a_spec_of_an_output_that_is_not_there() -> None:
    assert refusal([{"loss": tensor(1.0)}], {"los": sum_reducer}) == (
        "output_merge_spec['los'] says how to treat a value that is not there (there is ['loss']). "
        "Did you mean \"['loss']\"?"
    )


def test_a_container_of_one_spec_for_an_output_that_is_a_tensor() -> None:
    chunks, joined = [tensor([1]), tensor([2])], tensor([1, 2])
    assert_same(merge_chunks(chunks, (TensorChunkSpec(0),)), (joined,), "tuple")
    assert_same(merge_chunks(chunks, [(None,)], sizes=(1, 1)), [(joined,)], "list")
    assert merge_chunks([1, 2], (sum_reducer,)) == (3,)


@pytest.mark.parametrize(("spec", "place"), [((None, None), "[0]"), ({"y": None}, "['y']")])
def test_a_container_that_an_output_has_no_place_in(spec: Any, place: str) -> None:
    assert refusal([tensor([1])], spec) == (
        f"output_merge_spec{place} says how to treat a value that is not there (there is none). The value is not "
        "nested: give the spec itself as output_merge_spec, without a container"
    )
