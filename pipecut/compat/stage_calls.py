"""Stages with the methods and attributes of torch.distributed.pipelining: one microbatch at a time, by its names.

While a schedule runs a step, the calls go to its executor, which keeps values and gradients and sends them. Outside of
a step a stage runs them by itself, on what `set_local_fwd_input` and `set_local_bwd_input` give it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..stage import Flight, PipelineStage, check_has_memory, is_initialized, names_without_memory
from .unsupported import (
    STAGE_REPLACED,
    FirstStep,
    GradientsInTransit,
    ReplacedAttributes,
    StageCallError,
    are_same,
    check_declared,
    check_same_factor,
)

if TYPE_CHECKING:
    from .steps import StageDriver


class UpstreamStage(PipelineStage, ReplacedAttributes):
    """A stage that also has upstream's methods and attributes; upstream calls a microbatch a chunk."""

    driver: StageDriver | None = None  # while a step runs
    stage_before: weakref.ref[UpstreamStage] | None = None  # if the schedule has it in this process
    has_backward = False
    _awaits_memory = False
    _runtime_validate = False  # True: shapes and dtypes are those declared and those of the first step, samples too
    _replaced = STAGE_REPLACED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.output_chunks: list[Any] = []
        self._first_step = FirstStep(self.stage_index)
        self.chunks: int | None = None  # microbatches of the last step
        self.log_prefix = f"[Stage {self.stage_index}]"
        self.stage_index_to_group_rank = {index: index % self.group_size for index in range(self.num_stages)}
        self._local_inputs: dict[int, tuple[Any, ...]] = {}
        self._local_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._given_back: dict[int, tuple[Tensor | None, ...]] = {}
        self._held_back: dict[int, list[tuple[Tensor, Tensor | None]]] = {}  # gradients of parameters, by microbatch

    # Methods that the executor calls.

    def _place_module(self) -> None:
        """Leave a module on the meta device as it is: frameworks make the schedule first, and then give it memory."""
        self._awaits_memory = self.device.type != "meta" and bool(names_without_memory(self.submod))
        if not self._awaits_memory:
            super()._place_module()

    def begin_step(self, *, splits_backward: bool = True) -> None:
        """Collect the trainable parameters; by the first step they have memory, and nothing was kept of them before."""
        if self._awaits_memory:
            check_has_memory(self.submod, self.stage_index, self.device)
            self._awaits_memory = False
        super().begin_step(splits_backward=splits_backward)

    def forward(self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool) -> Flight:
        """Run the module on one microbatch; with `_runtime_validate` its inputs and outputs are as declared."""
        if not self._runtime_validate:
            return super().forward(microbatch, args, kwargs, training=training)
        self.check_inputs(microbatch, args, kwargs)
        self._first_step.check("forward keyword inputs", microbatch, dict(kwargs))
        flight = super().forward(microbatch, args, kwargs, training=training)
        result = flight.result if self.is_last else flight.outputs
        if self.output_args is not None:
            check_declared(self.stage_index, "output_args", self.output_args, result, in_part=False)
        self._first_step.check("forward outputs", microbatch, result)
        return flight

    def check_inputs(self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """With `_runtime_validate`, raise unless arguments are as `input_args` and the first step declare them."""
        if self._runtime_validate:
            if self.input_args is not None:
                check_declared(self.stage_index, "input_args", self.input_args, list(args), in_part=bool(kwargs))
            self._first_step.check("forward inputs", microbatch, list(args))

    def backward(self, microbatch: int, output_grads: Sequence[Tensor | None], *, weights: bool) -> list[Tensor | None]:
        """Return the gradients of the inputs; with `_runtime_validate` all gradients are as in the first step."""
        if not self._runtime_validate:
            return super().backward(microbatch, output_grads, weights=weights)
        self._first_step.check("backward output_grads", microbatch, list(output_grads))
        grads = super().backward(microbatch, output_grads, weights=weights)
        self._first_step.check("backward input_grads", microbatch, grads)
        return grads

    def select_output(self, result: Any) -> Any:
        """Return the tensors of a result, if the stage is one of a pipe of `compat.pipeline()`."""
        flat = getattr(self.pipe_info, "flat_output", None)
        return result if flat is None else flat.select(result)

    def clear(self) -> None:
        """Forget every microbatch in flight."""
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Forget every microbatch in flight, and the outputs of the last step."""
        super().clear()
        self._held_back.clear()
        self.output_chunks = []

    # Attributes.

    @property
    def _has_backward(self) -> bool:
        return self.has_backward

    @_has_backward.setter
    def _has_backward(self, value: bool) -> None:
        self.has_backward = value

    # A stage that does not call our __init__ says by itself where it is.

    @property
    def group_rank(self) -> int:
        """The rank of this process in the group; 0 without torch.distributed."""
        given: int | None = self.__dict__.get("group_rank")
        return given if given is not None else dist.get_rank(self.group) if is_initialized() else 0

    @group_rank.setter
    def group_rank(self, rank: int) -> None:
        self.__dict__["group_rank"] = rank

    @property
    def group_size(self) -> int:
        """The size of the group; 1 without torch.distributed."""
        given: int | None = self.__dict__.get("group_size")
        return given if given is not None else dist.get_world_size(self.group) if is_initialized() else 1

    @group_size.setter
    def group_size(self, size: int) -> None:
        self.__dict__["group_size"] = size

    @property
    def fwd_cache(self) -> Mapping[int, Flight]:
        """The microbatches in flight; none after a step."""
        return self.flights

    @property
    def bwd_cache(self) -> Mapping[int, tuple[Tensor | None, ...]]:
        """The gradients of inputs that nobody has fetched yet, by microbatch; none in a step of a schedule."""
        return self._given_back

    @property
    def dw_runner(self) -> Mapping[int, Any]:
        """The pending weight gradients of microbatches whose backward was for the inputs only."""
        return {number: flight.pending for number, flight in self.flights.items() if flight.pending is not None}

    # One microbatch at a time.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a microbatch: on `args` for the first stage, on what arrived for it for others."""
        if self.driver is not None:
            self._check_same_arguments(self.driver, fwd_chunk_id, args, kwargs)
            return self.driver.forward(self, fwd_chunk_id)
        if not self.is_first:
            if fwd_chunk_id not in self._local_inputs:
                raise StageCallError(
                    f"stage {self.stage_index} has no input for microbatch {fwd_chunk_id}: give it what the stage "
                    "before returned, by set_local_fwd_input(), or let a schedule run the stages"
                )
            args = self._local_inputs.pop(fwd_chunk_id)
        inputs = [_leaf(value, value.requires_grad) if isinstance(value, Tensor) else value for value in args]
        training = torch.is_grad_enabled()
        flight = self.forward(fwd_chunk_id, inputs, kwargs or {}, training=training)
        if self.is_last and save_forward_output:
            self.output_chunks.append(self.returned(flight))
        return self.returned(flight)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the backward of a microbatch: from its loss on the last stage, from what arrived for it on others."""
        if self.driver is not None:
            self._check_same_loss(self.driver, bwd_chunk_id, loss)
            self.driver.backward(self, bwd_chunk_id, weights=full_backward)
            return
        if bwd_chunk_id not in self.flights:
            raise StageCallError(
                f"stage {self.stage_index} has no microbatch {bwd_chunk_id} in flight: call forward_one_chunk() "
                "before backward_one_chunk()"
            )
        grads: Sequence[Tensor | None] = self._local_gradients.pop(bwd_chunk_id, ())
        flight = self.flights[bwd_chunk_id]
        if self.is_last and loss is not None:
            flight.loss, grads = loss, [torch.ones_like(loss)]
        elif len(grads) != len(flight.outputs) or self.is_last:
            wanted = "its loss" if self.is_last else "the gradients of its outputs, by set_local_bwd_input()"
            raise StageCallError(
                f"backward_one_chunk() of stage {self.stage_index}, microbatch {bwd_chunk_id}, needs {wanted}"
            )
        backward = self.backward if full_backward else self._backward_for_inputs
        self._given_back[bwd_chunk_id] = tuple(backward(bwd_chunk_id, grads, weights=full_backward))
        if last_backward and full_backward:
            self.replica.reduce_gradients()

    def _backward_for_inputs(
        self, microbatch: int, output_grads: Sequence[Tensor | None], *, weights: bool
    ) -> list[Tensor | None]:
        """Run a backward for the inputs, and hold back what it has made of the weight gradients already.

        That of a small stage makes all of them, and who calls it by hand may look at `.grad` before the second part.
        """
        before = [(parameter, parameter.grad) for parameter in self.submod.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            return self.backward(microbatch, output_grads, weights=weights)
        finally:
            self._held_back[microbatch] = [(parameter, parameter.grad) for parameter, _ in before]
            for parameter, grad in before:
                parameter.grad = grad

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the part of a microbatch's backward that `backward_one_chunk(full_backward=False)` left."""
        if self.driver is not None:
            self.driver.weight_backward(self, bwd_chunk_id)
            return
        flight = self.flights.get(bwd_chunk_id)
        if flight is None or flight.inputs or flight.outputs or flight.loss is not None:
            raise StageCallError(
                f"stage {self.stage_index}: backward_weight_one_chunk({bwd_chunk_id}) without "
                "backward_one_chunk(full_backward=False) of that microbatch before it"
            )
        for parameter, grad in self._held_back.pop(bwd_chunk_id, ()):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.weight_backward(bwd_chunk_id)
        if last_backward:
            self.replica.reduce_gradients()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Hand over what the stage before returned. In a step of a schedule that is done already."""
        if self.is_first:
            raise StageCallError("set_local_fwd_input() is for stages after the first, whose input is the model's")
        if self.driver is not None:
            self._check_same_input(prev_stage_outputs, mb_index)
        else:
            values = prev_stage_outputs if isinstance(prev_stage_outputs, tuple | list) else (prev_stage_outputs,)
            self._local_inputs[mb_index] = tuple(
                _leaf(value, value.requires_grad) if isinstance(value, Tensor) else value for value in values
            )

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of a microbatch's inputs, once. In a step they are already in transit."""
        if self.is_first:
            raise StageCallError("get_local_bwd_output() is for stages after the first, which has nobody to give to")
        if self.driver is not None:
            return GradientsInTransit()
        if mb_index not in self._given_back:
            raise StageCallError(
                f"stage {self.stage_index} has no gradients for microbatch {mb_index}: call backward_one_chunk() first"
            )
        return self._given_back.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Hand over the gradients of the outputs of a microbatch. In a step of a schedule that is done already."""
        if self.is_last:
            raise StageCallError("set_local_bwd_input() is for stages before the last, which begins with its loss")
        if self.driver is None:
            self._local_gradients[mb_index] = tuple(next_stage_bwd_outputs)
        elif len(next_stage_bwd_outputs):
            raise StageCallError(
                f"set_local_bwd_input() of stage {self.stage_index}, microbatch {mb_index}, got gradients, and in a "
                "step those that the stage after made are used: pass what its get_local_bwd_output() returned, and put "
                "a hook on a tensor to change its gradient"
            )

    # Arguments of a step.

    def check_same_output(self, microbatch: int, output: Any) -> None:
        """Raise if, in a step, a loss is asked of another output than the forward returned."""
        if self.driver is not None and self.driver.batch.results.get(microbatch) is not output:
            raise StageCallError(
                f"_maybe_compute_loss() of stage {self.stage_index}, microbatch {microbatch}, "
                "got another output than forward_one_chunk() returned, and its loss is made already: change the output "
                "in the module's forward, or in loss_fn"
            )

    def check_same_targets(self, microbatch: int, targets: Sequence[Any] | None) -> None:
        """Raise if, in a step, a loss is asked of other targets than those of the step."""
        held = None if self.driver is None else self.driver.batch.targets
        if self.driver is None or targets is None or targets is held:
            return
        if held is None or not are_same(targets[microbatch], held[microbatch]):
            raise StageCallError(
                f"_maybe_compute_loss() of stage {self.stage_index}, microbatch {microbatch}, "
                "got another target than the step has, and its loss is made already: pass context.target_mbs, and "
                "change targets before step(), or in loss_fn"
            )

    def _check_same_arguments(self, driver: StageDriver, microbatch: int, args: Any, kwargs: Any) -> None:
        batch = driver.batch
        own_args = tuple(batch.args[microbatch]) if batch.args else ()
        own_kwargs = dict(batch.kwargs[microbatch]) if batch.kwargs else {}
        # Positional arguments are read by the first stage only; keywords by every one that was cut by hand.
        wrong = "args" if self.is_first and not are_same(tuple(args), own_args) else ""
        if not wrong and (self.is_first or self.ports is None) and not are_same(dict(kwargs or {}), own_kwargs):
            wrong = "kwargs"
        if wrong:
            raise StageCallError(
                f"forward_one_chunk() of stage {self.stage_index}, microbatch {microbatch}, got other {wrong} than "
                f"the microbatch has, which the executor passes to the module: pass context.{wrong[:-1]}_mbs"
                f"[{microbatch}], and change inputs before step(), or in the module's forward"
            )

    def _check_same_loss(self, driver: StageDriver, microbatch: int, loss: Tensor | None) -> None:
        flight = self.flights.get(microbatch)
        if loss is None or not self.is_last or flight is None:
            return
        if loss is not flight.loss and loss is not driver.batch.losses.get(microbatch):
            raise StageCallError(
                f"backward_one_chunk() of stage {self.stage_index}, microbatch {microbatch}, got another loss than "
                "the one its backward begins with: pass what schedule._maybe_get_loss() returned, and change the loss "
                "in loss_fn"
            )

    def _check_same_input(self, values: Any, microbatch: int) -> None:
        before = None if self.stage_before is None else self.stage_before()
        flight = None if before is None else before.flights.get(microbatch)
        held = None if before is None or flight is None else before.returned(flight)
        wanted = held if isinstance(held, tuple) else (held,)
        given = tuple(values) if isinstance(values, tuple | list) else (values,)
        if len(given) != len(wanted) or any(one is not other for one, other in zip(given, wanted, strict=True)):
            raise StageCallError(
                f"set_local_fwd_input() of stage {self.stage_index}, microbatch {microbatch}, got other values than "
                f"forward_one_chunk() of stage {self.stage_index - 1} returned here, and in a step those are used: "
                "pass what it returned, and change it in a module's forward"
            )

    def scale_grads(self, grad_scale_factor: float) -> None:
        """Divide the gradients of the parameters. In a step of a schedule they are as scale_grads= says already."""
        if self.driver is not None:
            check_same_factor("scale_grads", grad_scale_factor, self.driver.grad_scale_factor)
            return
        for parameter in self.submod.parameters():
            if parameter.grad is not None and grad_scale_factor != 1:
                parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: float) -> None:
        """Average the gradients over the copies of the stage, and divide them, as `scale_grads` does."""
        if self.driver is not None:
            check_same_factor("perform_reduce_grad", grad_scale_factor, self.driver.grad_scale_factor)
        self.replica.reduce_gradients()
        self.scale_grads(grad_scale_factor)

    def returned(self, flight: Flight) -> Any:
        """Return the result of the module for a microbatch, or an equivalent."""
        if self.is_last:
            return self.select_output(flight.result)
        return flight.outputs[0] if len(flight.outputs) == 1 else tuple(flight.outputs)


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)
