"""The Pipe: a cut model, which runs, explains itself and builds stages."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError, PipeError
from ..pipe_ir import (
    Edge,
    PipeInfo,
    RecomputedValue,
    StageInfo,
    TiedParameter,
    TracedModel,
    UnsentOutput,
    bind_inputs,
    has_forward_hooks,
    may_draw,
    sizes_of,
)
from ..stage import CheckpointLike, InitFunction, PipelineStage, StageOrigin, Values, build_stage, materialize
from ..torch_internals import EXTRA_STATE, buffers_of, parameters_of
from .report import Explanation, describe, explain, readable
from .variants import Retrace, Variants


@dataclass(frozen=True, repr=False, eq=False)
class Pipe:
    """A model cut into stages. Call it to run the stages one after the other, in one autograd graph.

    >>> from pipecut import pipeline, SplitPoint
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> pipe = pipeline(model, (torch.ones(3, 4),), split_spec={"2": SplitPoint.BEGINNING})
    >>> pipe.num_stages, [str(edge) for edge in pipe.edges]
    (2, ['_1: 0 -> 1 float32[batch, 4] grad'])
    >>> torch.equal(pipe(torch.ones(5, 4)), model(torch.ones(5, 4)))
    True

    `recomputed` are values that a stage makes once more instead of receiving them, `only_returned` those that come to
    the last stage from earlier ones and are used there for nothing but the model's output. `unsent` are outputs that
    earlier stages make, and that only a call of the pipe or an evaluation sends to the last. `balance` says in words
    how even stages are that were found automatically.

    A call of another form than the example, without an optional argument or with another flag, is traced by `retrace`
    when it is first made, and cut at the same places; `variants` has these.
    """

    traced: TracedModel
    stages: tuple[nn.Module, ...]
    stage_infos: tuple[StageInfo, ...]
    edges: tuple[Edge, ...]
    tied_parameters: tuple[TiedParameter, ...]
    unused_parameters: tuple[str, ...]
    recomputed: tuple[RecomputedValue, ...] = ()
    only_returned: tuple[int, ...] = ()
    unsent: tuple[UnsentOutput, ...] = ()
    balance: str = ""
    retrace: Retrace | None = None
    whole: Callable[[int], Pipe] | None = None  # cuts it as a variant, given its number, that returns all outputs
    variants: Variants = field(init=False)
    _names: tuple[str, ...] = field(init=False)  # see PipeInfo; those of now, for the user may add to the model

    def __post_init__(self) -> None:
        self.verify()
        object.__setattr__(self, "_names", tuple(_names_in_order(self.traced.model)))
        object.__setattr__(self, "variants", Variants(self, self.retrace))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def get_stage_module(self, stage_index: int) -> nn.Module:
        """Return the module of one stage: the model's own hierarchy and names, with what this stage needs."""
        if not isinstance(stage_index, int) or isinstance(stage_index, bool) or not 0 <= stage_index < self.num_stages:
            raise InputError(f"no stage {stage_index!r}: this pipe has stages 0 to {self.num_stages - 1}")
        return self.stages[stage_index]

    def info(self) -> PipeInfo:
        """Return what is known of the stages and edges, without the modules."""
        return PipeInfo(
            self.num_stages,
            self.stage_infos,
            self.edges,
            self.tied_parameters,
            self.unused_parameters,
            self.traced.call,
            self._is_random(),
            self._names,
            self.unsent,
        )

    def _is_random(self) -> bool:
        """Return True if the model draws random numbers, or may: in another mode, or in code that was not traced."""
        traced = self.traced
        options = {"in_other_modes": not traced.training}
        untraced = bool(traced.fallbacks) or any(map(has_forward_hooks, traced.model.modules()))
        return untraced or any(may_draw(op, **options) for op in traced.operations)

    def to(self, device: torch.device | str) -> Pipe:
        """Move all stages to a device, in place."""
        for stage in self.stages:
            stage.to(device)
        return self

    def train(self, mode: bool = True) -> Pipe:
        """Put all stages in training mode."""
        for stage in self.stages:
            stage.train(mode)
        return self

    def eval(self) -> Pipe:
        """Put all stages in evaluation mode."""
        return self.train(False)

    def sizes(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """Return the symbolic dims' sizes in a call with these arguments; `TensorSpec.bind` takes them."""
        call = self.variants.info(self.variants.number_for(args, kwargs)).call
        return sizes_of(call.dims, bind_inputs(call, args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        variant = self.variants.whole(self.variants.number_for(args, kwargs))
        infos = self.variants.info(variant)
        values: dict[int, Any] = dict(bind_inputs(infos.call, args, kwargs))
        which = self.variants.installed(variant)
        result: Any = None
        for info, stage in zip(infos.stages, self.stages, strict=True):
            result = stage(*which, *(values[index] for index in info.inputs))
            made = (result,) if len(info.outputs) == 1 else result
            if info.index < self.num_stages - 1:
                values.update(zip(info.outputs, made or (), strict=True))
        return result

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        init: InitFunction | None = None,
        checkpoint: CheckpointLike | None = None,
        dtype: torch.dtype | None = None,
        strict: bool = True,
        rename: Callable[[str], str] | None = None,
    ) -> PipelineStage:
        """Build one stage, its module moved to the device, for a schedule.

        A model that was made on the meta device, or under `pipecut.empty_weights()`, has no values; its stages get them
        here, each only its own, and the model stays as it is:

        - `init`: a function that is called with modules, children before their parents, as `model.apply` does. Random
          numbers depend on torch.initial_seed() and the module's name alone, not on the cut.
        - `checkpoint`: a safetensors file, a directory of them (with an index or without), a file of torch.save, a
          directory of torch.distributed.checkpoint, or a state dict. Only what the stage holds is read.

        Shapes and dtypes of a checkpoint must be the model's. `dtype=torch.float32` converts other floating point
        values to it, where it is the model's. `rename` turns the model's names into those of the checkpoint. With
        `strict=False` names may differ: what the checkpoint does not hold comes from `init`, or is as in the model.

        >>> from torch import nn
        >>> from pipecut import pipeline
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> pipe = pipeline(model, (torch.ones(3, 4),), num_stages=2)
        >>> def init(module: nn.Module) -> None:
        ...     if isinstance(module, nn.Linear):
        ...         module.reset_parameters()
        >>> stage = pipe.build_stage(1, "cpu", init=init)
        >>> list(stage.submod.state_dict()), stage.submod.get_parameter("1.weight").device
        (['1.weight', '1.bias'], device(type='cpu'))
        """
        values = Values(init, checkpoint, dtype, strict, rename)
        module = self.get_stage_module(stage_index)
        if values.given:
            module = materialize(self.traced, self.tied_parameters, module, stage_index, device, values)
        stage = build_stage(module, stage_index, self.info(), device, group, self.variants)
        stage.origin = StageOrigin(stage_index, stage.submod, self.traced.model, self._holders, self.traced.kept)
        return stage

    @functools.cached_property
    def _holders(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold each parameter and buffer, by its names in the model."""
        found: dict[str, tuple[int, ...]] = {}
        for index, stage in enumerate(self.stages):
            tensors = itertools.chain(
                stage.named_parameters(remove_duplicate=False), stage.named_buffers(remove_duplicate=False)
            )
            for name, _ in tensors:
                found[name] = (*found.get(name, ()), index)
        return found

    def verify(self) -> None:
        """Check that every value is defined before its use, every edge has both ends, and no name is lost."""
        faults = self._stage_faults() or [*self._edge_faults(), *self._arrival_faults(), *self._name_faults()]
        if faults:
            raise PipeError("this pipe is not consistent:\n  " + "\n  ".join(faults))

    def _stage_faults(self) -> list[str]:
        if len(self.stage_infos) != len(self.stages):
            return [f"there are {len(self.stages)} stages, and infos of {len(self.stage_infos)}"]
        marks = [getattr(type(stage), "_pipecut_stage", None) for stage in self.stages]
        return [
            f"stage {position} holds the module of stage {mark} and the info of stage {info.index}"
            for position, (mark, info) in enumerate(zip(marks, self.stage_infos, strict=True))
            if not position == mark == info.index
        ]

    def _edge_faults(self) -> list[str]:
        faults = []
        roots = {entry.value for entry in self.traced.inputs}
        for edge in self.edges:
            if not 0 <= edge.source < edge.target < self.num_stages:
                faults.append(f"{edge.name} goes from stage {edge.source} to stage {edge.target}, of {self.num_stages}")
                continue
            given = edge.kind == "root input" and edge.source == 0
            makes = roots if given else set(self.stage_infos[edge.source].outputs)
            if edge.value not in makes:
                faults.append(f"stage {edge.source} does not make {edge.name}, which stage {edge.target} uses")
            if edge.value not in self.stage_infos[edge.target].inputs:
                faults.append(f"stage {edge.target} does not use {edge.name}, which stage {edge.source} sends to it")
        return faults

    def _arrival_faults(self) -> list[str]:
        faults = []
        arriving = collections.Counter((edge.target, edge.value) for edge in self.edges)
        roots = {entry.value for entry in self.traced.inputs}
        for info in self.stage_infos:
            for value, name in zip(info.inputs, info.input_names, strict=True):
                count = arriving[info.index, value]
                if count > 1:
                    faults.append(f"{count} edges bring {name} to stage {info.index}")
                elif count == 0 and not (info.index == 0 and value in roots):
                    faults.append(f"nothing brings {name} to stage {info.index}")
        return faults

    def _tie_faults(self) -> list[str]:
        listed = {name for tie in self.tied_parameters for name in tie.names}
        first: dict[int, int] = {}
        return [
            f"parameter {name} is in stages {first[id(parameter)]} and {index}, and is not listed as tied"
            for index, stage in enumerate(self.stages)
            for name, parameter in stage.named_parameters(remove_duplicate=False)
            if first.setdefault(id(parameter), index) != index and name not in listed
        ]

    def _name_faults(self) -> list[str]:
        held = {name for stage in self.stages for name, _ in stage.named_parameters(remove_duplicate=False)}
        wanted = {name for name, _ in self.traced.model.named_parameters(remove_duplicate=False)}
        saved = {name for stage in self.stages for name in stage.state_dict()}
        to_save = set(self.traced.model.state_dict())
        return [
            *self._tie_faults(),
            *(f"parameter {name} of the model is in no stage" for name in sorted(wanted - held)),
            *(f"parameter {name} of a stage is not in the model" for name in sorted(held - wanted)),
            *(f"state_dict entry {name} of the model is in no stage" for name in sorted(to_save - saved)),
            *(f"state_dict entry {name} of a stage is not in the model" for name in sorted(saved - to_save)),
        ]

    def print_readable(self) -> str:
        """Print, and return, the code that was generated for each stage."""
        text = readable(self)
        print(text)
        return text

    def explain(self) -> Explanation:
        """Explain in plain words what was traced, what is fixed by that, what is cut, sent and recomputed, and why.

        >>> from pipecut import SplitPoint, pipeline
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> pipe = pipeline(model, (torch.ones(3, 4),), split_spec={"1": SplitPoint.BEGINNING})
        >>> print(pipe.explain())
        Sequential in 2 stages
        traced
          - Sequential in training mode, on cpu: 2 operations in 3 module calls
          - the example: input float32[batch, 4], where batch = 3
        sizes
          - batch may change from call to call: the code that is cut decides nothing by it
        fixed by the trace
          - dim 1 of input is 4: as in the example, since nobody asked for anything else
        modules
          - stage 0: whole, running their own code: 0; as generated code: the model itself
          - stage 1: whole, running their own code: 1; as generated code: the model itself
        sent between stages
          - stage 0 -> 1: _0, 48 B
        """
        return explain(self)

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__


def _names_in_order(model: nn.Module) -> Iterator[str]:
    """Yield all names of parameters, buffers and extra state, in the order of the model's iterators and state_dict."""
    for path, module in model.named_modules(remove_duplicate=False):
        own = [*parameters_of(module), *buffers_of(module)]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            own.append(EXTRA_STATE)
        yield from (f"{path}.{name}".lstrip(".") for name in own)


def check_is_uncut_model(module: object) -> None:
    """Raise on anything but a model: pipeline() cuts no Pipe, and no stage of one."""
    if isinstance(module, Pipe):
        raise PipeError("this model is cut already: it is a Pipe; call pipeline() with the model that it was made from")
    if not isinstance(module, nn.Module):
        raise InputError(f"pipeline() takes an nn.Module, got {type(module).__name__}")
    if any(hasattr(type(part), "_pipecut_stage") for part in module.modules()):
        raise PipeError(
            f"this {type(module).__name__} is a stage of a model that is cut already; call pipeline() with the model "
            "itself"
        )
