"""Variants of a pipe: its model traced and cut for calls of other forms than the example, when one is first made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..errors import InputError, PipeError, SplitError, warn
from ..pipe_ir import ForwardOf, PipeInfo, TracedModel, bind_inputs, can_be_retraced, has_form
from ..split import add_variant, check_no_new_hooks, check_same_places
from ..text import listed

if TYPE_CHECKING:
    from .pipe import Pipe

_MANY = 8  # variants after which a value that changes in every call is the likely reason


class Retrace(Protocol):
    """Cuts the model of a pipe once more, for another call; the modules at `apart` get generated code in any case."""

    def __call__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: TracedModel, variant: int, apart: Collection[str]
    ) -> Pipe: ...


class Variants:
    """The forms of calls that a model was traced for, by number: 0 is that of the pipe itself."""

    def __init__(self, pipe: Pipe, retrace: Retrace | None) -> None:
        self._first = weakref.ref(pipe)  # which has this: a cycle would keep the model alive until it is collected
        self._others: list[Pipe] = []
        self._whole: dict[int, int] = {}  # from the number of a form to that of the variant with all of its outputs
        self._retrace = retrace
        self._infos: list[PipeInfo] = []
        self._installed: set[int] = {0}  # in the stages of the pipe
        # As they are now: their names change if the user puts a wrapper around one.
        self._parts = [dict(stage.named_modules(remove_duplicate=False)) for stage in pipe.stages]
        self._parameters = [frozenset(dict(stage.named_parameters(remove_duplicate=False))) for stage in pipe.stages]

    def __len__(self) -> int:
        return 1 + len(self._others)

    @property
    def pipes(self) -> list[Pipe]:
        """The cut of the model for each form."""
        first = self._first()
        assert first is not None  # the variants belong to it
        return [first, *self._others]

    @property
    def need_values(self) -> bool:
        """True if a call to trace needs the values of its tensors: for modules that stay as they are, and are run."""
        return bool(self.pipes[0].traced.fallbacks)

    def number_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the number of a call's form; one that is new is traced now, if it can be."""
        number = self.find(args, kwargs)
        if number is not None:
            return number
        return self.add(args, kwargs) if self.can_add(args, kwargs) else 0

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Return the number of a call's form, None if the model was not traced for it."""
        forms = ((number, pipe) for number, pipe in enumerate(self.pipes) if number not in self._whole.values())
        return next((number for number, pipe in forms if has_form(pipe.traced.call, args, kwargs)), None)

    def can_add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the model can be traced for the form of a call: it differs by tensors and plain values."""
        return self._retrace is not None and can_be_retraced(self.pipes[0].traced.call, args, kwargs)

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Trace the model for the form of a call, given for one microbatch, and return its number."""
        first, retrace = self.pipes[0], self._retrace
        assert retrace is not None  # see can_add
        try:
            number = self._cut(lambda number: retrace(args, kwargs, first.traced, number, _generated(first)))
        except PipeError as error:
            raise _failed(first, args, kwargs, error) from error
        if number - len(self._whole) == _MANY:
            warn(
                f"{first.traced.call.model_name} has been traced for {_MANY} forms of calls besides the example, "
                "which takes time and memory for each: pass a number that changes from call to call as a tensor"
            )
        return number

    def whole(self, number: int) -> int:
        """Return the number of the variant that returns all outputs of a form; mostly that is the form itself."""
        pipe = self.pipes[number]
        if pipe.whole is None or not pipe.unsent:
            return number
        if number not in self._whole:
            try:
                self._whole[number] = self._cut(pipe.whole)
            except SplitError as error:
                raise SplitError(
                    f"the outputs {listed((each.name for each in pipe.unsent), 3)}, which training steps do not send, "
                    f"cannot be sent in other calls: {error}"
                ) from error
        return self._whole[number]

    def _cut(self, make: Callable[[int], Pipe]) -> int:
        """Make a variant, which gets its number, and check that the stages can run it."""
        number, first = len(self), self.pipes[0]
        with torch.inference_mode(False):
            made = make(number)
        check_same_places(self._parameters, made.stages, made.traced)
        check_no_new_hooks(first.traced.model, _generated(first), _generated(made))
        self._others.append(made)
        return number

    def info(self, number: int) -> PipeInfo:
        """Return what is known of the stages and edges of a variant; parameters are where they are in the first."""
        for pipe in self.pipes[len(self._infos) :]:
            info = pipe.info()
            first = self._infos[0] if self._infos else info
            self._infos.append(
                replace(info, tied_parameters=first.tied_parameters, unused_parameters=first.unused_parameters)
            )
        return self._infos[number]

    def parts_of(self, module: nn.Module, stage: int) -> Mapping[str, nn.Module]:
        """Return the parts of a stage's module by their paths, whatever they are wrapped in by now."""
        is_own = module is self.pipes[0].stages[stage]
        return self._parts[stage] if is_own else dict(module.named_modules(remove_duplicate=False))

    def install(self, number: int, stage: int, parts: Mapping[str, nn.Module], device: torch.device) -> None:
        """Give the parts of a stage, by path, the forwards of a variant."""
        made = self.pipes[number]
        add_variant(parts, made.stages[stage], stage, made.traced, device)

    def installed(self, number: int) -> tuple[ForwardOf, ...]:
        """Return what the stages of the pipe are called with first, to run a variant."""
        if number not in self._installed:
            for index, stage in enumerate(self.pipes[0].stages):
                tensors = (*stage.parameters(), *stage.buffers())
                device = next((tensor.device for tensor in tensors), self.pipes[0].traced.device)
                self.install(number, index, self._parts[index], device)
            self._installed.add(number)
        return (ForwardOf(number),) if number else ()


def _generated(pipe: Pipe) -> set[str]:
    """Return the paths of the modules that are generated code."""
    return {label.partition("#")[0] for info in pipe.stage_infos for label in info.code}


def _failed(first: Pipe, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: PipeError) -> PipeError:
    """Return the error for a call that cannot be traced: how it differs from the example, and why it was no use."""
    try:
        bind_inputs(first.traced.call, args, kwargs)
    except InputError as difference:
        return InputError(f"{difference}\nThe model was traced again for this call, which failed: {error}")
    return error
