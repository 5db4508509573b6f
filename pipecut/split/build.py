"""Builds the stages: the model's own hierarchy, classes and names, with generated code where the cut went through."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ..errors import SplitError, warn
from ..pipe_ir import TracedModel, clone, has_forward_hooks, quiet_subclass
from ..torch_internals import (
    backward_hooks,
    buffers_of,
    children_of,
    forward_hooks,
    keep_keys,
    parameters_of,
    unsaved_buffers,
)
from .codegen import Function
from .program import Piece, walk
from .state import Holdings, References, check_references_unchanged, referred_to

_file_numbers = itertools.count()


def build_stage_module(
    traced: TracedModel, index: int, holdings: Holdings, functions: Sequence[Function], references: References
) -> nn.Module:
    """Return a module tree over the model's own tensors that holds and runs what one stage needs."""
    model = traced.model
    present = _present(model, holdings)
    absent = [module for module in model.modules() if module not in present]
    check_references_unchanged(model, index, present, references, traced.assigned_attributes)
    stage = clone(model, absent, without_tensors=referred_to(model, present, references))
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
    """Return the modules of a stage: those held, and all above them."""
    owners = {name.rpartition(".")[0] for name in holdings.tensors}
    present = {module for path in holdings.whole for module in model.get_submodule(path).modules()}
    for path in {*holdings.whole, *holdings.pieces, *owners, ""}:
        parts = path.split(".")
        present |= {model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)}
    return present


def _prune(module: nn.Module, original: nn.Module, kept: set[str]) -> None:
    """Take from a module the tensors that other stages hold."""
    for tensors in (parameters_of(module), buffers_of(module)):
        for name in [name for name, tensor in tensors.items() if tensor is not None and name not in kept]:
            del tensors[name]
            unsaved_buffers(module).discard(name)
    if len(_members_of(module)) < len(_members_of(original)):
        _allow_gaps(module, original)


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
    """Remove the forward hooks of a cut module: what they did is in the generated code."""
    for hooks in forward_hooks(module):
        hooks.clear()


def _compile(function: Function, index: int) -> Callable[..., Any]:
    """Return the function of a source text, with the text where tracebacks and debuggers look for it."""
    filename = f"<pipecut stage {index} {function.label or 'root'} {next(_file_numbers)}>"
    linecache.cache[filename] = (len(function.source), None, function.source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(function.refers_to.globals)
    exec(compile(function.source, filename, "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward


class _WithGaps:
    """Container with some of its members: indexed as in the whole model, counted and iterated over what is here."""

    _pipecut_length: int

    def _members(self) -> dict[str, Any]:
        return children_of(self)  # type: ignore[arg-type]  # mixed into a module

    def __getitem__(self, index: int | slice) -> Any:
        members = self._members()
        if isinstance(index, slice):
            return [members[str(key)] for key in range(self._pipecut_length)[index] if str(key) in members]
        return members[self._key(index)]

    def __setitem__(self, index: int, member: Any) -> None:
        """Put something else in the place of a member: itself with a wrapper around it, for instance."""
        setattr(self, self._key(index), member)

    def _key(self, index: int) -> str:
        members = self._members()
        key = str(index + self._pipecut_length if index < 0 else index)
        if key not in members:
            raise IndexError(f"member {index} is not in this stage; those here: {', '.join(members) or 'none'}")
        return key

    def __len__(self) -> int:
        return len(self._members())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members().values())

    def __repr__(self) -> str:
        # ModuleList folds equal members under their positions, which are not their indices here.
        return nn.Module.__repr__(self)  # type: ignore[arg-type]


class _ParametersWithGaps(_WithGaps):
    def _members(self) -> dict[str, Any]:
        return parameters_of(self)  # type: ignore[arg-type]


_MIXINS: dict[type[nn.Module], type] = {
    nn.ModuleList: _WithGaps,
    nn.Sequential: _WithGaps,
    nn.ParameterList: _ParametersWithGaps,
}


def _allow_gaps(module: nn.Module, original: nn.Module) -> None:
    """Make a container work with some of its members gone; any other module is left as it is."""
    for cls, mixin in _MIXINS.items():
        members = _members_of(original)
        if isinstance(original, cls) and all(name.isdigit() for name in members):
            module.__class__ = quiet_subclass(type(module), {}, mixin)
            vars(module)["_pipecut_length"] = len(members)
    if isinstance(module, nn.ParameterDict):
        keep_keys(module)


def _members_of(container: nn.Module) -> list[str]:
    return [*children_of(container), *parameters_of(container)]


# Hooks of modules that are cut, attributes that their forwards set, and other effects that a trace does not hold.


def generated_paths(programs: Sequence[Piece]) -> set[str]:
    """Return the modules that run as generated code."""
    pieces = {item.path for program in programs for item in walk(program.items) if isinstance(item, Piece)}
    return {program.path for program in programs} | pieces


def hooks_to_trace(traced: TracedModel, programs: Sequence[Piece]) -> set[str]:
    """Return the paths of modules that are cut and have forward hooks: these hooks must run during the trace."""
    hooked = {path for path in generated_paths(programs) if has_forward_hooks(traced.model.get_submodule(path))}
    for path in sorted(hooked):
        warn(
            f"{path or type(traced.model).__name__!r} has a forward hook and is cut: what the hook does to tensors is "
            "part of the cut model, and all else that it does has happened once, during the trace; put the hook on a "
            "module that is not cut to have it run at every call"
        )
    return hooked


def check_no_backward_hooks(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """Raise if a module that is cut has a backward hook: no stage sees the gradients of all of it."""
    for path in sorted(generated_paths(programs)):
        module = traced.model.get_submodule(path)
        if any(backward_hooks(module)):
            raise SplitError(
                f"{path or type(traced.model).__name__!r} has a backward hook and is cut, so that no stage sees its "
                "gradients; remove the hook, put it on a module inside, or cut elsewhere"
            )


def warn_of_assigned_attributes(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """Warn of plain attributes that a cut forward sets: generated code works on tensors and buffers."""
    for path in sorted(generated_paths(programs) & traced.assigned_attributes.keys()):
        names = ", ".join(f"self.{name}" for name in traced.assigned_attributes[path])
        warn(
            f"the forward of {path or type(traced.model).__name__!r} sets {names}, and is cut: the stages do not set "
            "it, and go on with the value that it had during the trace; keep state in buffers, or in a module that is "
            "not cut"
        )


def check_no_untraced_effects(traced: TracedModel, programs: Sequence[Piece]) -> None:
    """Raise for a cut forward with effects that generated code cannot have."""
    for path in sorted(generated_paths(programs) & traced.untraced_effects.keys()):
        raise SplitError(
            f"the forward of {path or type(traced.model).__name__!r} uses {traced.untraced_effects[path]}, and is cut: "
            "a trace does not hold it; move it into a module that is not cut"
        )
