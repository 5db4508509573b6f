"""Modules, tensors and autograd: the dicts of nn.Module, tensors without memory, nodes, engine and hooks of autograd.

The public iterators (`named_buffers` and others) skip entries that are None, and cannot replace or remove an entry;
hooks cannot be listed at all. Public torch shows the edges of autograd's graph, but neither the values that a node has
saved nor the hooks on a tensor, and its entry to the engine does more than a small stage can afford.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import GradientEdge, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.hooks import RemovableHandle

BatchNorm = _BatchNorm  # the base of all batch norms, the lazy and the synchronised ones too

# Attributes of a module in which it keeps its parameters, buffers and children.
STATE_DICTS = ("_parameters", "_buffers", "_modules")

# Attributes of a module in which it keeps the hooks of the user.
HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# The last part of the state_dict key under which `get_extra_state` is saved.
EXTRA_STATE = "_extra_state"


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks that the user has put on a module itself."""
    return [hook for name in HOOK_DICTS for hook in vars(module)[name].values()]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that a module itself has registered, by name; changes reach the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that a module itself has registered, by name; changes reach the module."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that a module itself has registered, by name; changes reach the module."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that are not in its state_dict; changes reach the module."""
    return module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return a module's hooks before and after its forward, by number; changes reach the module."""
    return module._forward_pre_hooks, module._forward_hooks


def backward_hooks(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]:
    """Return a module's hooks before and after its backward, by number; changes reach the module."""
    return module._backward_pre_hooks, module._backward_hooks


def is_wrapped_hook(hook: object) -> bool:
    """Return True for torch's wrapper around a hook that takes the module, as state_dict hooks have it."""
    return type(hook).__name__ == "_WrappedHook"


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module was compiled, by `torch.compile(module)` or in place by `module.compile()`."""
    return is_compiled_whole(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_whole(module: object) -> bool:
    """Return True for a module that `torch.compile(module)` made; its class is imported with the compiler only."""
    return type(module).__name__ == "OptimizedModule"


# Wrappers of torch that hold the user's module in an attribute of theirs, which names of parameters then begin with.
# By name: two of them are imported only when they are used, from modules that are private or slow to import.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}


def wrapped_attribute(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper of torch holds the user's module; None for a module that is no wrapper.

    >>> wrapped_attribute(torch.compile(nn.Linear(1, 1)))
    '_orig_mod'
    """
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            return _WRAPPERS[kind.__name__]
    return None


def keep_keys(parameters: nn.ParameterDict) -> None:
    """Forget the keys of a ParameterDict whose parameters are gone: `pop` fails without the parameter."""
    parameters._keys = {key: None for key in parameters._keys if key in parameters._parameters}


def trainable_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module that require a gradient, each once.

    A walk by hand, for it happens in every step: `module.parameters()` takes several calls per part.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.bias.requires_grad_(False)
    >>> [parameter is layer.weight for parameter in trainable_parameters(nn.Sequential(layer, layer))]
    [True]
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        for parameter in part._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found[id(parameter)] = parameter
        stack += part._modules.values()
    return list(found.values())


def part_types(module: nn.Module) -> dict[int, type]:
    """Return the type of each part of a module by its id: wrapping a part changes one or the other.

    A walk by hand, for it happens in every step.
    """
    types: dict[int, type] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        part = stack.pop()
        if part is not None and id(part) not in types:
            types[id(part)] = type(part)
            stack += part._modules.values()
    return types


# Tensors without memory, the identity and version of their memory, and sums of many at once.


# Shapes, strides and dtypes without memory: the meta device has no stand-in for a tensor of another device.

# torch.overrides has the mode above autograd only; what an operator is made of is visible below it.

# The logger that prints a page for each operator that fake tensors do not support.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

_T = TypeVar("_T", bound=Tensor)


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have in common if and only if they share memory.

    `data_ptr()` is 0 for tensors without memory, and the same for an empty tensor and its neighbour.
    """
    return int(tensor.untyped_storage()._cdata)


def references_to(tensor: Tensor) -> int:
    """Return the number of references from Python to a tensor, those of this call included.

    As long as C++ uses a tensor too, as autograd does, it has one more reference to what Python has of it.

    >>> tensors = {0: torch.ones(2, requires_grad=True) * 2}
    >>> before = references_to(tensors[0])
    >>> square = tensors[0] * tensors[0]
    >>> references_to(tensors[0]) - before
    0
    >>> other = tensors[0]
    >>> references_to(tensors[0]) - before
    1
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return sys.getrefcount(tensor) - (uses > 1)


def version_of(tensor: Tensor) -> int:
    """Return the number of times that a tensor was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return True if autograd knows a tensor as a view of another one; a detached tensor is none."""
    return tensor._is_view()


def norm_of_each(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    """Return the norm of each tensor, as torch.nn.utils.get_total_norm has it before it combines them.

    That function returns one number for all. The kernels that it chooses from, by device and class, may differ in the
    last bit.
    """
    norms: list[Tensor | None] = [None] * len(tensors)
    if not tensors:
        return []
    by_kind = _foreach_utils._group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    for (device, _), ([members], places) in by_kind.items():
        together: Any = members
        made: Iterable[Tensor]
        can, may = _foreach_utils._device_has_foreach_support(device), _foreach_utils._has_foreach_support
        if foreach and not can:
            raise RuntimeError(f"foreach=True was passed, and {device.type} has no foreach functions: pass None")
        if foreach or (foreach is None and may(together, device)):
            made = torch._foreach_norm(together, norm_type)
        else:
            made = [torch.linalg.vector_norm(each, norm_type) for each in together]
        for place, norm in zip(places, made, strict=True):
            norms[place] = norm
    return norms  # type: ignore[return-value]


def fake_mode_with_numbers() -> FakeTensorMode:
    """Return a mode for tensors without memory whose sizes are plain numbers, apart from those that depend on data."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def depends_on_data(tensor: Tensor) -> bool:
    """Return True for a tensor without memory whose values are not known; those of a constant are.

    >>> depends_on_data(torch.ones(2))
    False
    """
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def default_generators() -> list[torch.Generator]:
    """Return the generators that random operations draw from by default, of all devices that have been used."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    home = torch.get_device_module(accelerator) if accelerator is not None else None
    return [torch.default_generator, *getattr(home, "default_generators", ())]


def make_subclass(cls: type[_T], data: Tensor, requires_grad: bool) -> _T:
    """Return a tensor of a class over the memory of another; no `__init__` or `__new__` of the class runs.

    `Tensor.as_subclass` keeps the gradient history and cannot make a leaf that requires a gradient.
    """
    return Tensor._make_subclass(cls, data, requires_grad)


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
