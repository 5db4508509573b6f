"""Builds the stages: the model's own hierarchy, classes and names, with generated code where the cut went through."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..errors import PipeError
from ..pipe_ir.clone import clone
from ..pipe_ir.subclass import quiet_subclass
from ..pipe_ir.traced import TracedModel
from .containers import allow_gaps
from .emit import Function
from .references import References, referred_to, refuse_changing
from .state import Holdings

_file_numbers = itertools.count()


def build_stage_module(
    traced: TracedModel, index: int, holdings: Holdings, functions: Sequence[Function], references: References
) -> nn.Module:
    """A module tree over the model's own tensors that holds and runs what one stage needs."""
    model = traced.model
    present = _present(model, holdings)
    absent = [module for module in model.modules() if module not in present]
    refuse_changing(model, index, present, references, traced.assigned_attributes)
    stage = clone(model, absent, emptied=referred_to(model, present, references))
    whole = {module for path in holdings.whole for module in model.get_submodule(path).modules()}
    kept: dict[nn.Module, set[str]] = {}
    for name in holdings.tensors:
        owner, _, attribute = name.rpartition(".")
        kept.setdefault(model.get_submodule(owner), set()).add(attribute)
    for path, module in model.named_modules():
        if module in present and module not in whole:
            _prune(stage.get_submodule(path), module, kept.get(module, set()))
    by_path: dict[str, list[Function]] = {}
    for function in functions:
        by_path.setdefault(function.piece.path, []).append(function)
    for path, pieces in by_path.items():
        _install(stage, stage.get_submodule(path), index, pieces)
    return stage


def _present(model: nn.Module, holdings: Holdings) -> set[nn.Module]:
    """The modules that are there: those held, and all above them."""
    owners = {name.rpartition(".")[0] for name in holdings.tensors}
    present = {module for path in holdings.whole for module in model.get_submodule(path).modules()}
    for path in {*holdings.whole, *holdings.pieces, *owners, ""}:
        parts = path.split(".")
        present |= {model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)}
    return present


def _prune(module: nn.Module, original: nn.Module, kept: set[str]) -> None:
    """Take from a module the tensors that other stages hold."""
    for tensors in (module._parameters, module._buffers):
        for name in [name for name, tensor in tensors.items() if tensor is not None and name not in kept]:
            del tensors[name]
            module._non_persistent_buffers_set.discard(name)
    if len(module._modules) + len(module._parameters) < len(original._modules) + len(original._parameters):
        allow_gaps(module, original)


def _install(stage: nn.Module, module: nn.Module, index: int, functions: Sequence[Function]) -> None:
    """Give a module the generated forward of its pieces."""
    forwards: dict[int, Callable[..., Any]] = {
        function.piece.nth_call: _compile(function, index) for function in functions
    }
    forward = _dispatching(forwards) if len(forwards) > 1 else next(iter(forwards.values()))
    base = type(module)
    members = {"forward": forward, "_pipecut_stage": index}
    if base.__call__ is not nn.Module.__call__:
        members["__call__"] = nn.Module.__call__  # what the class adds around a call is part of the generated code
    module.__class__ = quiet_subclass(base, members)
    module.__dict__.pop("forward", None)  # an instance's own forward would hide the class's
    _drop_traced_hooks(module)
    for function in functions:
        if function.refers_to.elsewhere:
            # Not registered: these modules have their place in the hierarchy already.
            known = module.__dict__.setdefault("_elsewhere", {})
            known.update({path: stage.get_submodule(path) for path in function.refers_to.elsewhere})


def _dispatching(forwards: dict[int, Callable[..., Any]]) -> Callable[..., Any]:
    def forward(self: nn.Module, piece: int, *args: Any, **kwargs: Any) -> Any:
        return forwards[piece](self, *args, **kwargs)

    return forward


def _drop_traced_hooks(module: nn.Module) -> None:
    """What the hooks of a cut module did is in the generated code already."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        hooks.clear()


def _compile(function: Function, index: int) -> Callable[..., Any]:
    """The function of a source text, with the text where tracebacks and debuggers look for it."""
    filename = f"<pipecut stage {index} {function.label or 'root'} {next(_file_numbers)}>"
    linecache.cache[filename] = (len(function.source), None, function.source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(function.refers_to.globals)
    exec(compile(function.source, filename, "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward


def check_is_uncut(model: object) -> None:
    """Refuse what pipeline() itself has made."""
    if isinstance(model, nn.Module) and any(hasattr(type(module), "_pipecut_stage") for module in model.modules()):
        raise PipeError(
            f"this {type(model).__name__} is a stage of a model that is cut already; call pipeline() with "
            "the model itself"
        )
