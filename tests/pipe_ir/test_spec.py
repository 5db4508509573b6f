"""TensorSpec: symbolic dims get their sizes, layouts are told apart, and differences are put in words."""

from __future__ import annotations

import pytest
import sympy
import torch

from pipecut.errors import SpecError
from pipecut.pipe_ir.spec import TensorSpec

BATCH, LENGTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "length"))
SPEC = TensorSpec((BATCH, 2 * LENGTH + 1, 4), torch.float32, (4 * (2 * LENGTH + 1), 4, 1))


def test_bind_puts_sizes_in_place_of_symbols() -> None:
    bound = SPEC.bind({"batch": 3, "length": 5})
    assert bound == TensorSpec((3, 11, 4), torch.float32, (44, 4, 1))
    assert all(type(number) is int for number in (*bound.shape, *bound.stride))


def test_bind_computes_with_the_sizes() -> None:
    spec = TensorSpec((BATCH * LENGTH // 2, sympy.Max(BATCH, 4)), torch.int64, (sympy.Max(BATCH, 4), 1))
    assert spec.bind({"batch": 3, "length": 5}).shape == (7, 4)


def test_bind_takes_more_sizes_than_it_needs_and_keeps_the_rest() -> None:
    spec = TensorSpec((2, BATCH), torch.bool, (BATCH, 1), requires_grad=True)
    assert spec.bind({"batch": 7, "other": 1}) == TensorSpec((2, 7), torch.bool, (7, 1), requires_grad=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "cannot bind float32[batch, 2*length + 1, 4]: no size given for batch, length (given: none)"),
        ({"batch": 2}, "cannot bind float32[batch, 2*length + 1, 4]: no size given for length (given: batch)"),
        ({"lenght": 2, "batch": 1}, "no size given for length (given: batch, lenght)"),
    ],
)
def test_a_missing_size_is_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        SPEC.bind(sizes)
    assert message in str(caught.value)


def test_a_size_that_only_the_strides_need_is_missed_too() -> None:
    row = TensorSpec((4,), torch.float32, (BATCH,))
    assert row.bind({"batch": 3}).stride == (3,)
    with pytest.raises(SpecError, match="no size given for batch"):
        row.bind({})


def test_symbols_are_those_of_the_shape() -> None:
    assert SPEC.symbols == {BATCH, LENGTH}
    assert TensorSpec((2, 3), torch.float32, (3, 1)).symbols == frozenset()


TENSORS = {
    "plain": torch.ones(2, 3),
    "transposed": torch.ones(2, 3).t(),
    "sliced": torch.ones(4, 6)[:, 2:4],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "one row, transposed": torch.ones(1, 3).t(),
    "channels last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(1.0),
    "empty": torch.ones(3, 4)[:0, :2],
    "empty in the middle": torch.ones(3, 0, 2),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_contiguity_is_that_of_torch(tensor: torch.Tensor) -> None:
    spec = TensorSpec.of(tensor)
    assert spec.is_contiguous == tensor.is_contiguous()
    assert spec.contiguous().is_contiguous
    assert spec.contiguous() == TensorSpec.of(torch.empty(tensor.shape))


def test_contiguity_is_known_of_symbolic_dims() -> None:
    assert SPEC.is_contiguous
    assert not TensorSpec((BATCH, 4), torch.float32, (1, BATCH)).is_contiguous
    turned = TensorSpec((4, BATCH), torch.float32, (1, 4))
    assert turned.contiguous().stride == (BATCH, 1)
    assert TensorSpec((BATCH, LENGTH), torch.float32, (LENGTH, 1)).is_contiguous


def test_of_reads_a_tensor() -> None:
    tensor = torch.ones(2, 3, dtype=torch.float64, requires_grad=True).t()
    assert TensorSpec.of(tensor) == TensorSpec((3, 2), torch.float64, (1, 3), requires_grad=True)


HERE = TensorSpec((2, 3), torch.float32, (3, 1), requires_grad=True)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (HERE, []),
        (TensorSpec((2, 4), torch.float32, (4, 1), True), ["dim 1 is 3 here and 4 there"]),
        (TensorSpec((BATCH, 3), torch.float32, (3, 1), True), ["dim 0 is 2 here and batch there"]),
        (TensorSpec((2,), torch.float32, (1,), True), ["has 2 dims here [2, 3] and 1 there [2]"]),
        (TensorSpec((2, 3), torch.int8, (3, 1), True), ["dtype is float32 here and int8 there"]),
        (TensorSpec((2, 3), torch.float32, (1, 2), True), ["strides are [3, 1] here and [1, 2] there"]),
        (TensorSpec((2, 3), torch.float32, (3, 1)), ["needs a gradient here and not there"]),
    ],
)
def test_diff_says_what_differs(there: TensorSpec, words: list[str]) -> None:
    assert HERE.diff(there) == words


def test_diff_lists_every_difference() -> None:
    there = TensorSpec((5, 6), torch.float16, (6, 1))
    assert there.diff(HERE) == [
        "dim 0 is 5 here and 2 there",
        "dim 1 is 6 here and 3 there",
        "dtype is float16 here and float32 there",
        "needs no gradient here and one there",
    ]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (HERE, "float32[2, 3] grad"),
        (TensorSpec((), torch.int64, ()), "int64[]"),
        (SPEC, "float32[batch, 2*length + 1, 4]"),
    ],
)
def test_a_spec_reads_as_dtype_and_dims(spec: TensorSpec, text: str) -> None:
    assert str(spec) == text
