"""One record for each operator."""

from __future__ import annotations

import pytest
import torch

from pipecut.pipe_ir.operators import OPERATORS, Operator, operator_of


@pytest.mark.parametrize("name", sorted(name for name in OPERATORS if name.startswith("aten::")))
def test_a_record_is_of_an_operator_that_torch_has(name: str) -> None:
    """A name with a slip of the pen would never be met."""
    assert hasattr(torch.ops.aten, name.removeprefix("aten::"))


def test_an_operator_without_a_record_has_the_defaults() -> None:
    assert operator_of(torch.ops.aten.kron.default) == Operator()
    assert operator_of(len) == Operator()


def test_overloads_of_an_operator_have_one_record() -> None:
    assert operator_of(torch.ops.aten.add.Tensor) is operator_of(torch.ops.aten.add.Scalar) is OPERATORS["aten::add"]
