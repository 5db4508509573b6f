"""Parameters, buffers and modules that each stage holds, and modules that it refers to."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import SplitError
from ..pipe_ir import ModuleRef, Operation, TiedParameter, TracedModel, is_plain_object, operator_of
from ..torch_internals import (
    EXTRA_STATE,
    HOOK_DICTS,
    STATE_DICTS,
    buffers_of,
    is_overload,
    parameters_of,
    schema_of,
    storage_id,
    unsaved_buffers,
)
from .program import BufferUpdate, Checkpointed, FunctionCall, Item, Piece, WholeCall, body_of, kind_of_state, used_by


@dataclass(frozen=True)
class Holdings:
    """Holdings of one stage: modules as a whole, modules of which a piece runs here, and single tensors by name."""

    whole: frozenset[str]
    pieces: frozenset[str]
    tensors: frozenset[str]


def module_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all paths of each module, by its first one."""
    first: dict[nn.Module, str] = {}
    aliases: dict[str, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        aliases.setdefault(first.setdefault(module, path), []).append(path)
    return {path: tuple(paths) for path, paths in aliases.items()}


def assign_state(traced: TracedModel, programs: Sequence[Piece]) -> tuple[Holdings, ...]:
    """Give each stage what it uses, and each name that nobody uses to the stage of its neighbours."""
    aliases = module_aliases(traced.model)
    used = [_used(traced, program, aliases) for program in programs]
    returned = {state_name(traced, index, "") for index in traced.output.refs if index in traced.state_names}
    used[-1] = replace(used[-1], tensors=used[-1].tensors | returned)
    held = [_names_held(traced, holdings) for holdings in used]
    _check_written_buffers(traced, held)
    extra: list[set[str]] = [set() for _ in programs]
    stage = 0
    for name in _all_names(traced.model):
        homes = [index for index, names in enumerate(held) if name in names]
        if homes:
            stage = homes[0]
        else:
            extra[stage].add(name)
    return tuple(
        replace(holdings, tensors=holdings.tensors | names) for holdings, names in zip(used, extra, strict=True)
    )


def state_name(traced: TracedModel, index: int, base: str) -> str:
    """Return the name of a parameter or buffer, the one below `base` if it has several."""
    names = traced.state_names[index]
    return next((name for name in names if not base or name.startswith(f"{base}.")), names[0])


def _used(traced: TracedModel, program: Piece, aliases: dict[str, tuple[str, ...]]) -> Holdings:
    whole: set[str] = set()
    pieces: set[str] = set()
    tensors: set[str] = set()

    def visit(item: Item, base: str) -> None:
        if isinstance(item, Piece):
            base = item.path
            pieces.update(aliases[base])
        elif isinstance(item, WholeCall):
            # All that it calls: a module may keep a reference to one that is registered elsewhere.
            whole.update(alias for inner in item.span.walk() for alias in aliases[inner.path])
        if isinstance(item, WholeCall | FunctionCall | Checkpointed):
            references = (leaf.path for leaf in item.span.args.leaves if isinstance(leaf, ModuleRef))
            whole.update(alias for path in references for alias in aliases[path])
        elif isinstance(item, BufferUpdate):
            tensors.add(f"{item.path}.{item.name}".lstrip("."))
        if not isinstance(item, Piece):
            tensors.update(state_name(traced, key, base) for key in used_by(item) if key in traced.state_names)
        for inner in body_of(item):
            visit(inner, base)

    visit(program, program.path)
    return Holdings(frozenset(whole), frozenset(pieces), frozenset(tensors))


def _all_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and saved buffers, ties included, neighbours next to each other."""
    names = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = [
            *parameters_of(module),
            *(name for name in buffers_of(module) if name not in unsaved_buffers(module)),
        ]
        tensors = {**parameters_of(module), **buffers_of(module)}
        names += [f"{path}.{name}".lstrip(".") for name in own if tensors[name] is not None]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            names.append(f"{path}.{EXTRA_STATE}".lstrip("."))
    return names


def _names_held(traced: TracedModel, holdings: Holdings) -> set[str]:
    buffers = (name for name, _ in traced.model.named_buffers(remove_duplicate=False))
    everything = (*_all_names(traced.model), *buffers)
    return {name for name in everything if name in holdings.tensors or _is_inside(name, holdings.whole)}


def _is_inside(name: str, paths: Collection[str]) -> bool:
    """Return True for a name below one of some paths."""
    while name:
        name = name.rpartition(".")[0]
        if name in paths and name:
            return True
    return False


def written_state(traced: TracedModel) -> set[str]:
    """Return the names of parameters and buffers that the forward updates, or may update in the other mode."""
    return _written_by(traced, traced.operations)


def changed_state(traced: TracedModel) -> set[str]:
    """Return the names of parameters and buffers that the forward updates in the mode in which it was traced."""
    return _written_by(traced, [op for op in traced.operations if not _only_reads_statistics(op)])


def _only_reads_statistics(op: Operation) -> bool:
    """Return True for an operation that updates running statistics if an argument says so, which it does not.

    It counts as writing to them all the same: a stage may be put in training mode after the trace.
    """
    if not is_overload(op.target):
        return False
    flag = operator_of(op.target).updates_if
    names = [argument.name for argument in schema_of(op.target).arguments]
    given = dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
    return flag is not None and given.get(flag) is False


def _written_by(traced: TracedModel, operations: Sequence[Operation]) -> set[str]:
    memory = {traced.operations[index].storage for op in operations for index in op.writes} - {None}
    written = {
        name
        for index, names in traced.state_names.items()
        if traced.operations[index].storage in memory
        for name in names
    }
    return written | {f"{span.path}.{name}".lstrip(".") for span in traced.spans() for name in span.assigned_buffers}


def _check_written_buffers(traced: TracedModel, held: Sequence[set[str]]) -> None:
    """Raise if several stages hold a buffer that the forward updates."""
    written = written_state(traced)
    for name in sorted(written):
        holders = [index for index, names in enumerate(held) if name in names]
        if len(holders) > 1:
            raise SplitError(
                f"{kind_of_state(traced.model, name)} {name} is updated in forward and used by stages {holders}; each "
                "stage would keep a copy of its own (after train(), if not now). Cut so that all its uses are in one "
                "stage"
            )


def owners_of_shared_buffers(traced: TracedModel, programs: Sequence[Piece]) -> set[str]:
    """Return the modules with buffers that several stages hold."""
    aliases = module_aliases(traced.model)
    held = [_names_held(traced, _used(traced, program, aliases)) for program in programs]
    buffers = [name for name, _ in traced.model.named_buffers(remove_duplicate=False)]
    return {name.rpartition(".")[0] for name in buffers if sum(name in names for names in held) > 1}


def find_ties(stages: Sequence[nn.Module]) -> tuple[TiedParameter, ...]:
    """Return the parameters that more than one stage holds."""
    names: dict[int, list[str]] = {}
    holders: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            if name not in names.setdefault(id(parameter), []):
                names[id(parameter)].append(name)
            if index not in holders.setdefault(id(parameter), []):
                holders[id(parameter)].append(index)
    return tuple(
        TiedParameter(tuple(names[key]), tuple(stages_), stages_[0])
        for key, stages_ in holders.items()
        if len(stages_) > 1
    )


def check_no_common_memory(stages: Sequence[nn.Module]) -> None:
    """Raise if a parameter shares memory with another tensor, and not all stages that hold one hold both.

    In one process what an optimizer does to one of them is done to the other; on ranks it is not.
    """
    names: dict[int, str] = {}
    holders: dict[int, set[int]] = {}
    in_memory: dict[int, dict[int, torch.Tensor]] = {}  # by storage, and by tensor
    for index, stage in enumerate(stages):
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            if type(tensor) in (torch.Tensor, nn.Parameter):
                names.setdefault(id(tensor), name)
                holders.setdefault(id(tensor), set()).add(index)
                in_memory.setdefault(storage_id(tensor), {})[id(tensor)] = tensor
    for together in in_memory.values():
        for one, other in itertools.combinations(together.values(), 2):
            is_trained = one.requires_grad or other.requires_grad
            if is_trained and holders[id(one)] != holders[id(other)] and _overlap(one, other):
                places = [f"{names[id(each)]} of stage {min(holders[id(each)])}" for each in (one, other)]
                raise SplitError(
                    f"{places[0]} and {places[1]} are two tensors in the same memory: on separate ranks training "
                    "changes one of them only. Let both be the same nn.Parameter (b.weight = a.weight, not "
                    "b.weight.data), which is tied; or cut so that both are in one stage"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have elements in common."""
    (begin, end), (other_begin, other_end) = _bytes_of(one), _bytes_of(other)
    if end <= other_begin or other_end <= begin:
        return False
    if one.is_contiguous() and other.is_contiguous() or one.dtype != other.dtype:
        return True
    numbers = torch.arange(max(end, other_end) // one.element_size())
    places = [numbers.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other)]
    return bool(torch.isin(*places).any())


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor begin and end in its storage."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    steps = sum((length - 1) * stride for length, stride in zip(tuple(tensor.shape), tensor.stride(), strict=True))
    return begin, begin + (int(steps) + 1) * size if tensor.numel() else begin


def unused_parameters(traced: TracedModel) -> tuple[str, ...]:
    """Return the parameters that no traced operation uses."""
    used = used_state(traced)
    return tuple(name for name, _ in traced.model.named_parameters(remove_duplicate=False) if name not in used)


def used_state(traced: TracedModel) -> set[str]:
    """Return the names of parameters and buffers that traced operations use."""
    indices = {index for op in traced.operations for index in op.refs} | set(traced.output.refs)
    return {name for index in indices for name in traced.state_names.get(index, ())}


# Modules that others refer to in a list or an object, without having registered them.


References = Mapping[nn.Module, Mapping[nn.Module, str]]  # which modules a module refers to, and by which attribute

_OTHERWISE_KNOWN = frozenset((*STATE_DICTS, *HOOK_DICTS))
_WAYS_TO_COPY = ("__deepcopy__", "__reduce__", "__reduce_ex__")
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Tensor)


