"""The model that a stage was cut from: whether it was changed since, and which of its tensors other stages hold.

A stage and the model are two trees of modules over the same parameters. What replaces a parameter in one of them, or
switches the mode of one, does not reach the other. Steps compare the two, by identity: about a microsecond for each
module of the stage. Nothing here keeps the model, or a part of it, alive.

At the end: the parts of any stage, checked before there is one.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ChangedModelError, GroupSizeError, InputError, PipeError, StageMetadataError
from ..pipe_ir import KeptValue, PipeInfo, flatten
from ..text import listed, numbered
from ..torch_internals import parameters_of
from .dtensor import is_distributed

_Holders = Mapping[str, tuple[int, ...]]  # the stages that hold a parameter or buffer, by each name in the model

_SHOWN = 4


@dataclass
class _Pair:
    """A module of the model and the one in its place in the stage; `held` are the parameters that the stage uses."""

    path: str
    model_part: weakref.ref[nn.Module]
    stage_part: weakref.ref[nn.Module]
    was_training: bool  # the mode of the model's, when the stage was built or both had been switched
    held: dict[str, int]  # the id of each parameter that the two had in common, or that has replaced it in the stage


class StageOrigin:
    """The model that a stage was cut from, to notice what is changed in one of the two only.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> stage = nn.Sequential(nn.Linear(2, 2))
    >>> stage[0].weight, stage[0].bias = model[0].weight, model[0].bias
    >>> origin = StageOrigin(0, stage, model, {"0.weight": (0,), "0.bias": (0,)})
    >>> origin.check_unchanged(stage)
    >>> _ = model.eval()
    >>> origin.check_unchanged(stage)
    Traceback (most recent call last):
    pipecut.errors.ChangedModelError: the model was put in evaluation mode after stage 0 was built, and the stage is \
in training mode: switch the stage too, by stage.submod.eval(), or the model back, by model.train()
    """

    def __init__(
        self, stage: int, module: nn.Module, model: nn.Module, holders: _Holders, kept: Sequence[KeptValue] = ()
    ) -> None:
        self.stage = stage
        self.holders = holders
        self.kept = kept  # values in objects of Python's that the model's forward keeps there, and stages do not
        self._model = weakref.ref(model)
        # Not ids alone: load_state_dict(assign=True) frees a parameter, and makes the next one in its memory.
        self._known = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}
        parts = dict(model.named_modules())
        self._pairs = [
            _Pair(path, weakref.ref(parts[path]), weakref.ref(part), parts[path].training, _common(parts[path], part))
            for path, part in module.named_modules()
            if path in parts
        ]

    @property
    def model(self) -> nn.Module | None:
        """The model, unless it is gone."""
        return self._model()

    def parts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the modules of the model that the stage has copies of, with these."""
        for pair in self._pairs:
            theirs, ours = pair.model_part(), pair.stage_part()
            if theirs is not None and ours is not None:
                yield theirs, ours

    def _is_known(self, parameter: Tensor | None) -> bool:
        """Return True for a parameter that the model had when it was cut."""
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter

    def check_nothing_added(self) -> None:
        """Raise if the model has got parameters since that no stage has. It walks the model: once per schedule."""
        model = self.model
        added = [
            name
            for name, parameter in (() if model is None else model.named_parameters())
            if parameter.requires_grad and name not in self.holders and not self._is_known(parameter)
        ]
        if added:
            raise ChangedModelError(
                f"the model got {listed(added, _SHOWN)} after pipeline(), and no stage has them: call pipeline() after "
                "that, or add them to the stages (stage.submod) and not to the model"
            )

    def check_unchanged(self, module: nn.Module) -> None:
        """Raise if the model was changed since the stage was built, and `module`, that of the stage, was not."""
        switched: list[_Pair] = []
        apart: list[tuple[_Pair, str]] = []
        for pair in self._pairs:
            theirs, ours = pair.model_part(), pair.stage_part()
            if theirs is None or ours is None:
                continue
            if theirs.training is not pair.was_training:
                if ours.training is theirs.training:
                    pair.was_training = theirs.training
                else:
                    switched.append(pair)
            if pair.held:
                model_parameters, parameters = parameters_of(theirs), parameters_of(ours)
                for name, held in pair.held.items():
                    own, now = parameters.get(name), model_parameters.get(name)
                    if own is not now and (id(own) != held or not self._is_known(now)):
                        apart.append((pair, name))
        if switched:
            self._raise_if_switched(switched, module)
        if apart:
            self._raise_if_replaced(apart)

    def _raise_if_switched(self, pairs: Sequence[_Pair], module: nn.Module) -> None:
        still_there = set(module.modules())
        found = [pair for pair in pairs if pair.stage_part() in still_there]
        if not found:
            return
        first = found[0]
        theirs = first.model_part()
        assert theirs is not None  # it was switched
        mode, other = ("training", "evaluation") if theirs.training else ("evaluation", "training")
        here, back = ("train", "eval") if theirs.training else ("eval", "train")
        what = f"{first.path!r} of the model" if first.path else "the model"
        inside = f".get_submodule({first.path!r})" if first.path else ""
        raise ChangedModelError(
            f"{what} was put in {mode} mode after stage {self.stage} was built, and the stage is in {other} mode: "
            f"switch the stage too, by stage.submod{inside}.{here}(), or the model back, by model{inside}.{back}()"
        )

    def _raise_if_replaced(self, apart: Sequence[tuple[_Pair, str]]) -> None:
        replaced_in_model: list[str] = []
        replaced_in_stage: list[tuple[_Pair, str, Tensor]] = []
        for pair, name in apart:
            theirs, ours = pair.model_part(), pair.stage_part()
            own = None if ours is None else parameters_of(ours).get(name)
            now = None if theirs is None else parameters_of(theirs).get(name)
            if id(own) != pair.held[name]:
                replaced_in_stage += [] if own is None else [(pair, name, own)]
            elif now is not None and not self._is_known(now):
                replaced_in_model.append(_joined(pair.path, name))
        if replaced_in_model:
            raise ChangedModelError(
                f"{listed(replaced_in_model, _SHOWN)} of the model are other parameters than when it was cut (did "
                f"load_state_dict(assign=True) replace them?), and stage {self.stage} would go on with the old ones: "
                "load without assign=True, or into the stages (stage.submod.load_state_dict), or call pipeline() again"
            )
        if replaced_in_stage:
            self._check_optimizers(replaced_in_stage)

    def _check_optimizers(self, replaced: Sequence[tuple[_Pair, str, Tensor]]) -> None:
        """Raise if an optimizer has a parameter that the stage no longer uses, and none has the one that it uses now.

        A parameter may be replaced on purpose: by fully_shard, by an adapter, by values from elsewhere.
        """
        optimized = {id(parameter) for parameter in _optimized_parameters()}
        stale = [
            _joined(pair.path, name)
            for pair, name, own in replaced
            if pair.held[name] in optimized and id(own) not in optimized and not is_distributed(own)
        ]
        if stale:
            raise ChangedModelError(
                f"{listed(stale, _SHOWN)} of stage {self.stage} were replaced after the optimizer was made (by "
                "load_state_dict(assign=True)?), which still updates the old ones: load without assign=True, or make "
                "the optimizer after that"
            )
        for pair, name, own in replaced:
            if is_distributed(own):
                del pair.held[name]  # fully_shard puts other objects there in every step
            else:
                pair.held[name] = id(own)


