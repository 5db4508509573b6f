"""Builds the stages: the model's own hierarchy, classes and names, with generated code where the cut went through."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import SplitError, warn
from ..pipe_ir import ForwardOf, TracedModel, clone, has_forward_hooks, quiet_subclass
from ..text import listed, numbered
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
from .state import Holdings, References, check_references_unchanged, referred_to, used_state

_file_numbers = itertools.count()


def build_stage_module(
    traced: TracedModel,
    index: int,
    holdings: Holdings,
    functions: Sequence[Function],
    references: References,
    variant: int = 0,
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
        _install(stage, stage.get_submodule(path), index, pieces, variant)
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


def _install(stage: nn.Module, module: nn.Module, index: int, functions: Sequence[Function], variant: int) -> None:
    """Give a module the generated forward of its pieces."""
    forwards: dict[int, Callable[..., Any]] = {
        function.piece.nth_call: _compile(function, index) for function in functions
    }
    forward = _dispatching(forwards) if len(forwards) > 1 else next(iter(forwards.values()))
    base = type(module)
    members: dict[str, Any] = {"forward": forward, "_pipecut_stage": index}
    if variant:
        members |= _members_of_variants({ForwardOf(variant, nth): made for nth, made in forwards.items()}, None)
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


# Variants of a stage: generated forwards for calls of other forms, over the modules and parameters of the first.
#
# A model that is called without labels, or with another flag, runs other operations. It is traced and cut again for
# such a call, and the stages, which are built, wrapped and trained by then, get the forwards of the new cut beside
# those that they have. The first argument says which one: a `ForwardOf`, or none for the form of the first trace.

_Forward: TypeAlias = Callable[..., Any]
_TABLE = "_pipecut_forwards"  # the attribute of a class that has the forwards of variants

_REMEDY = (
    "the parameters of the stages stay where they are. Call pipeline() with an example of this form, or make a second "
    "pipe for such calls"
)


def _members_of_variants(forwards: Mapping[ForwardOf, _Forward], own: _Forward | None) -> dict[str, Any]:
    """Return the members of a class whose forward is chosen by its first argument; `own` is that of all other calls."""
    table = dict(forwards)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is ForwardOf:
            return table[args[0]](self, *args[1:], **kwargs)
        assert own is not None  # a variant's own modules are called with its number only
        return own(self, *args, **kwargs)

    return {"forward": forward, _TABLE: table}


def check_same_places(homes: Sequence[Collection[str]], variant: Sequence[nn.Module], traced: TracedModel) -> None:
    """Raise if stages of a variant use parameters that the stages do not have, which are built by now.

    `homes` are the names of the parameters of each stage.
    """
    if len(homes) != len(variant):
        raise SplitError(f"for this call the model is cut into {len(variant)} stages, not into {len(homes)}: {_REMEDY}")
    used = used_state(traced)
    for index, there in enumerate(variant):
        needed = [name for name, _ in there.named_parameters(remove_duplicate=False) if name in used]
        missing = [name for name in needed if name not in homes[index]]
        if missing:
            holders = [nth for nth, names in enumerate(homes) if missing[0] in names]
            raise SplitError(
                f"for this call stage {index} needs {listed(missing, 3)}, which it does not have ({missing[0]} is in "
                f"{numbered('stage', holders)}): {_REMEDY}"
            )


def check_no_new_hooks(model: nn.Module, before: Collection[str], paths: Collection[str]) -> None:
    """Raise on modules with forward hooks that are generated code in a variant only: their hooks would run twice."""
    for path in sorted(set(paths) - set(before)):
        if has_forward_hooks(model.get_submodule(path)):
            raise SplitError(
                f"{path!r} has a forward hook, and is generated code for this call, where it runs its own code in "
                "others: call pipeline() with an example of this form, or remove the hook"
            )


def add_variant(
    parts: Mapping[str, nn.Module], variant: nn.Module, index: int, traced: TracedModel, device: torch.device
) -> None:
    """Give a stage the forwards of a variant; `parts` are the stage's modules by path, from before they were wrapped.

    What the calls before had no need of in this stage is added: activations, dropouts, buffers that are not saved.
    """
    known, used = dict(parts), used_state(traced)
    for path, module in variant.named_modules(remove_duplicate=False):
        if path in known:
            _add_buffers(known[path], module, path, index, used, device)
        elif path.rpartition(".")[0] in known:
            _add_module(known, path, module, index, used, device)
    for path, module in variant.named_modules():
        forwards = vars(type(module)).get(_TABLE)
        if forwards is not None:
            _add_forwards(known[path], forwards)
            elsewhere = vars(module).get("_elsewhere", {})
            if elsewhere:
                vars(known[path]).setdefault("_elsewhere", {}).update({other: known[other] for other in elsewhere})


def _add_module(
    known: dict[str, nn.Module], path: str, module: nn.Module, index: int, used: set[str], device: torch.device
) -> None:
    state = [f"{path}.{name}" for name in module.state_dict()]
    needed = [name for name in state if name in used]
    if needed:
        raise SplitError(f"for this call stage {index} needs {needed[0]}, which it does not have: {_REMEDY}")
    if not state:  # otherwise it is here for names that nobody uses, and that another stage has
        parent, _, name = path.rpartition(".")
        children_of(known[parent])[name] = known[path] = module.to(device)


def _add_buffers(
    mine: nn.Module, module: nn.Module, path: str, index: int, used: set[str], device: torch.device
) -> None:
    for name, buffer in buffers_of(module).items():
        full = f"{path}.{name}".lstrip(".")
        if buffer is None or name in buffers_of(mine) or full not in used:
            continue
        if name not in unsaved_buffers(module) or buffer.is_meta:
            raise SplitError(f"for this call stage {index} needs the buffer {full}, which it does not have: {_REMEDY}")
        buffers_of(mine)[name] = buffer.to(device)
        unsaved_buffers(mine).add(name)


def _add_forwards(mine: nn.Module, forwards: Mapping[ForwardOf, _Forward]) -> None:
    for cls in type(mine).__mro__:
        if _TABLE in vars(cls):
            vars(cls)[_TABLE].update(forwards)
            return
    generated = next((cls for cls in type(mine).__mro__ if "_pipecut_stage" in vars(cls)), None)
    if generated is not None:
        for name, member in _members_of_variants(forwards, vars(generated)["forward"]).items():
            setattr(generated, name, member)
        return
    _take_apart(mine, forwards)


def _take_apart(mine: nn.Module, forwards: Mapping[ForwardOf, _Forward]) -> None:
    """Give generated forwards to a module that runs its own code in all other calls."""
    base: Any = type(mine)
    own = vars(mine).pop("forward", None)
    members = _members_of_variants(
        forwards, base.forward if own is None else lambda self, *args, **kw: own(*args, **kw)
    )
    if base.__call__ is not nn.Module.__call__:

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            # What the class adds around a call is part of the generated code.
            generated = bool(args) and type(args[0]) is ForwardOf
            return nn.Module.__call__(self, *args, **kwargs) if generated else base.__call__(self, *args, **kwargs)

        members["__call__"] = __call__
    mine.__class__ = quiet_subclass(base, members)
