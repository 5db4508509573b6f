"""Parameters of a stage: listeners to their gradients, and an estimate of when deferring the gradients is worth it.

autograd adds a gradient to a parameter in a node of its own, the accumulator. Wrappers such as DistributedDataParallel
put hooks on it, which cannot be listed. But they must hold on to the accumulator, for it dies with the graph otherwise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ...torch_internals import has_gradient_hooks, hooks_registered, sequence_number

_MARK = "pipecut tests who holds this node"


class StageWeights:
    """The trainable parameters of one stage. Make it before a forward, while no graph over them is alive.

    With it `input_backward` knows that nothing listens to the gradients of a stage, and need not make a detour then.
    Hooks on tensors are always noticed, those that were put on accumulators since only by `refresh()`.

    >>> layer = torch.nn.Linear(4, 4)
    >>> weights = StageWeights(layer.parameters())
    >>> weights.has_no_gradient_listeners()
    True
    >>> handle = layer.bias.register_post_accumulate_grad_hook(print)
    >>> weights.has_no_gradient_listeners()
    False
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = tuple({id(parameter): parameter for parameter in parameters}.values())
        self._ids = {id(parameter) for parameter in self.parameters}
        self._types = [type(parameter) for parameter in self.parameters]
        plain = [parameter for parameter in self.parameters if type(parameter) in (Tensor, nn.Parameter)]
        sizes = weight_sizes(plain)
        self._min_rows = {on_cpu: min_rows_to_defer(sizes, on_cpu) for on_cpu in (False, True)}
        # A subclass may be more than it seems: a shard of a parameter, say, of which the graph knows the whole.
        self._are_plain = len(plain) == len(self.parameters)
        self.patterns: dict[tuple[torch.Size, ...], Any] = {}  # of the stage's graphs, by the shapes of its inputs
        self._foreign_hooks = -1  # their number when there was none on the parameters
        self.refresh()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._ids

    def refresh(self) -> None:
        """Find out anew whether others hold the accumulators. Valid while no graph is alive: between two steps."""
        self._are_held = not self._are_plain or any(map(_is_held, self.parameters))
        self._hooks_then = _foreign_hook_count()
        self._next_node = _last_node() + 1

    def unhooked_since(self) -> int | None:
        """Return the number from which on no node has a hook of other code; None if hooks were put somewhere since.

        Nodes are numbered as they are made, and a hook is put on a node that exists: `refresh()` was before both.
        """
        return self._next_node if self._hooks_then == _foreign_hook_count() else None

    def matches(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if these are the same parameters, of the same types."""
        same = len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))
        return same and list(map(type, parameters)) == self._types

    def is_worth_deferring(self, inputs: Iterable[Tensor], on_cpu: bool) -> bool:
        """Return True if deferring the weight gradients is worth it after a forward on these inputs."""
        return max_rows(inputs) >= self._min_rows[on_cpu]

    def has_no_gradient_listeners(self) -> bool:
        """Return True if it makes no difference who adds gradients to `.grad`: nothing waits for autograd to do it."""
        if self._are_held:
            return False
        if self._foreign_hooks != _foreign_hook_count():
            if any(map(has_gradient_hooks, self.parameters)):
                return False
            self._foreign_hooks = _foreign_hook_count()
        return True


def _is_held(parameter: Tensor) -> bool:
    """Return True if the accumulator outlives a reference to it."""
    if not parameter.requires_grad:
        return False
    _metadata(parameter)[_MARK] = token = object()
    return _metadata(parameter).get(_MARK) is token


def _metadata(parameter: Tensor) -> dict[str, Any]:
    """Return a dict that lives and dies with the accumulator."""
    metadata: Any = get_gradient_edge(parameter).node.metadata
    return cast(dict[str, Any], metadata)


_LEAF = torch.empty(0, requires_grad=True)


def _last_node() -> int:
    """Return the number of the last node that was made: of one that is made for that."""
    with torch.inference_mode(False), torch.enable_grad():
        return sequence_number(get_gradient_edge(_LEAF.view_as(_LEAF)).node)


# Hooks of other code: a count of them notices cheaply that none were added.

_Hook: TypeAlias = Callable[..., Any]

_own_hooks = 0


def register_own_hook(register: Callable[[_Hook], RemovableHandle], hook: _Hook) -> RemovableHandle:
    """Register a hook that does not count as one of other code."""
    global _own_hooks
    before = hooks_registered()
    handle = register(hook)
    _own_hooks += hooks_registered() - before
    return handle


def _foreign_hook_count() -> int:
    """Count the hooks that other code has registered anywhere since the process began.

    >>> before = _foreign_hook_count()
    >>> handle = torch.nn.Linear(1, 1).weight.register_hook(print)
    >>> _foreign_hook_count() - before
    1
    """
    return hooks_registered() - _own_hooks


# An estimate of the cost of deferring weight gradients, beside that of the backward. Everything is counted in
# operations on numbers. The factors were measured on a core of a CPU. On an accelerator, which computes while Python
# runs ahead, Python counts for less than the time that it takes. A factor that is off makes nothing wrong: something is
# deferred though it is not worth it, or the other way round.

# Writing an element of a gradient and adding it to the sum.
_GRADIENT_ELEMENT = 64
# Of that, the part which is saved where a deferred gradient is added to the sum while it is computed.
_SAVED_ELEMENT = 20
# Fetching an element of an operation's input or output, which a full backward has at hand.
_LATER_ELEMENT = 20
# Operations per microsecond of Python: those of a core of a CPU, and a part of those of an accelerator.
_CORE, _ACCELERATOR = 70_000, 5_000_000
# Microseconds to defer the gradient of a matrix, and to compare the graph around any parameter with its pattern.
_MICROSECONDS_PER_MATRIX, _MICROSECONDS_PER_PARAMETER = 14, 2.5
# The part that deferring may add to a backward.
_TOLERANCE = 0.05


class _WeightSizes(NamedTuple):
    """Sums over the parameters of a stage; `sides` adds up the numbers of rows and columns of the matrices."""

    parameters: int
    matrices: int
    elements: int
    sides: int


def weight_sizes(parameters: Iterable[Tensor]) -> _WeightSizes:
    """Return the sums over some parameters.

    >>> weight_sizes(torch.nn.Linear(100, 20).parameters())
    _WeightSizes(parameters=2, matrices=1, elements=2000, sides=120)
    """
    count = 0
    matrices = []
    for parameter in parameters:
        count += 1
        if parameter.dim() > 1:
            matrices.append(parameter)
    elements = sum(matrix.numel() for matrix in matrices)
    return _WeightSizes(count, len(matrices), elements, sum(matrix.shape[0] + matrix.shape[1] for matrix in matrices))


def weight_gradient_work(elements: int, rows: int) -> int:
    """Return the cost of the gradient of a matrix with so many elements that was multiplied with so many rows.

    >>> weight_gradient_work(elements=10, rows=100)
    2640
    """
    return elements * (2 * rows + _GRADIENT_ELEMENT)


def min_rows_to_defer(sizes: _WeightSizes, on_cpu: bool) -> float:
    """Return the number of rows that weights must be multiplied with, so that deferring their gradients is worth it.

    >>> min_rows_to_defer(weight_sizes(torch.nn.Linear(64, 64).parameters()), on_cpu=True)
    inf
    >>> min_rows_to_defer(weight_sizes(torch.nn.Linear(4096, 4096).parameters()), on_cpu=True) < 100
    True
    """
    python = sizes.matrices * _MICROSECONDS_PER_MATRIX + sizes.parameters * _MICROSECONDS_PER_PARAMETER
    cost, cost_per_row = python * _speed(on_cpu) - sizes.elements * _SAVED_ELEMENT, sizes.sides * _LATER_ELEMENT
    # The input gradients cost as much as the weight gradients.
    gain = _TOLERANCE * 2 * weight_gradient_work(sizes.elements, 0)
    gain_per_row = _TOLERANCE * 2 * 2 * sizes.elements
    return (cost - gain) / (gain_per_row - cost_per_row) if gain_per_row > cost_per_row else math.inf


def max_rows(values: Iterable[Tensor]) -> int:
    """Return the largest number of rows in a value, whatever its shape.

    >>> max_rows([torch.ones(2, 10, 512), torch.ones(3)])
    20
    """
    rows = 1
    for value in values:
        if value.dim() and (width := value.shape[-1]):
            rows = max(rows, value.numel() // width)
    return rows


def min_work_to_defer(on_cpu: bool) -> int:
    """Return the cost from which the gradient of one matrix is worth deferring."""
    return _MICROSECONDS_PER_MATRIX * _speed(on_cpu)


def _speed(on_cpu: bool) -> int:
    return _CORE * torch.get_num_threads() if on_cpu else _ACCELERATOR
