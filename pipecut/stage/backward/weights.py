"""The parameters of a stage, and whether somebody waits for autograd to add gradients to them.

autograd adds a gradient to a parameter in a node of its own, the accumulator. Wrappers such as DistributedDataParallel
put hooks on it, which cannot be listed. But they must hold on to the accumulator, for it dies with the graph otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

# MERGED: How many hooks anybody has put anywhere, besides our own: a number that tells at once whether nothing has
# MERGED: changed.


_Hook: TypeAlias = Callable[..., Any]

_own = 0


def put_hook(register: Callable[[_Hook], RemovableHandle], hook: _Hook) -> RemovableHandle:
    """Register a hook of ours, which does not count."""
    global _own
    before = RemovableHandle.next_id
    handle = register(hook)
    _own += RemovableHandle.next_id - before
    return handle


def is_alone(handle: RemovableHandle) -> bool:
    """Whether a hook is the only one of its kind at its place."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and len(hooks) == 1


def _hooks_of_others() -> int:
    """The number of hooks that others have put on tensors, modules and operations since the process began.

    >>> import torch
    >>> before = _hooks_of_others()
    >>> handle = torch.nn.Linear(1, 1).weight.register_hook(print)
    >>> _hooks_of_others() - before
    1
    """
    return RemovableHandle.next_id - _own


# MERGED: When it pays to put weight gradients off: an estimate of what that costs, beside what the backward costs.
# MERGED:
# MERGED: Everything is counted in operations on numbers. The factors were measured on a core of a CPU. On an
# MERGED: accelerator, which
# MERGED: computes while Python runs ahead, Python counts for less than the time that it takes. A factor that is
# MERGED: off makes nothing
# MERGED: wrong: something is put off though it does not pay, or not though it would.


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


class _Sizes(NamedTuple):
    """How large the parameters of a stage are: `sides` adds up the inputs and outputs of one row."""

    parameters: int
    matrices: int
    elements: int
    sides: int


def sizes_of(parameters: Iterable[Tensor]) -> _Sizes:
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
    return _Sizes(count, len(matrices), elements, sum(matrix.shape[0] + matrix.shape[1] for matrix in matrices))


def work_of(elements: int, rows: int) -> int:
    """What the gradient of a matrix with so many elements costs, if it was multiplied with so many rows.

    >>> work_of(elements=10, rows=100)
    2640
    """
    return elements * (2 * rows + _GRADIENT_ELEMENT)


def least_rows(sizes: _Sizes, on_cpu: bool) -> float:
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


_MARK = "pipecut looks who holds this node"


class StageWeights:
    """The parameters of one stage. Make it before a forward, while no graph over them is alive.

    With it `input_backward` can tell that nobody listens to the gradients of a stage, and need not make a detour then.
    Hooks on tensors are always seen, those that were put on accumulators since then only by `look_again()`.

    >>> layer = torch.nn.Linear(4, 4)
    >>> weights = StageWeights(layer.parameters())
    >>> weights.are_free()
    True
    >>> handle = layer.bias.register_post_accumulate_grad_hook(print)
    >>> weights.are_free()
    False
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = tuple({id(parameter): parameter for parameter in parameters}.values())
        plain = [parameter for parameter in self.parameters if type(parameter) in (Tensor, torch.nn.Parameter)]
        sizes = sizes_of(plain)
        self._least_rows = {on_cpu: least_rows(sizes, on_cpu) for on_cpu in (False, True)}
        # A subclass may be more than it seems: a shard of a parameter, say, of which the graph knows the whole.
        self._are_plain = len(plain) == len(self.parameters)
        self._are_held = True
        self._hooks_at_look = self._hooks_when_free = -1
        self.look_again()

    def look_again(self) -> None:
        """Find out anew who holds the accumulators. Only right while no graph over them is alive: between two steps.

        It takes next to no time if nobody has put a hook on anything since.
        """
        if self._are_plain and (self._are_held or self._hooks_at_look != _hooks_of_others()):
            self._hooks_at_look = _hooks_of_others()
            self._are_held = any(map(_is_held, self.parameters))

    def pay_for(self, values: Iterable[Tensor], on_cpu: bool) -> bool:
        """Whether it pays to put weight gradients off, if the stage ran on these values."""
        return rows_of(values) >= self._least_rows[on_cpu]

    def are_free(self) -> bool:
        """Whether it makes no difference who adds gradients to `.grad`: nobody waits for autograd to do it."""
        if self._are_held:
            return False
        if self._hooks_when_free != _hooks_of_others():
            if any(map(_has_hooks, self.parameters)):
                return False
            self._hooks_when_free = _hooks_of_others()
        return True


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _is_held(parameter: Tensor) -> bool:
    """Whether the accumulator outlives a look at it."""
    if not parameter.requires_grad:
        return False
    _notes_of(parameter)[_MARK] = token = object()
    return _notes_of(parameter).get(_MARK) is token


def _notes_of(parameter: Tensor) -> dict[str, Any]:
    """A dict that lives and dies with the accumulator."""
    notes: Any = get_gradient_edge(parameter).node.metadata
    return cast(dict[str, Any], notes)