def _common(model_part: nn.Module, stage_part: nn.Module) -> dict[str, int]:
    theirs = parameters_of(model_part)
    return {
        name: id(parameter)
        for name, parameter in parameters_of(stage_part).items()
        if parameter is not None and theirs.get(name) is parameter
    }


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _optimized_parameters() -> Iterator[Tensor]:
    """Yield the parameters of all optimizers of this process, found among all objects: this takes some time."""
    for each in gc.get_objects():
        if issubclass(type(each), Optimizer):
            for group in each.param_groups:
                yield from group["params"]


def held_elsewhere(holders: _Holders, name: str) -> str:
    """Say which stages hold a tensor of the model.

    >>> held_elsewhere({"0.weight": (0,)}, "0.weight")
    'stage 0'
    """
    return numbered("stage", holders[name]) if holders.get(name) else "no stage"


class CallVariants(Protocol):
    """The forms of calls that a model was traced for, by number; 0 is that of the example."""

    @property
    def need_values(self) -> bool:
        """True if a call to trace needs the values of its tensors, and not only their shapes."""

    def number_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the number of the form that a call has; one that is new is traced now, if it can be."""

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return the number of the form that a call has, if the model was traced for it."""

    def can_add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the model can be traced for the form of a call."""

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Trace the model for the form of a call, given for one microbatch, and return its number."""

    def whole(self, number: int) -> int:
        """Return the number of the variant that returns all outputs of a form; mostly that is the form itself."""

    def info(self, number: int) -> PipeInfo:
        """Return what is known of the stages and edges of a variant."""

    def parts_of(self, module: nn.Module, stage: int) -> Mapping[str, nn.Module]:
        """Return the parts of a stage's module by their paths, whatever they are wrapped in by now."""

    def install(self, number: int, stage: int, parts: Mapping[str, nn.Module], device: torch.device) -> None:
        """Give the parts of a stage, by path, the forwards of a variant."""


# The example tensors of a stage, its module and its place.


