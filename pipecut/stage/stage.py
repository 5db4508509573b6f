"""A stage: runs its module forward and backward on values, and keeps the microbatches in flight between the two."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, PipeError, StageMetadataError
from ..pipe_ir import Edge, ForwardOf, PipeInfo, TensorSpec, flatten, map_leaves
from ..text import counted, listed
from ..torch_internals import WRITE_TO_LEAF, part_types, trainable_parameters
from .backward import PendingWeights, StageWeights, full_backward, input_backward, weight_backward
from .dtensor import Meshes, MeshKey, MeshLayout, describe_tensor, placement_of
from .origin import CallVariants, Examples, StageOrigin, check_group, check_has_memory, check_place
from .replica import Replica, groups_of, replica_of, wrapped_parts

_WeightRunner = Callable[[], None]

_NO_CONTEXT = contextlib.nullcontext()


@dataclass
class Flight:
    """A microbatch in flight: inputs and outputs of the module, until its backward is done."""

    inputs: list[Any]
    outputs: list[Any]
    result: Any = None  # the module's, on the last stage
    loss: Tensor | None = None
    pending: PendingWeights | _WeightRunner | None = field(default=None)


class PipelineStage:
    """A module as one stage of a pipeline.

    For modules that you cut by hand. Stages of a traced model come from `pipe.build_stage(index, device)`. The module
    takes the outputs of the stage before it as positional arguments, and returns a tensor or a tuple of tensors; the
    last one may return anything. Shapes are learnt in the first step, from the tensors that arrive.

    A DTensor is sent as its local part, and is one again on the next stage, on its own mesh: one that its parameters,
    `input_args` or `output_args` are on, or the one that `get_mesh(mesh_dim_names, mesh_layout)` returns.

    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    >>> stage.is_first, stage.is_last
    (True, True)
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        output_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        input_grads: Tensor | tuple[Tensor | None, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], _WeightRunner] | None = None,
        get_mesh: Callable[..., Any] | None = None,
        *,
        pipe_info: PipeInfo | None = None,
        variants: CallVariants | None = None,
    ) -> None:
        check_place(submodule, stage_index, num_stages)
        given = (input_args, output_args, input_grads, output_grads)
        examples = Examples(*given)
        if any(each is not None for each in given):
            examples = examples.checked(stage_index, num_stages)
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.is_first = stage_index == 0
        self.is_last = stage_index == num_stages - 1
        self.device = torch.device(device)
        self.input_args: tuple[Any, ...] | None = examples.input_args
        self.output_args: tuple[Any, ...] | None = examples.output_args
        self.group = group
        check_group(self.group_size, num_stages)
        self.dw_builder = dw_builder
        self.meshes = Meshes(stage_index, get_mesh)
        for each in given:
            if each is not None:
                self.meshes.add_from(flatten(each)[0])
        self.pipe_info = pipe_info
        self.origin: StageOrigin | None = None  # of a stage that Pipe.build_stage has made
        self.ports: _Ports | None = None if pipe_info is None else _ports_of(pipe_info, stage_index)
        # Not the pipe itself, which has the whole model.
        self._variants = None if variants is None else weakref.ref(variants)
        self.variant = 0  # the form of calls that it runs
        self._which: tuple[ForwardOf, ...] = ()
        self._known_variants = {0: (self.pipe_info, self.ports)}
        self._parts = {} if variants is None else variants.parts_of(submodule, stage_index)
        self.find_wrappers()
        self.flights: dict[int, Flight] = {}
        self.weights = StageWeights(())
        self._writes_inputs = False  # True once the module was seen to write to its inputs in place
        self._place_module()

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.submod.parameters())
        kind = "" if self.pipe_info is None else f" of a traced {self.pipe_info.call.model_name}"
        return (
            f"{type(self).__name__}(stage {self.stage_index} of {self.num_stages}{kind}: "
            f"{type(self.submod).__name__}, {counted(count, 'parameter')}, on {self.device})"
        )

    @property
    def group_rank(self) -> int:
        """The rank of this process in the group; 0 without torch.distributed."""
        return dist.get_rank(self.group) if is_initialized() else 0

    @property
    def group_size(self) -> int:
        """The number of ranks in the group; 1 without torch.distributed."""
        return dist.get_world_size(self.group) if is_initialized() else 1

    def _place_module(self) -> None:
        """Move the module to the device of the stage, and collect its parameters."""
        check_has_memory(self.submod, self.stage_index, self.device)
        self.submod.to(self.device)
        self.begin_step()

    @property
    def variants(self) -> CallVariants | None:
        """The forms of calls that the model was traced for; None for a stage whose pipe is gone."""
        return None if self._variants is None else self._variants()

    @property
    def has_lost_its_pipe(self) -> bool:
        """True for a stage of a pipe that nobody has kept."""
        return self._variants is not None and self._variants() is None

    def use_variant(self, number: int) -> None:
        """Get ready for calls of a form that the model was traced for: 0 is that of the example."""
        if number == self.variant:
            return
        if number not in self._known_variants:
            variants = self.variants
            assert variants is not None  # the variant was made just now
            variants.install(number, self.stage_index, self._parts, self.device)
            info = variants.info(number)
            self._known_variants[number] = (info, _ports_of(info, self.stage_index))
            self._part_types = part_types(self.submod)  # which it changes
        self.variant = number
        self.pipe_info, self.ports = self._known_variants[number]
        self._which = (ForwardOf(number),) if number else ()

    def find_wrappers(self) -> None:
        """Find the parts of the module that are copied or sharded; a schedule does so when it is made."""
        self.replica: Replica = replica_of(self.submod)
        self.groups = groups_of(self.submod, self.replica)
        self._wrapped_parts = wrapped_parts(self.submod)
        self._part_types = part_types(self.submod)

    def check_no_new_wrappers(self) -> None:
        """Raise if a part was wrapped since: its gradients would be averaged at the wrong time, or not at all."""
        types = part_types(self.submod)
        if types != self._part_types and wrapped_parts(self.submod) != self._wrapped_parts:
            raise InputError(
                f"the module of stage {self.stage_index} was put under DistributedDataParallel, replicate() or "
                "fully_shard, or taken out of it, after its schedule was made: wrap it first, and then make the "
                "schedule"
            )

    def with_module(self, module: nn.Module) -> PipelineStage:
        """Return a stage like this one that runs another module."""
        other = copy.copy(self)
        other.submod = module
        other.origin = None
        other._parts = dict(module.named_modules(remove_duplicate=False))
        other._known_variants = {0: self._known_variants[0]}
        other.variant, other._which = 0, ()
        other.pipe_info, other.ports = self._known_variants[0]
        other.flights = {}
        other.weights = StageWeights(())
        other.find_wrappers()
        other.begin_step()
        return other

    def begin_step(self, *, splits_backward: bool = True) -> None:
        """Collect the trainable parameters before the step builds any graph.

        Without `splits_backward` there is no backward for inputs only, for which listeners to gradients matter.
        """
        self.flights.clear()
        parameters = trainable_parameters(self.submod)
        if not self.weights.matches(parameters):
            self.weights = StageWeights(parameters)
        elif splits_backward:
            self.weights.refresh()

    def forward(self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> Flight:
        """Run the module on one microbatch, whose tensors are detached from the stages before."""
        inputs = list(args)
        with torch.set_grad_enabled(training), self.replica.forward() if self.replica.has_contexts else _NO_CONTEXT:
            result = self._call(inputs, kwargs)
        flight = Flight(inputs, [], result) if self.is_last else Flight(inputs, self._outputs_of(result))
        if training:
            self.flights[microbatch] = flight
        return flight

    def _call(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module; on copies of its inputs if it writes to them in place, as nn.ReLU(inplace=True) does.

        The inputs of a stage are leaves, for their gradients are sent back, and autograd forbids writing to a leaf.
        """
        if not self._writes_inputs:
            try:
                return self.submod(*self._which, *inputs, **kwargs)
            except RuntimeError as error:
                if WRITE_TO_LEAF not in str(error):
                    raise
        copies, named = map_leaves(_copied, (tuple(inputs), dict(kwargs)))
        result = self.submod(*self._which, *copies, **named)
        if not self._writes_inputs:
            self._writes_inputs = True
            warnings.warn(
                f"the module of stage {self.stage_index} writes to its inputs in place, and gets copies of them from "
                "now on. That costs memory: inplace=False where the stage begins, or a cut one operation later, "
                "saves it",
                stacklevel=2,
            )
        return result

    def select_output(self, result: Any) -> Any:
        """Return what loss_fn and the caller of a step get of the module's result: all of it, unless overridden."""
        return result

    def _outputs_of(self, result: Any) -> list[Any]:
        if self.ports is not None:
            return [] if self.ports.outputs == 0 else [result] if self.ports.outputs == 1 else list(result)
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        for place, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                raise PipeError(
                    f"stage {self.stage_index} returned {type(output).__name__} as output {place}; every stage but the "
                    "last returns a tensor or a tuple of tensors, for only tensors are sent to the next one"
                )
        self.meshes.add_from(outputs)
        self._check_outputs(outputs)
        return outputs

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Raise on outputs that do not fit the examples of the stage; their number of samples may differ."""
        if self.output_args is None:
            return
        expected = [_sample_of(example) for example in self.output_args]
        got = [_sample_of(output) for output in outputs]
        if got != expected:
            declared, made = listed(map(describe_tensor, self.output_args)), listed(map(describe_tensor, outputs))
            raise StageMetadataError(
                f"stage {self.stage_index} was made for output_args {declared}, samples aside, and returned {made}: "
                "check output_args, or what the module returns"
            )

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None], *, weights: bool) -> list[Tensor | None]:
        """Return the gradients of a microbatch's inputs; those of the parameters come now or in `weight_backward`."""
        flight = self.flights[microbatch]
        outputs, grads = _roots_of(flight, output_grads)
        inputs = flight.inputs
        if not outputs:
            flight.inputs, flight.outputs, flight.loss = [], [], None
            if weights:
                self.flights.pop(microbatch)
            return [None] * len(inputs)
        with self.replica.backward() if self.replica.has_contexts else _NO_CONTEXT:
            if weights or self.dw_builder is not None:
                input_grads = full_backward(outputs, grads, inputs)
                flight.pending = None if self.dw_builder is None else self.dw_builder()
            else:
                input_grads, flight.pending = input_backward(outputs, grads, inputs, self.weights)
        flight.inputs, flight.outputs, flight.result, flight.loss = [], [], None, None
        if weights and flight.pending is None:
            del self.flights[microbatch]
        elif weights:
            self.weight_backward(microbatch)
        return list(input_grads)

    def weight_backward(self, microbatch: int) -> None:
        """Compute the gradients of the parameters that a backward for the inputs has left."""
        pending = self.flights.pop(microbatch).pending
        if pending is None:
            return
        with self.replica.weight_backward():
            if isinstance(pending, PendingWeights):
                weight_backward(pending)
            else:
                pending()

    def mesh_for(self, key: MeshKey) -> Any:
        """Return the mesh of this rank for a DTensor from another stage."""
        return self.meshes.find(key, self.submod)

    def clear(self) -> None:
        """Forget every microbatch in flight."""
        self.flights.clear()


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
    variants: CallVariants | None = None,
) -> PipelineStage:
    """Make a stage of a traced model, from its module and the PipeInfo; `variants` are those of its pipe."""
    total = pipe_info.num_stages
    return PipelineStage(stage_module, stage_index, total, device, group=group, pipe_info=pipe_info, variants=variants)


def is_initialized() -> bool:
    """Return True if torch.distributed has been set up in this process."""
    return dist.is_available() and dist.is_initialized()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.requires_grad and value.is_leaf else value


def _roots_of(
    flight: Flight, output_grads: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the tensors at which the backward starts, the loss or outputs with a gradient, and their gradients."""
    if flight.loss is not None:
        return ([flight.loss], [output_grads[0]]) if flight.loss.requires_grad else ([], [])
    outputs: list[Tensor] = []
    grads: list[Tensor | None] = []
    for output, grad in zip(flight.outputs, output_grads, strict=True):
        if grad is not None and output.requires_grad:
            outputs.append(output)
            grads.append(grad)
    return outputs, grads


@dataclass(frozen=True)
class Item:
    """One value of a parcel: its name, its spec, and its place on the sending stage."""

    name: str
    spec: TensorSpec
    output: int | None  # the place among the sending stage's outputs
    root: int | None  # or the model input that it is


@dataclass(frozen=True)
class _Ports:
    """The parcels of a traced stage. A parcel is all that one stage sends to another for one microbatch.

    `arguments` has, for each argument of the forward, the stage whose parcel it comes with and its place there; for an
    input of the model on the first stage, None and the number of the input.
    """

    arguments: tuple[tuple[int | None, int], ...]
    incoming: Mapping[int, tuple[Item, ...]]
    outgoing: Mapping[int, tuple[Item, ...]]
    outputs: int
    argument_of: Mapping[int, tuple[int, ...]]  # for each stage's parcel, the arguments that its values are


def _ports_of(info: PipeInfo, stage: int) -> _Ports:
    """Return the ports of one stage of a pipe."""
    incoming = {
        source: _items(info, source, stage) for source in sorted({e.source for e in info.edges if e.target == stage})
    }
    outgoing = {
        target: _items(info, stage, target) for target in sorted({e.target for e in info.edges if e.source == stage})
    }
    places = {
        edge.value: (source, place) for source in incoming for place, edge in enumerate(_edges(info, source, stage))
    }
    arguments = tuple(places.get(value, (None, value)) for value in info.stages[stage].inputs)
    argument_of = {
        source: tuple(arguments.index((source, place)) for place in range(len(parcel)))
        for source, parcel in incoming.items()
    }
    return _Ports(arguments, incoming, outgoing, len(info.stages[stage].outputs), argument_of)


def _edges(info: PipeInfo, source: int, target: int) -> list[Edge]:
    return sorted(
        (edge for edge in info.edges if (edge.source, edge.target) == (source, target)), key=lambda edge: edge.value
    )


def _items(info: PipeInfo, source: int, target: int) -> tuple[Item, ...]:
    outputs = info.stages[source].outputs
    return tuple(
        Item(
            edge.name,
            edge.spec,
            None if edge.kind == "root input" else outputs.index(edge.value),
            edge.value if edge.kind == "root input" else None,
        )
        for edge in _edges(info, source, target)
    )


def _sample_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor apart from its number of samples."""
    return tuple(tensor.shape[1:]), tensor.dtype, placement_of(MeshLayout.of(tensor))
