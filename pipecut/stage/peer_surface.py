"""What code written for torch.distributed.pipelining asks of a stage: one microbatch at a time, by its names.

While a schedule runs a step, the calls go to its executor, which keeps values and gradients and sends them. Outside of
a step a stage does them by itself, with what `set_local_fwd_input` and `set_local_bwd_input` give it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PipeError
from ..pipe_ir.structure import flatten
from .replaced_attributes import ReplacedAttributes

if TYPE_CHECKING:
    from .stage import Flight, PipelineStage


class StageCallError(PipeError, AssertionError):
    """A call of a stage is not in order. It is an AssertionError too, which code written for the peer expects."""


class Driver(Protocol):
    """Who runs a stage during a step."""

    def forward_one(self, stage: int, microbatch: int) -> Any:
        """Run a forward, and return what the module returned."""

    def backward_one(self, stage: int, microbatch: int, *, weights: bool) -> None:
        """Run a backward, in full or for the inputs only."""

    def weight_one(self, stage: int, microbatch: int) -> None:
        """Run the rest of a backward."""


class StageMetadataError(PipeError, RuntimeError):
    """Tensors are not what was said of them."""


_TRANSFERS = "what is sent and received is the work of the schedule's executor"
_SHAPES = "shapes follow from the sizes of each step"
_REPLACED = {
    **dict.fromkeys(("args_recv_info", "act_send_info", "grad_recv_info", "grad_send_info"), _TRANSFERS),
    **dict.fromkeys(("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"), _TRANSFERS),
    **dict.fromkeys(("_stage_meta", "inputs_meta", "get_outputs_meta", "_configure_outputs_meta"), _SHAPES),
    "backward_state": "what a backward has left is in stage.flights[microbatch].pending",
}


class OneChunkCalls(ReplacedAttributes):
    """The methods and attributes of a stage under the peer's names; a chunk is a microbatch."""

    flights: dict[int, Flight]
    group: dist.ProcessGroup | None
    driver: Driver | None = None  # while a step runs
    has_backward = False
    _runtime_validate = False  # True: the number of samples has to be that of input_args too; the rest always is
    _replaced = _REPLACED

    def _begin_calls(self) -> None:
        self.output_chunks: list[Any] = []
        self._local_inputs: dict[int, tuple[Any, ...]] = {}
        self._local_gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self._given_back: dict[int, tuple[Tensor | None, ...]] = {}
        own = cast("PipelineStage", self)
        self.chunks: int | None = None  # microbatches of the last step
        self.log_prefix = f"[Stage {own.stage_index}]"
        self.stage_index_to_group_rank = {index: index % self.group_size for index in range(own.num_stages)}

    @property
    def _has_backward(self) -> bool:
        return self.has_backward

    @_has_backward.setter
    def _has_backward(self, value: bool) -> None:
        self.has_backward = value

    @property
    def group_rank(self) -> int:
        """The rank of this process in the group; 0 without torch.distributed."""
        given: int | None = self.__dict__.get("group_rank")
        return given if given is not None else dist.get_rank(self.group) if _is_distributed() else 0

    @group_rank.setter
    def group_rank(self, rank: int) -> None:
        self.__dict__["group_rank"] = rank

    @property
    def group_size(self) -> int:
        """The size of the group; 1 without torch.distributed."""
        given: int | None = self.__dict__.get("group_size")
        return given if given is not None else dist.get_world_size(self.group) if _is_distributed() else 1

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
        """What computes the weights' gradients of microbatches, of those whose backward was for the inputs only."""
        return {number: flight.pending for number, flight in self.flights.items() if flight.pending is not None}

    def validate_tensors(self, what: str, declared: Any, got: Any, *, in_part: bool = False) -> None:
        """If `_runtime_validate` was set, tensors have all sizes, and the dtypes, of those that were declared.

        With `in_part` the last of them may be elsewhere, passed by keyword.
        """
        if not self._runtime_validate or declared is None:
            return
        expected, found = _described(declared), _described(got)
        if found != (expected[: len(found)] if in_part else expected):
            raise StageMetadataError(
                f"stage {cast('PipelineStage', self).stage_index} was made with {what} {', '.join(expected)}, and has "
                f"{', '.join(found) or 'none'} in a microbatch, which _runtime_validate=True forbids: declare what is "
                "passed, or leave it False, with which the number of samples may be another"
            )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward of a microbatch: on `args` for the first stage, on what arrived for it for others."""
        stage = cast("PipelineStage", self)
        if self.driver is not None:
            return self.driver.forward_one(stage.stage_index, fwd_chunk_id)
        if not stage.is_first:
            if fwd_chunk_id not in self._local_inputs:
                raise StageCallError(
                    f"stage {stage.stage_index} has no input for microbatch {fwd_chunk_id}: give it what the stage "
                    "before returned, by set_local_fwd_input(), or let a schedule run the stages"
                )
            args = self._local_inputs.pop(fwd_chunk_id)
        inputs = [_leaf(value, value.requires_grad) if isinstance(value, Tensor) else value for value in args]
        training = torch.is_grad_enabled()
        flight = stage.forward(fwd_chunk_id, inputs, kwargs or {}, training=training)
        if stage.is_last and save_forward_output:
            self.output_chunks.append(flight.result)
        return returned(stage, flight)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward of a microbatch: from its loss on the last stage, from what arrived for it on others."""
        stage = cast("PipelineStage", self)
        if self.driver is not None:
            self.driver.backward_one(stage.stage_index, bwd_chunk_id, weights=full_backward)
            return
        if bwd_chunk_id not in self.flights:
            raise StageCallError(
                f"stage {stage.stage_index} has no microbatch {bwd_chunk_id} in flight: call forward_one_chunk() "
                "before backward_one_chunk()"
            )
        grads: Sequence[Tensor | None] = self._local_gradients.pop(bwd_chunk_id, ())
        flight = self.flights[bwd_chunk_id]
        if stage.is_last and loss is not None:
            flight.loss, grads = loss, [torch.ones_like(loss)]
        elif len(grads) != len(flight.outputs) or stage.is_last:
            wanted = "its loss" if stage.is_last else "the gradients of its outputs, by set_local_bwd_input()"
            raise StageCallError(
                f"backward_one_chunk() of stage {stage.stage_index}, microbatch {bwd_chunk_id}, needs {wanted}"
            )
        self._given_back[bwd_chunk_id] = tuple(stage.backward(bwd_chunk_id, grads, weights=full_backward))
        if last_backward and full_backward:
            stage.replica.reduce_gradients()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part of a microbatch's backward that `backward_one_chunk(full_backward=False)` left."""
        stage = cast("PipelineStage", self)
        if self.driver is not None:
            self.driver.weight_one(stage.stage_index, bwd_chunk_id)
            return
        flight = self.flights.get(bwd_chunk_id)
        if flight is None or flight.inputs or flight.outputs or flight.loss is not None:
            raise StageCallError(
                f"stage {stage.stage_index}: backward_weight_one_chunk({bwd_chunk_id}) without "
                "backward_one_chunk(full_backward=False) of that microbatch before it"
            )
        stage.weight_backward(bwd_chunk_id)
        if last_backward:
            stage.replica.reduce_gradients()

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Hand over what the stage before returned. In a step of a schedule that is done already."""
        stage = cast("PipelineStage", self)
        if stage.is_first:
            raise StageCallError("set_local_fwd_input() is for stages after the first, whose input is the model's")
        if self.driver is None:
            values = prev_stage_outputs if isinstance(prev_stage_outputs, tuple | list) else (prev_stage_outputs,)
            self._local_inputs[mb_index] = tuple(
                _leaf(value, value.requires_grad) if isinstance(value, Tensor) else value for value in values
            )

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs of a microbatch, once. In a step of a schedule they are on their way already."""
        stage = cast("PipelineStage", self)
        if stage.is_first:
            raise StageCallError("get_local_bwd_output() is for stages after the first, which has nobody to give to")
        if self.driver is not None:
            return ()
        if mb_index not in self._given_back:
            raise StageCallError(
                f"stage {stage.stage_index} has no gradients for microbatch {mb_index}: call backward_one_chunk() first"
            )
        return self._given_back.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Hand over the gradients of the outputs of a microbatch. In a step of a schedule that is done already."""
        stage = cast("PipelineStage", self)
        if stage.is_last:
            raise StageCallError("set_local_bwd_input() is for stages before the last, which begins with its loss")
        if self.driver is None:
            self._local_gradients[mb_index] = tuple(next_stage_bwd_outputs)

    def scale_grads(self, grad_scale_factor: float) -> None:
        """Divide the gradients of the parameters."""
        for parameter in cast("PipelineStage", self).submod.parameters():
            if parameter.grad is not None and grad_scale_factor != 1:
                parameter.grad.div_(grad_scale_factor)

    def perform_reduce_grad(self, grad_scale_factor: float) -> None:
        """Average the gradients over the copies of the stage, and divide them."""
        cast("PipelineStage", self).replica.reduce_gradients()
        self.scale_grads(grad_scale_factor)

    # The peer prepares buffers here. Ours follow from the sizes of each step, so there is nothing to prepare.

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None


def returned(stage: PipelineStage, flight: Flight) -> Any:
    """What the module returned, or as good as that."""
    if stage.is_last:
        return flight.result
    return flight.outputs[0] if len(flight.outputs) == 1 else tuple(flight.outputs)


def _described(values: Any) -> list[str]:
    leaves, _ = flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors]


def _leaf(value: Tensor, requires_grad: bool) -> Tensor:
    return value.detach().requires_grad_(requires_grad)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