def plain_references(model: nn.Module) -> dict[nn.Module, dict[nn.Module, str]]:
    """Return the modules of a model that others of its modules refer to.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> model[1].first = [model[0]]
    >>> plain_references(model) == {model[1]: {model[0]: "first"}}
    True
    """
    own = set(model.modules())
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    for module in own:
        for name, value in vars(module).items():
            if name in _OTHERWISE_KNOWN or type(value) in _ATOMS:
                continue
            for other in _modules_in(value):
                if other in own and other is not module:
                    found.setdefault(module, {}).setdefault(other, name)
    return found


def _modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that a copy of a value would copy with it."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, nn.Module):
            yield item
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            waiting += _inside(item)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.SimpleNamespace) or (is_plain_object(value) and not _has_own_way(type(value))):
        return list(vars(value).values())
    return ()


def _has_own_way(cls: type) -> bool:
    """Return True if a class says itself how it is copied, as that of loggers, which lead to all other loggers."""
    return any(name in vars(base) for base in cls.__mro__[:-1] for name in _WAYS_TO_COPY)


def referred_to(model: nn.Module, present: Iterable[nn.Module], references: References) -> dict[nn.Module, str]:
    """Return the modules that a stage's modules refer to and it does not hold, and all inside of these, with paths."""
    held = set(present)
    found: set[nn.Module] = set()
    waiting = list(held) if references else []
    while waiting:
        for other in references.get(waiting.pop(), ()):
            new = {module for module in other.modules() if module not in held and module not in found}
            found |= new
            waiting += new
    return {module: path for path, module in model.named_modules() if module in found} if found else {}


def check_references_unchanged(
    model: nn.Module,
    stage: int,
    present: Iterable[nn.Module],
    references: References,
    assigned_attributes: Mapping[str, tuple[str, ...]],
) -> None:
    """Raise if the forward changes a module that another stage refers to: its copy there would not change."""
    held = set(present)
    paths = {module: path for path, module in model.named_modules()}
    for module in held & references.keys():
        for other, attribute in references[module].items():
            for inside in other.modules():
                changed = assigned_attributes.get(paths[inside], ())
                if inside not in held and changed:
                    raise SplitError(
                        f"{paths[module]!r}, in stage {stage}, refers to {paths[other]!r} by its attribute "
                        f"{attribute!r}; that is in another stage, and the forward of the model sets "
                        f"{', '.join(f'{paths[inside]}.{name}' for name in changed)}, which stage {stage} would not "
                        "see: cut so that both are in one stage, or hand the value over as a tensor, in arguments and "
                        "results"
                    )
