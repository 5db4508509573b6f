"""Attributes of a stage that code written for torch.distributed.pipelining reads or sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from .not_called import NOT_CALLED
from .replaced_attributes import ReplacedAttributes

if TYPE_CHECKING:
    from .stage import Flight


_TRANSFERS = "what is sent and received is the work of the schedule's executor"
_SHAPES = "shapes follow from the sizes of each step"
_REPLACED = {
    **NOT_CALLED,
    **dict.fromkeys(("args_recv_info", "act_send_info", "grad_recv_info", "grad_send_info"), _TRANSFERS),
    **dict.fromkeys(("_stage_meta", "_user_meta", "inputs_meta", "_outputs_meta", "grads_meta"), _SHAPES),
    **dict.fromkeys(("_inference_mode", "_fwd_outputs_for_bwd_meta"), _SHAPES),
    "_mesh_cache": "a stage finds its meshes by itself, in what it was made with: pass get_mesh= for others",
    "backward_state": "what a backward has left is in stage.flights[microbatch].pending",
}


class PeerAttributes(ReplacedAttributes):
    """The attributes of a stage under the peer's names."""

    flights: dict[int, Flight]
    group: dist.ProcessGroup | None
    has_backward = False
    _given_back: dict[int, tuple[Tensor | None, ...]]
    _replaced = _REPLACED

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
        """What computes the weights' gradients of microbatches, of those whose backward was for the inputs only."""
        return {number: flight.pending for number, flight in self.flights.items() if flight.pending is not None}

    # The peer prepares buffers here. Ours follow from the sizes of each step, so there is nothing to prepare.

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None


def is_initialized() -> bool:
    """Whether torch.distributed has been set up in this process."""
    return dist.is_available() and dist.is_initialized()
