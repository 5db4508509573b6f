"""What schedules written for torch.distributed.pipelining ask of their base: an order of actions set from outside."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from torch import Tensor

from ..errors import InputError
from ..schedule import Op, Placement, Plan, add_reduce_grad, add_transfers, load_csv, save_csv
from ..schedule.peer_action import PeerAction, PeerOrder, order_as_peer, order_from_peer
from ..schedule.peer_passes import (
    Order,
    defer_recv_ops,
    plan_of,
    reduce_grad,
    simulate,
    unshard_reshard,
    validate_schedule,
)
from ..stage import NOT_CALLED as STAGE_NOT_CALLED
from ..stage import ReplacedAttributes, refuse_overrides
from .connection import is_complete
from .fixed_attribute import FixedAttribute
from .not_called import NOT_CALLED, NOT_CALLED_WITH_A_NAME

if TYPE_CHECKING:
    from ..stage import PipelineStage
    from .executor import Executor


Format = Literal["compute_only", "compute_comms"]


class FormatError(InputError, NotImplementedError):
    """An order in a form that is not known. It is a NotImplementedError too, as with the peer."""


class MissingOrderError(InputError, AttributeError):
    """There is no order of actions yet. It is an AttributeError too, as with the peer."""


_READY = "stages are ready when they are made"
_REPLACED = {
    **NOT_CALLED,
    **NOT_CALLED_WITH_A_NAME,
    "_comp_type_to_function_map": "call register_custom_function()",
    **dict.fromkeys(("_stage_initialized", "_stages_initialized", "_stage_forward_initialized"), _READY),
    **dict.fromkeys(("_stages_forward_initialized", "_stages_backward_initialized"), _READY),
    "_should_compute_loss": "the loss is made along with the output of the last stage",
    "_backward_requires_autograd": "register a custom function for backwards of your own",
}
_MADE_WITH = "make a schedule with {}"
_NO_ORDER = "{} has no order of actions yet: set pipeline_order"


class PeerSurface(ReplacedAttributes):
    """The attributes and methods of a schedule under the peer's names.

    `pipeline_order` and `pipeline_order_with_comms` are those of the plan until they are set; what is set becomes the
    plan. The lists of a dict that was set are read when the order is validated or prepared, or else by the first step.
    """

    stages: list[PipelineStage]
    n_microbatches: int
    plan: Plan
    use_full_backward = True
    schedule_name: ClassVar[str] = ""  # of schedules whose plan follows from it
    _replaced = _REPLACED

    def _begin_surface(self) -> None:
        first = self.stages[0]
        self.pp_group_size = first.group_size
        self.rank = first.group_rank
        self._num_stages = first.num_stages
        self._order: PeerOrder | None = None  # as it was set
        self._order_with_comms: PeerOrder | None = None
        self._order_is_read = True
        self.backward_counter = Counter[int]()  # backwards of each stage in a step; a custom function counts its own
        self._defer_pp_recv = False
        # Nothing here reads these; schedules that derive from ours may, or set them.
        self.n_local_stages = len(self.stages)
        self.number_of_rounds = max(1, self.n_microbatches // max(1, self.pp_group_size))
        self.microbatches_per_round = self.n_microbatches // self.number_of_rounds
        refuse_overrides(self, NOT_CALLED | (NOT_CALLED_WITH_A_NAME if self.schedule_name else {}))
        self._meet_stages()
        if self._num_stages >= self.pp_group_size:
            self._set_ranks({index: index % self.pp_group_size for index in range(self._num_stages)})

    def _meet_stages(self) -> None:
        complete = {stage.stage_index: stage for stage in self.stages if is_complete(stage)}
        for index, stage in complete.items():
            refuse_overrides(stage, STAGE_NOT_CALLED)
            stage.stage_before = weakref.ref(complete[index - 1]) if index - 1 in complete else None

    # ------------------------------------------------------------------ the order of actions

    @property
    def pipeline_order(self) -> PeerOrder:
        """The computations of every rank."""
        if self._order is None:
            own = getattr(self, "plan", None)
            self_is_single = own is not None and own.placement.stages == own.ranks and self._reduces_at_end()
            if own is None:
                return {}
            return order_as_peer((add_reduce_grad(own) if self_is_single else own).actions)
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: PeerOrder) -> None:
        self._order, self._order_with_comms, self._order_is_read = order, None, False

    def _get_pipeline_order(self) -> PeerOrder | None:
        return self.pipeline_order

    @property
    def pipeline_order_with_comms(self) -> PeerOrder:
        """The actions of every rank, messages and sharding included."""
        if self._order_with_comms is None:
            self._order_with_comms = self._lowered(self.pipeline_order)
            self._comms_are_own = True
        return self._order_with_comms

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: PeerOrder) -> None:
        self._order_with_comms, self._order_is_read = order, False
        self._comms_are_own = False

    _comms_are_own = True  # made from the computations, as an executor makes them too

    def _reduces_at_end(self) -> bool:
        """Whether the peer shows the reduction of gradients in the order of this schedule."""
        return False

    def _lowered(self, order: Order) -> PeerOrder:
        if not order:
            # Not the kind that is an AttributeError: of one raised in a property Python would forget the message.
            raise InputError(_NO_ORDER.format(type(self).__name__))
        sharded = {rank: unshard_reshard(row) for rank, row in _computations(order).items()}
        reduced = {rank: reduce_grad(row, self.n_microbatches) for rank, row in sharded.items()}
        plan = plan_of(reduced, self._rank_of, self._num_stages)
        own = getattr(self, "plan", None)
        if own is not None and self._order is None:
            plan = plan.with_dataflow(own.dataflow)  # skips and inputs of the model, which the peer has none of
        made = order_as_peer(add_transfers(plan, complete=False).actions)
        return defer_recv_ops(made, self._rank_of) if self._defer_pp_recv else made

    def _rank_of(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def _set_ranks(self, rank_of: dict[int, int]) -> None:
        self.stage_index_to_group_rank = rank_of
        for stage in self.stages:
            stage.stage_index_to_group_rank = rank_of

    def _validate_and_set_stage_mapping(self, actions: Order) -> None:
        """Prove the order complete and in order; the rank of a stage is the one that computes it."""
        if len(self.stages) == self._num_stages and self.pp_group_size == 1:
            self.pp_group_size = len(actions)  # all ranks are in this process
        self._set_ranks(
            validate_schedule(_computations(actions), self.pp_group_size, self._num_stages, self.n_microbatches)
        )

    def _prepare_schedule_with_comms(self, actions: Order, format: Format = "compute_only") -> None:
        """Set what is run: computations, to which messages are added, or all actions."""
        _check_format(format)
        if format == "compute_comms":
            self.pipeline_order_with_comms = {rank: list(row) for rank, row in actions.items()}
            return
        self._validate_and_set_stage_mapping(actions)
        if actions is not self._order:
            self.pipeline_order = {rank: list(row) for rank, row in actions.items()}
        self._order_with_comms = None

    def _load_csv(self, filename: str | PathLike[str], format: Format = "compute_only") -> None:
        """Take the order of a CSV file, one line a rank."""
        _check_format(format)
        self._prepare_schedule_with_comms(order_as_peer(load_csv(filename, ragged=True)), format)

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_comms") -> None:
        """Write the order to a CSV file, one line a rank."""
        orders = {"compute_only": lambda: self.pipeline_order, "compute_comms": lambda: self.pipeline_order_with_comms}
        _check_format(format)
        self._refuse_missing_order(format)
        rows = order_from_peer(orders[format]())
        placement = Placement(tuple(map(self._rank_of, range(self._num_stages))))
        save_csv(Plan.from_actions(rows, placement=placement, microbatches=self.n_microbatches), filename)

    def _simulate(self) -> PeerOrder:
        """The order with messages, and a None for every step in which a rank waits."""
        self._refuse_missing_order("compute_comms")
        kept = {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD, Op.REDUCE_TIES}
        order = {
            rank: [action for action in row if action is not None and action.computation_type not in kept]
            for rank, row in self.pipeline_order_with_comms.items()
        }
        return simulate(order, self._rank_of, self._num_stages)

    def _refuse_missing_order(self, format: Format) -> None:
        if not self.pipeline_order and not (format == "compute_comms" and self._order_with_comms):
            raise MissingOrderError(_NO_ORDER.format(type(self).__name__))

    def _set_plan(self) -> Plan | None:
        """The plan that was set since it was last asked for."""
        if self._order_is_read:
            return None
        self._order_is_read = True
        if self._order_with_comms is not None and not self._comms_are_own:
            rows = order_from_peer(self._order_with_comms)
            plan = Plan.from_actions(rows, name=type(self).__name__, microbatches=self.n_microbatches)
            self._set_ranks(dict(enumerate(plan.placement.rank_of)))
            return plan
        if not self._order:
            return None
        return Plan.from_actions(
            order_from_peer(_computations(self._order)), name=type(self).__name__, microbatches=self.n_microbatches
        )

    # ------------------------------------------------------------------ the rest

    _stages = FixedAttribute(lambda made: made.stages, _MADE_WITH.format("those stages"))
    _stage = FixedAttribute(lambda made: made.stages[0], _MADE_WITH.format("that stage"))
    _n_microbatches = FixedAttribute(lambda made: made.n_microbatches, _MADE_WITH.format("n_microbatches="))
    loss_fn = FixedAttribute(lambda made: made._objective.loss_fn, _MADE_WITH.format("loss_fn="))
    _loss_fn = FixedAttribute(lambda made: made.loss_fn, _MADE_WITH.format("loss_fn="))
    # A model with a loss of its own trains without a loss_fn.
    _has_backward = FixedAttribute(
        lambda made: made.loss_fn is not None, _MADE_WITH.format("loss_fn=, or call eval() for forwards only")
    )
    _args_chunk_spec = FixedAttribute(lambda made: made._specs[0], _MADE_WITH.format("args_chunk_spec="))
    _kwargs_chunk_spec = FixedAttribute(lambda made: made._specs[1], _MADE_WITH.format("kwargs_chunk_spec="))
    _output_merge_spec = FixedAttribute(lambda made: made._merge_spec, _MADE_WITH.format("output_merge_spec="))

    _internal_losses = FixedAttribute(lambda made: made._losses_so_far(), "pass losses=, a list, to step()")

    def _losses_so_far(self) -> list[Tensor]:
        """The losses that a step has made while it runs; none after it."""
        executors = [stage.driver for stage in self.stages if is_complete(stage) and stage.is_last]
        return [loss for executor in executors if executor is not None for loss in executor.batch.losses.values()]

    @property
    def _executor(self) -> Executor | None:
        executors = [stage.driver for stage in self.stages if is_complete(stage) and stage.driver is not None]
        return cast("Executor", executors[0]) if executors else None

    @property
    def fwd_recv_ops(self) -> dict[tuple[int, int], list[Any]]:
        """The activations that are on their way to this rank, by stage and microbatch."""
        return {} if self._executor is None else self._executor.mail.on_their_way(forward=True)

    @property
    def bwd_recv_ops(self) -> dict[tuple[int, int], list[Any]]:
        """The gradients that are on their way to this rank, by stage and microbatch."""
        return {} if self._executor is None else self._executor.mail.on_their_way(forward=False)

    def _maybe_compute_loss(
        self,
        stage: PipelineStage,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: Any = None,
    ) -> None:
        """Nothing, but a check: the forward of the last stage has made the loss along with its output."""
        if stage.is_last:
            stage.refuse_another_output(mb_index, output)
            stage.refuse_other_targets(mb_index, target_mbs)

    def _maybe_get_loss(self, stage: PipelineStage, mb_index: int) -> Tensor | None:
        """The loss of a microbatch whose forward is done, on the last stage."""
        flight = stage.flights.get(mb_index) if stage.is_last else None
        return None if flight is None else flight.loss

    def _assert_unsharded(self, stage: PipelineStage) -> None:
        """Nothing: a stage waits for its parameters by itself."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("microbatches are run by step() and eval(): pass the whole batch there")


def _check_format(format: str) -> None:
    if format not in get_args(Format):
        raise FormatError(f"format={format!r} is not known: give 'compute_only' or 'compute_comms'")


def _computations(order: Order) -> dict[int, list[PeerAction | None]]:
    """An order without the reductions that the peer shows in those of schedules with one stage a rank."""
    return {
        rank: [action for action in row if action is None or action.computation_type is not Op.REDUCE_GRAD]
        for rank, row in order.items()
    }
