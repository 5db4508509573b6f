"""Calls that cannot be cut for certain are refused, and the message says what to write instead."""

from __future__ import annotations

import re
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipecut.errors import InputError
from pipecut.stage.microbatch import (
    CustomReducer,
    Replicate,
    TensorChunkSpec,
    split_args_kwargs_into_chunks,
    split_by_specs,
    split_tensor,
)
from tests.support.properties import examples


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "2"])
def test_the_number_of_microbatches(chunks: Any) -> None:
    assert refusal(split_args_kwargs_into_chunks, (torch.zeros(4),), None, chunks) == (
        f"the number of microbatches must be an integer of at least 1; got {chunks!r}"
    )


def test_fewer_samples_than_microbatches() -> None:
    assert refusal(split_args_kwargs_into_chunks, (7, torch.zeros(3, 5)), None, 4) == (
        "3 samples cannot be cut into 4 microbatches (args[1] has shape [3, 5], cut along dim 0): "
        "pass at least 4, or ask for fewer microbatches, at most 3"
    )


def test_no_sample_at_all() -> None:
    assert refusal(
        split_args_kwargs_into_chunks, (), {"batch": {"x": torch.zeros(2, 0)}}, 1, None, TensorChunkSpec(1)
    ) == ("0 samples cannot be cut into 1 microbatches (batch['x'] has shape [2, 0], cut along dim 1): pass at least 1")


def test_default_specs_and_different_sizes() -> None:
    call = (torch.zeros(10, 3), 5), {"mask": torch.zeros(1, 4), "y": torch.zeros(10)}
    assert refusal(split_args_kwargs_into_chunks, *call, 4) == (
        "the arguments to be cut into 4 microbatches do not have the same number of samples:\n"
        "  args[0] of shape [10, 3] has 10 along dim 0\n"
        "  mask of shape [1, 4] has 1 along dim 0\n"
        "  y of shape [10] has 10 along dim 0\n"
        "if mask should go to every microbatch whole, write\n"
        "  args_chunk_spec=(TensorChunkSpec(0), None), "
        "kwargs_chunk_spec={'mask': Replicate(), 'y': TensorChunkSpec(0)}\n"
        "and if the samples lie along another dim, TensorChunkSpec(dim) there"
    )


def test_explicit_specs_and_different_sizes() -> None:
    """Sample 3 of one argument would meet sample 2 of the other."""
    specs = (TensorChunkSpec(1), TensorChunkSpec(0))
    assert refusal(split_args_kwargs_into_chunks, (torch.zeros(3, 8), torch.zeros(6)), None, 2, specs) == (
        "the arguments to be cut into 2 microbatches do not have the same number of samples:\n"
        "  args[0] of shape [3, 8] has 8 along dim 1\n"
        "  args[1] of shape [6] has 6 along dim 0\n"
        "if args[1] should go to every microbatch whole, write\n"
        "  args_chunk_spec=(TensorChunkSpec(1), Replicate())\n"
        "and if the samples lie along another dim, TensorChunkSpec(dim) there"
    )


def test_the_odd_one_inside_a_nested_argument() -> None:
    batch = {"ids": torch.zeros(8, 2), "tables": [torch.zeros(5), torch.zeros(8)], "flag": True}
    message = refusal(split_args_kwargs_into_chunks, (batch,), {"kept": torch.zeros(3)}, 2, None, {"kept": Replicate()})
    assert "  batch" not in message
    assert "args[0]['tables'][0] of shape [5] has 5 along dim 0" in message
    assert (
        "write\n  args_chunk_spec=({'ids': TensorChunkSpec(0), 'tables': [Replicate(), TensorChunkSpec(0)]},), "
        "kwargs_chunk_spec={'kept': Replicate()}\n"
    ) in message


def test_several_odd_ones_are_all_named() -> None:
    message = refusal(split_args_kwargs_into_chunks, tuple(torch.zeros(size) for size in (4, 5, 4, 6)), None, 2)
    assert "if args[1] and args[3] should go to every microbatch whole, write" in message


SIZES = st.sampled_from([4, 4, 4, 5, 9])
TENSORS = st.builds(lambda size, rest: torch.zeros(size, *rest), SIZES, st.lists(st.just(2), max_size=1))
LEAVES = st.one_of(TENSORS, TENSORS, st.sampled_from([1, None, "text", torch.tensor(1.0)]))
KEYS = st.sampled_from(["ids", "mask", 7])
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(37))
@given(args=st.lists(NESTED, max_size=3).map(tuple), kwargs=st.dictionaries(st.sampled_from("abc"), NESTED, max_size=2))
def test_what_the_message_says_to_write_can_be_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        split_args_kwargs_into_chunks(args, kwargs, 2)
        return
    except InputError as error:
        written = re.search(r"whole, write\n  (.*)\n", str(error))
    assert written is not None
    names = {"TensorChunkSpec": TensorChunkSpec, "Replicate": Replicate}
    made = split_by_specs(args, kwargs, 2, **eval(f"dict({written[1]})", names))
    assert made.sizes is not None


# Specs that cannot be


def test_a_spec_for_too_few_arguments() -> None:
    x = torch.zeros(4)
    assert refusal(split_args_kwargs_into_chunks, (x, x), None, 2, (TensorChunkSpec(0),)) == (
        "args_chunk_spec has entries for 1 arguments, and there are 2 positional ones: "
        "write None for an argument that is cut in the default way"
    )