@dataclass(frozen=True)
class Examples:
    """Example tensors of a stage, as the user gives them."""

    input_args: Any = None
    output_args: Any = None
    input_grads: Any = None
    output_grads: Any = None

    def checked(self, stage_index: int, num_stages: int) -> Examples:
        """Return them as tuples. Inputs and outputs of the whole model may be nested; stages pass on tensors only."""
        inputs, outputs = f"Stage {stage_index}: input_", f"Stage {stage_index}: output_"
        made = Examples(
            tensors_of(self.input_args, f"{inputs}args", nested=stage_index == 0),
            tensors_of(self.output_args, f"{outputs}args", nested=stage_index == num_stages - 1),
            tensors_of(self.input_grads, f"{inputs}grads", allow_none=True),
            tensors_of(self.output_grads, f"{outputs}grads", allow_none=True),
        )
        # The gradients of plain tensors follow from these, whatever was given for them.
        taken, returned = flatten(made.input_args)[0], flatten(made.output_args)[0]
        if any(map(is_distributed, (*taken, *returned))):
            if made.input_args and made.input_grads:
                check_gradients(stage_index, tuple(taken), made.input_grads, is_input=True)
            if made.output_args and made.output_grads:
                check_gradients(stage_index, tuple(returned), made.output_grads, is_input=False)
        return made


def tensors_of(values: Any, called: str, *, allow_none: bool = False, nested: bool = False) -> tuple[Any, ...] | None:
    """Return a tensor, or several, as a tuple; with `nested`, each may be a nested value of tensors.

    >>> tensors_of([None], "input_grads", allow_none=True)
    (None,)
    """
    if values is None:
        return None
    several = isinstance(values, tuple | list)
    for place, value in enumerate(values if several else (values,)):
        for leaf in flatten(value)[0] if nested else [value]:
            if not isinstance(leaf, Tensor) and not (leaf is None and allow_none):
                kind = "is None" if leaf is None else f"has type {type(leaf).__name__}"
                raise StageMetadataError(
                    f"{called}[{place}] {kind}, and all of them must be tensors: pass other values by keyword"
                    if several
                    else f"{called} must be a tensor, or a tuple or list of tensors; got {type(leaf).__name__}"
                )
    return tuple(values) if several else (values,)


def check_gradients(
    stage_index: int, args: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], *, is_input: bool
) -> None:
    """Raise on gradients that do not fit the tensors that they are given for."""
    side = "input" if is_input else "output"
    if len(args) != len(grads):
        raise StageMetadataError(
            f"Stage {stage_index}: {side}_grads length ({len(grads)}) does not match {side}_args length ({len(args)}): "
            "give one gradient for each tensor, None where there is none"
        )
    for place, (value, grad) in enumerate(zip(args, grads, strict=True)):
        if grad is not None and not value.requires_grad:
            raise StageMetadataError(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=False, but {side}_grads[{place}] is not "
                "None: a tensor that needs no gradient has None there"
            )
        if grad is not None and is_distributed(value) and not is_distributed(grad):
            raise StageMetadataError(
                f"Stage {stage_index}: {side}_args[{place}] is a DTensor, but {side}_grads[{place}] is a "
                f"{type(grad).__name__}, expected DTensor or None: the gradient of a DTensor is one, in placements of "
                "its own"
            )
        if grad is None and value.requires_grad:
            warnings.warn(
                f"Stage {stage_index}: {side}_args[{place}] has requires_grad=True, but {side}_grads[{place}] is None",
                stacklevel=3,
            )


# Checks of the module and of its place.


def check_place(submodule: object, stage_index: int, num_stages: int) -> None:
    """Raise on what is not a module, or not one of so many stages."""
    if not isinstance(submodule, nn.Module):
        raise InputError(f"a stage needs an nn.Module, got {type(submodule).__name__}")
    for name, value in (("stage_index", stage_index), ("num_stages", num_stages)):
        if not isinstance(value, SupportsIndex):
            raise InputError(f"{name} must be an integer, got {value!r} ({type(value).__name__}): give an int")
    if not 0 <= stage_index < num_stages:
        raise InputError(
            f"stage_index={stage_index} does not fit num_stages={num_stages}: stages are 0 to {num_stages - 1}"
        )


def names_without_memory(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers on the meta device."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, tensor in tensors if tensor.device.type == "meta"]


def check_has_memory(module: nn.Module, index: int, device: torch.device) -> None:
    """Raise on a stage on the meta device that is to run somewhere else."""
    empty = names_without_memory(module) if device.type != "meta" else []
    if empty:
        raise PipeError(
            f"stage {index} has no values, only shapes (on the meta device): {listed(empty, 5)}. Give "
            f"them with pipe.build_stage({index}, device, init=function), where the function is called with each "
            f"module to initialise it, or with pipe.build_stage({index}, device, checkpoint=path). For a stage cut by "
            "hand: module.to_empty(device=device), then load_state_dict"
        )


def check_group(size: int, num_stages: int) -> None:
    """Raise on a process group in which ranks would have no stage."""
    if size > num_stages:
        raise GroupSizeError(
            f"Pipeline group size {size} cannot be larger than number of stages {num_stages}: every rank of the group "
            f"has a stage. Pass the group of its ranks as group=, or cut the model into at least {size} stages"
        )
