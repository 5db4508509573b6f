"""When it pays to put weight gradients off: an estimate of what that costs, beside what the backward costs.

Everything is counted in operations on numbers. The factors were measured on a core of a CPU. On an accelerator, which
computes while Python runs ahead, Python counts for less than the time that it takes. A factor that is off makes nothing
wrong: something is put off though it does not pay, or not though it would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Writing an element of a gradient and adding it to the sum.
_GRADIENT_ELEMENT = 64
# Fetching an element of an operation's input or output, which a full backward has at hand.
_LATER_ELEMENT = 50
# What a microsecond of Python counts: what a core of a CPU does in it, and a part of what an accelerator does.
_CORE, _ACCELERATOR = 70_000, 5_000_000
# Microseconds to find and put off the gradient of a matrix, and to walk the graph around any parameter.
_MICROSECONDS_A_MATRIX, _MICROSECONDS_A_PARAMETER = 40, 10
# Putting off may add this much to a backward.
_TOLERANCE = 0.04


class Sizes(NamedTuple):
    """How large the parameters of a stage are: `sides` adds up the inputs and outputs of one row."""

    parameters: int
    matrices: int
    elements: int
    sides: int


def sizes_of(parameters: Iterable[Tensor]) -> Sizes:
    """The sums over some parameters.

    >>> sizes_of(torch.nn.Linear(100, 20).parameters())
    Sizes(parameters=2, matrices=1, elements=2000, sides=120)
    """
    count = 0
    matrices = []
    for parameter in parameters:
        count += 1
        if parameter.dim() > 1:
            matrices.append(parameter)
    elements = sum(matrix.numel() for matrix in matrices)
    return Sizes(count, len(matrices), elements, sum(matrix.shape[0] + matrix.shape[1] for matrix in matrices))


def work_of(elements: int, rows: int) -> int:
    """What the gradient of a matrix with so many elements costs, if it was multiplied with so many rows.

    >>> work_of(elements=10, rows=100)
    2640
    """
    return elements * (2 * rows + _GRADIENT_ELEMENT)


def least_rows(sizes: Sizes, on_cpu: bool) -> float:
    """How many rows the weights of a stage have to be multiplied with, so that it pays to put their gradients off.

    >>> least_rows(sizes_of(torch.nn.Linear(64, 64).parameters()), on_cpu=True)
    inf
    >>> least_rows(sizes_of(torch.nn.Linear(4096, 4096).parameters()), on_cpu=True) < 100
    True
    """
    python = sizes.matrices * _MICROSECONDS_A_MATRIX + sizes.parameters * _MICROSECONDS_A_PARAMETER
    cost, cost_a_row = python * _speed(on_cpu), sizes.sides * _LATER_ELEMENT
    # The input gradients cost as much as the weight gradients.
    gain = _TOLERANCE * 2 * work_of(sizes.elements, 0)
    gain_a_row = _TOLERANCE * 2 * (work_of(sizes.elements, 1) - work_of(sizes.elements, 0))
    return (cost - gain) / (gain_a_row - cost_a_row) if gain_a_row > cost_a_row else math.inf


def rows_of(values: Iterable[Tensor]) -> int:
    """How many rows there are at most in a value, whatever its shape.

    >>> rows_of([torch.ones(2, 10, 512), torch.ones(3)])
    20
    """
    rows = 1
    for value in values:
        if value.dim() and (width := value.shape[-1]):
            rows = max(rows, value.numel() // width)
    return rows


def least_work(on_cpu: bool) -> int:
    """What the gradient of one matrix has to cost, so that it pays to put it off."""
    return _MICROSECONDS_A_MATRIX * _speed(on_cpu)


def _speed(on_cpu: bool) -> int:
    return _CORE * torch.get_num_threads() if on_cpu else _ACCELERATOR
