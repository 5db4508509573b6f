"""Nodes of autograd's graph, its engine and its hooks.

Public torch shows the edges of a graph. It shows neither the values that a node has saved nor the hooks on a tensor,
and its entry to the engine does more than a small stage can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

# A place at which a gradient enters the graph, or is collected: a tensor, or an edge.
_Place: TypeAlias = Tensor | GradientEdge

# Autograd's message on a write to a tensor at which its graph begins, or to a view of one: a RuntimeError like others.
WRITE_TO_LEAF = "leaf Variable that requires grad is being used in an in-place operation"


class NodeKind:
    """Names of the types of nodes: they have no classes in Python that would identify a kind."""

    ACCUMULATOR = "AccumulateGrad"
    ADDMM = "AddmmBackward0"
    BMM = "BmmBackward0"
    CONVOLUTION = "ConvolutionBackward0"
    EMBEDDING = "EmbeddingBackward0"
    MM = "MmBackward0"
    TRANSPOSE = "TBackward0"
    REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"


_engine: Any = torch.autograd.Variable._execution_engine


def run_backward(
    places: Sequence[_Place], gradients: Sequence[Tensor], wanted: Sequence[_Place], accumulate: bool
) -> tuple[Tensor | None, ...]:
    """Run the engine from `places`; add to `.grad` of all leaves, or return the gradients at `wanted`.

    For a small stage `torch.autograd.backward` takes longer than the backward itself: it checks the shapes again, and
    prepares threads for devices, of which a CPU has none.
    """
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    options = False, False, tuple(wanted), True, accumulate
    if gradients[0].is_cpu:
        return _engine.run_backward(tuple(places), tuple(gradients), *options)  # type: ignore[no-any-return]
    return torch.autograd.graph._engine_run_backward(tuple(places), tuple(gradients), *options)


def saved_value(node: Node, name: str) -> Any:
    """Return a value that the forward of an operation has saved, as derivatives.yaml names it."""
    return getattr(node, f"_saved_{name}")


def is_packed(node: Node, name: str) -> bool:
    """Return True if a saved tensor was packed by hooks: unpacking it may start a recomputation or a copy."""
    return getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", None) is not None


def gradient_shape(node: Node, number: int = 0) -> tuple[int, ...]:
    """Return the shape of the gradient that arrives at a node for one of the outputs of its operation."""
    return node._input_metadata[number].shape  # type: ignore[no-any-return]


def is_python_node(node: Node) -> bool:
    """Return True for a custom autograd function; nothing but the edges that lead to such a node keep it alive."""
    return issubclass(type(node), torch._C._FunctionBase)


def tensor_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the hooks of `Tensor.register_hook` by number, None if there never was one; changes reach the tensor."""
    return tensor._backward_hooks


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return True if hooks wait for the gradient of a leaf, before or after it is added to `.grad`."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def hooks_registered() -> int:
    """Return the number of hooks that were put on tensors, modules and nodes since the process began.

    Equal numbers prove cheaply that nobody has added a hook in between.
    """
    return RemovableHandle.next_id


def sequence_number(node: Node) -> int:
    """Return the number of a node: one more than that of the node made before it, by the same thread.

    An accumulator has the largest of all numbers, whenever it was made.
    """
    return node._sequence_nr()


def is_only_hook(handle: RemovableHandle) -> bool:
    """Return True if there is no other hook of the same kind at the same place."""
    hooks = handle.hooks_dict_ref()
    return hooks is not None and len(hooks) == 1


def profiler_is_on() -> bool:
    """Return True while a profiler records. The public context managers report only their own state."""
    return torch.autograd.profiler._is_profiler_enabled


def packing_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost `saved_tensors_hooks` that are active, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# The gradient scaler, with its check for infinities open to a subclass.


FoundInf = dict[torch.device, Tensor]  # above 0 where a gradient is not finite


class OpenGradScaler(torch.amp.GradScaler):
    """GradScaler that lets `found_by(check)` run its check, and return what was found instead.

    There is no public way to say that another process has found an infinity. Both `unscale_` and the step of a fused
    optimizer, which scales by itself, make the check in one method.
    """

    def found_by(self, check: Callable[[], FoundInf]) -> FoundInf:
        """Run the check, which also divides the gradients by the scale."""
        return check()

    def parts_of(self, optimizer: Any) -> Any:
        """Return an object whose parameter groups are checked in place of an optimizer's."""
        return optimizer

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> FoundInf:
        base = super()._unscale_grads_
        return self.found_by(lambda: base(self.parts_of(optimizer), inv_scale, found_inf, allow_fp16))


def scales_by_itself(optimizer: Any) -> bool:
    """Return True for a fused optimizer, whose step is given the scale and may leave the gradients as they are.

    GradScaler knows them by an attribute, for which there is no public name.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