def test_a_spec_for_an_argument_that_is_not_there() -> None:
    message = refusal(
        split_args_kwargs_into_chunks,
        (),
        {"batch": {"mask": torch.zeros(4)}},
        2,
        None,
        {"batch": {"maks": Replicate()}},
    )
    assert message == (
        "kwargs_chunk_spec['batch']['maks'] says how to treat a value that is not there "
        "(there is ['batch'], ['batch']['mask']). Did you mean \"['batch']['mask']\" or \"['batch']\"?"
    )


def test_a_number_is_not_a_spec() -> None:
    assert refusal(split_args_kwargs_into_chunks, (torch.zeros(4),), None, 2, (0,)) == (
        "args_chunk_spec[0] is 0 (builtins.int), not a spec: write TensorChunkSpec(0)"
    )


def test_a_placement_is_not_a_spec() -> None:
    from torch.distributed.tensor import Replicate as Placement

    message = refusal(split_args_kwargs_into_chunks, (torch.zeros(4),), None, 2, (Placement(),))
    assert re.match(
        r"args_chunk_spec\[0\] is Replicate\(\) \(torch\.distributed\S+Replicate\), not a spec: "
        r"write TensorChunkSpec\(dim\), Replicate\(\) of pipecut, or None",
        message,
    )


def test_a_reducer_is_for_results() -> None:
    reducer = CustomReducer(0, max)
    assert "args_chunk_spec[0] is CustomReducer(" in refusal(
        split_args_kwargs_into_chunks, (torch.zeros(4),), None, 2, (reducer,)
    )


@pytest.mark.parametrize("dim", ["0", None, True, 1.0])
def test_a_dim_is_a_number(dim: Any) -> None:
    assert refusal(TensorChunkSpec, dim) == (
        f"TensorChunkSpec takes the number of a dim, such as TensorChunkSpec(0); got {dim!r}"
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_the_tensor_does_not_have(dim: int) -> None:
    assert refusal(split_tensor, torch.zeros(4, 3), TensorChunkSpec(dim), 2) == (
        f"tensor cannot be cut along dim {dim}: its shape is [4, 3], with dims 0 to 1; "
        "correct the spec, or write Replicate()"
    )


def test_a_tensor_without_dims_cannot_be_cut_if_asked_for() -> None:
    assert refusal(split_tensor, torch.tensor(1.0), TensorChunkSpec(0), 2).startswith(
        "tensor cannot be cut along dim 0: its shape is [], with no dim; "
    )


def test_arguments_that_are_no_call() -> None:
    x = torch.zeros(4)
    assert refusal(split_args_kwargs_into_chunks, x, None, 2) == (
        "args must be a tuple of positional arguments, got Tensor; for a single one write (x,)"
    )
    assert refusal(split_args_kwargs_into_chunks, (x,), [x], 2) == (
        "kwargs must be a dict with the names of arguments as keys, got list"
    )


# Values that cannot be cut


def sparse() -> Tensor:
    return torch.eye(4).to_sparse()


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that it will drop quantized tensors
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


class Holder:
    def __init__(self) -> None:
        self.tensors = [torch.zeros(4)]


class Array:
    """Has what is known of an array of numpy."""

    ndim = 1

    def __array__(self) -> None: ...


UNCUTTABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (
        sparse,
        "args[0]['v'] is a sparse tensor (torch.sparse_coo), of which microbatches cannot be cut: "
        "pass args[0]['v'].to_dense(), ",
    ),
    "quantized": (
        quantized,
        "args[0]['v'] is a quantized tensor, of which microbatches cannot be cut: pass args[0]['v'].dequantize(), "
        "or its int_repr() and quantize the microbatch in the model, ",
    ),
    "nested": (
        nested,
        "args[0]['v'] is a nested tensor, of which microbatches cannot be cut: pass it padded "
        "(torch.nested.to_padded_tensor) with the lengths in another argument, ",
    ),
    "holder": (
        Holder,
        "args[0]['v'] is of type Holder, which holds tensors that cannot be reached: pass its tensors "
        "in a dict, a tuple or a dataclass, ",
    ),
    "UserDict": (
        lambda: UserDict(ids=torch.zeros(4)),
        "args[0]['v'] is of type UserDict, which holds tensors that cannot be reached: pass its tensors "
        "in a dict, a tuple or a dataclass, ",
    ),
    "array": (Array, "args[0]['v'] is of type Array, not a tensor: pass torch.as_tensor(args[0]['v']), "),
}


@pytest.mark.parametrize(("make", "message"), UNCUTTABLE.values(), ids=UNCUTTABLE)
@pytest.mark.parametrize("spec", [None, TensorChunkSpec(0)], ids=repr)
def test_a_value_of_which_no_microbatch_can_be_cut(make: Callable[[], Any], message: str, spec: Any) -> None:
    call = ({"v": make()}, torch.zeros(4)), None
    assert refusal(split_args_kwargs_into_chunks, *call, 2, (spec, None)) == (
        f"{message}or give it the spec Replicate(), and every microbatch gets it whole"
    )


@pytest.mark.parametrize("make", [make for make, _ in UNCUTTABLE.values()], ids=UNCUTTABLE)
def test_it_can_be_replicated(make: Callable[[], Any]) -> None:
    value = make()
    args, _ = split_args_kwargs_into_chunks((value, torch.zeros(4)), None, 2, (Replicate(), None))
    assert all(each[0] is value for each in args)
