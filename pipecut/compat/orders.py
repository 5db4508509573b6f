"""Schedules with the methods and attributes of torch.distributed.pipelining: an order of actions that can be set."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, get_args

from torch import Tensor

from ..errors import InputError, warn
from ..run import ActionContext, FamilySchedule, InputCutter, StepState, checked_op
from ..schedule import Action, Family, Op, Placement, Plan, add_transfers, load_csv
from ..stage import PipelineStage, TensorChunkSpec, is_initialized
from .actions import (
    Order,
    UpstreamAction,
    UpstreamOrder,
    in_new_notation,
    order_from_upstream,
    order_to_upstream,
    to_upstream,
    validate_schedule,
)
from .microbatch import UpstreamCutter
from .passes import (
    defer_recv_ops,
    reduce_grad,
    send_recv,
    simulate,
    unshard_reshard,
)
from .stage_calls import UpstreamStage
from .steps import StepObserver, context_of
from .unsupported import (
    ORDER_NOT_CALLED,
    SCHEDULE_NOT_CALLED,
    SCHEDULE_REPLACED,
    STAGE_NOT_CALLED,
    FixedAttribute,
    ReplacedAttributes,
    check_no_overrides,
)

Format = Literal["compute_only", "compute_comms"]

_MADE_WITH = "make a schedule with {}"
_NO_ORDER = "{} has no order of actions yet: set pipeline_order"


class FormatError(InputError, NotImplementedError):
    """The format of an order is not known; also a NotImplementedError, as with upstream."""


class MissingOrderError(InputError, AttributeError):
    """There is no order of actions yet; also an AttributeError, as with upstream."""


class UpstreamSchedule(FamilySchedule, ReplacedAttributes):
    """Base class of all schedules.

    `pipeline_order` and `pipeline_order_with_comms` are those of the plan until they are set; what is set becomes the
    plan. The lists of a dict that was set are read when the order is validated or prepared, otherwise by the first
    step.

    Stages that only say where they are, by `num_stages`, `group_size` and `group_rank`, will do to make a schedule and
    look at its order.
    """

    use_full_backward = True
    _runs_fewer_microbatches = False  # upstream raises, and orders of its users name every microbatch
    _replaced = SCHEDULE_REPLACED

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._order: UpstreamOrder | None = None  # as it was set
        self._order_with_comms: UpstreamOrder | None = None
        self._order_is_read = True
        self._comms_are_own = True  # made from the computations, as an executor makes them too
        self._defer_pp_recv = False
        self._is_ready = False
        self._losses_to_fill: list[Tensor] | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def _checked_stages(stages: Sequence[PipelineStage]) -> Sequence[PipelineStage]:
        stand_ins = isinstance(stages, Sequence) and any(not isinstance(stage, PipelineStage) for stage in stages)
        return stages if stand_ins and all(map(is_placed, stages)) else FamilySchedule._checked_stages(stages)

    @staticmethod
    def _count_ranks(family: Family, stages: Sequence[PipelineStage]) -> int:
        if all(map(_is_complete, stages)):
            return FamilySchedule._count_ranks(family, stages)
        one_stage_each = family.chunks == 1 and not family.any_chunks
        return stages[0].num_stages if one_stage_each else stages[0].group_size

    def _use(self, plan: Plan) -> None:
        """Begin with the plan of the constructor, and get ready to run it if all of its stages can run."""
        first = self.stages[0]
        self.plan = plan
        self.rank = first.group_rank
        self.pp_group_size = plan.ranks if any(plan.actions) else first.group_size
        self._num_stages = first.num_stages
        self._observer: StepObserver = StepObserver(self)
        # Nothing here reads these; schedules that derive from ours may, or set them.
        self.n_local_stages = len(self.stages)
        self.number_of_rounds = max(1, self.n_microbatches // max(1, first.group_size))
        self.microbatches_per_round = self.n_microbatches // self.number_of_rounds
        check_no_overrides(self, SCHEDULE_NOT_CALLED | (ORDER_NOT_CALLED if self.family else {}))
        self._meet_stages()
        if any(plan.actions):
            self._set_ranks(dict(enumerate(plan.placement.rank_of)))
        elif self._num_stages >= self.pp_group_size:
            self._set_ranks({index: index % self.pp_group_size for index in range(self._num_stages)})
        if any(plan.actions) and all(map(_is_complete, self.stages)) and not _has_unplaced_stages(self.stages):
            self._get_ready(plan)

    def _meet_stages(self) -> None:
        complete = {stage.stage_index: stage for stage in self.stages if _is_complete(stage)}
        for index, stage in complete.items():
            check_no_overrides(stage, STAGE_NOT_CALLED)
            before = complete.get(index - 1)
            if isinstance(stage, UpstreamStage):
                stage.stage_before = weakref.ref(before) if isinstance(before, UpstreamStage) else None

    def _get_ready(self, plan: Plan) -> None:
        for stage in self.stages:
            if not _is_complete(stage):
                raise InputError(
                    f"a {type(stage).__name__} has no module to run: its __init__ must call that of PipelineStage or "
                    "_PipelineStageBase, which take the submodule, stage_index, num_stages and device"
                )
        super()._use(plan)
        self._is_ready = True
        for stage in self.stages:
            if isinstance(stage, UpstreamStage):
                stage.chunks = self.n_microbatches

    def _read_order(self) -> None:
        """Run by the order of actions that was set, if it was since the last step."""
        plan = self._set_plan()
        if plan is None and self._is_ready:
            return
        if plan is None and not any(self.plan.actions) and all(map(_is_complete, self.stages)):
            raise InputError(
                f"{type(self).__name__} has no plan: set pipeline_order to the actions of every rank, or use a "
                "schedule that has one, such as ScheduleInterleaved1F1B, or PlannedSchedule"
            )
        self._get_ready(self.plan if plan is None else plan)

    def step(self, *args: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run one training step; see pipecut.PipelineSchedule.step."""
        return self._called(super().step, args, losses, kwargs)

    def eval(self, *args: Any, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the forwards only, without gradients; see pipecut.PipelineSchedule.eval."""
        return self._called(super().eval, args, losses, kwargs)

    def _called(self, run: Callable[..., Any], args: Any, losses: list[Tensor] | None, kwargs: Any) -> Any:
        self._read_order()
        self._losses_to_fill = losses
        try:
            return run(*args, losses=losses, **kwargs)
        finally:
            self._losses_to_fill = None

    def _check_batch(self, batch: StepState) -> None:
        """Raise if a step cannot be called with this, before its first action."""

    def register_custom_function(self, computation_type: Op | str, custom_function: Callable[[Any, Any], None]) -> None:
        """Let `custom_function(action, context)` run all actions of a kind; `context.run(action)` runs one as usual."""
        reference = weakref.ref(self)  # which holds the function

        def run(action: Action, own: ActionContext) -> None:
            schedule = reference()
            assert schedule is not None  # it is running
            custom_function(to_upstream(action), context_of(schedule, own))

        super().register_custom_function(computation_type, run)
        if checked_op(computation_type) is Op.REDUCE_GRAD and self.scale_grads:
            # Upstream leaves the division to REDUCE_GRAD, and so to a function in its place.
            warn(
                "a custom function for REDUCE_GRAD finds gradients that are those of the mean over the batch already, "
                "for they are scaled where they begin: do not divide them again in it, or make the schedule with "
                "scale_grads=False"
            )

    # The order of actions.

    @property
    def pipeline_order(self) -> UpstreamOrder:
        """The computations of every rank."""
        if self._order is None:
            return order_to_upstream(self._shown_plan().actions) if any(self.plan.actions) else {}
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: UpstreamOrder) -> None:
        self._order, self._order_with_comms, self._order_is_read = order, None, False

    def _get_pipeline_order(self) -> UpstreamOrder | None:
        return self.pipeline_order

    @property
    def pipeline_order_with_comms(self) -> UpstreamOrder:
        """The actions of every rank, messages and sharding included."""
        if self._order_with_comms is None:
            self._order_with_comms = self._lowered(self.pipeline_order)
            self._comms_are_own = True
        return self._order_with_comms

    @pipeline_order_with_comms.setter
    def pipeline_order_with_comms(self, order: UpstreamOrder) -> None:
        self._order_with_comms, self._order_is_read = order, False
        self._comms_are_own = False

    def _shown_plan(self) -> Plan:
        """Return the plan whose actions are `pipeline_order`."""
        return self.plan

    def _lowered(self, order: Order) -> UpstreamOrder:
        if not order:
            # Not the kind that is an AttributeError: of one raised in a property Python would forget the message.
            raise InputError(_NO_ORDER.format(type(self).__name__))
        sharded = {rank: unshard_reshard(row) for rank, row in in_new_notation(_computations(order)).items()}
        reduced = {rank: reduce_grad(row, self.n_microbatches) for rank, row in sharded.items()}
        if self._order is None:  # with skips and inputs of the model, which upstream has none of
            plan = self.plan.with_actions(order_from_upstream(reduced).values())
            made = order_to_upstream(add_transfers(plan, complete=False).actions)
        else:
            made = send_recv(reduced, self._rank_of, self._num_stages)
        return defer_recv_ops(made, self._rank_of) if self._defer_pp_recv else made

    def _rank_of(self, stage: int) -> int:
        return self.stage_index_to_group_rank[stage]

    def _set_ranks(self, rank_of: dict[int, int]) -> None:
        self.stage_index_to_group_rank = rank_of
        stages: Sequence[Any] = self.stages
        for stage in stages:
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
        """Take the order of a CSV file, one line per rank."""
        _check_format(format)
        self._prepare_schedule_with_comms(order_to_upstream(load_csv(filename, ragged=True)), format)

    def _dump_csv(self, filename: str | PathLike[str], format: Format = "compute_comms") -> None:
        """Write the order to a CSV file, one line per rank."""
        orders = {"compute_only": lambda: self.pipeline_order, "compute_comms": lambda: self.pipeline_order_with_comms}
        _check_format(format)
        self._check_has_order(format)
        rows = order_from_upstream(orders[format]())
        placement = Placement(tuple(map(self._rank_of, range(self._num_stages))))
        Plan.from_actions(rows, placement=placement, microbatches=self.n_microbatches).save_csv(filename)

    def _simulate(self) -> UpstreamOrder:
        """Return the order with messages, and a None for every slot in which a rank waits."""
        self._check_has_order("compute_comms")
        kept = {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD, Op.REDUCE_TIES}
        order = {
            rank: [action for action in row if action is not None and action.computation_type not in kept]
            for rank, row in self.pipeline_order_with_comms.items()
        }
        return simulate(order, self._rank_of, self._num_stages)

    def _check_has_order(self, format: Format) -> None:
        if not self.pipeline_order and not (format == "compute_comms" and self._order_with_comms):
            raise MissingOrderError(_NO_ORDER.format(type(self).__name__))

    def _set_plan(self) -> Plan | None:
        """Return the plan that was set since the last call, if one was."""
        if self._order_is_read:
            return None
        self._order_is_read = True
        if self._order_with_comms is not None and not self._comms_are_own:
            rows = order_from_upstream(in_new_notation(self._order_with_comms))
            plan = Plan.from_actions(rows, name=type(self).__name__, microbatches=self.n_microbatches)
            self._set_ranks(dict(enumerate(plan.placement.rank_of)))
            return plan
        if not self._order:
            return None
        rows = order_from_upstream(in_new_notation(_computations(self._order)))
        return Plan.from_actions(rows, name=type(self).__name__, microbatches=self.n_microbatches)

    # Other methods.

    _stages = FixedAttribute(lambda made: made.stages, _MADE_WITH.format("those stages"))
    _stage = FixedAttribute(lambda made: made.stages[0], _MADE_WITH.format("that stage"))
    _n_microbatches = FixedAttribute(lambda made: made.n_microbatches, _MADE_WITH.format("n_microbatches="))
    loss_fn = FixedAttribute(lambda made: made._objective.loss_fn, _MADE_WITH.format("loss_fn="))
    _loss_fn = FixedAttribute(lambda made: made.loss_fn, _MADE_WITH.format("loss_fn="))
    # A model with a loss of its own trains without a loss_fn.
    _has_backward = FixedAttribute(
        lambda made: made.loss_fn is not None, _MADE_WITH.format("loss_fn=, or call eval() for forwards only")
    )
    _args_chunk_spec = property(lambda made: made._specs[0], lambda made, spec: made._set_spec(0, spec))
    _kwargs_chunk_spec = property(lambda made: made._specs[1], lambda made, spec: made._set_spec(1, spec))
    _output_merge_spec = FixedAttribute(lambda made: made._merge_spec, _MADE_WITH.format("output_merge_spec="))

    _internal_losses = FixedAttribute(lambda made: made._losses_so_far(), "pass losses=, a list, to step()")

    def _make_cutter(self, kind: type[InputCutter] = UpstreamCutter) -> InputCutter:
        """Make what cuts the arguments; where specs say how, samples of targets are in the first dim, as upstream's."""
        cutter = super()._make_cutter(kind)
        if cutter.target_spec is None and any(spec is not None for spec in cutter.specs):
            cutter.target_spec = TensorChunkSpec(0)
        return cutter

    def _set_spec(self, place: int, spec: Any) -> None:
        """Cut the arguments of the next steps by another spec; before the schedule is made, by the constructor's."""
        if self._is_ready:
            specs = list(self._specs)
            specs[place] = spec
            self._specs = (specs[0], specs[1], specs[2])
            self._cutter = self._make_cutter()

    def _losses_so_far(self) -> list[Tensor]:
        """Return the losses that a step has computed while it runs; none after it."""
        return [loss for executor in self._observer.executors for loss in executor.state.losses.values()]

    @property
    def backward_counter(self) -> Counter[int]:
        """The backwards of each stage in the last step; a custom function counts its own."""
        return self._observer.backward_counter

    @property
    def fwd_recv_ops(self) -> dict[tuple[int, int], list[Any]]:
        """The activations that are in transit to this process, by stage and microbatch."""
        return self._arriving(forward=True)

    @property
    def bwd_recv_ops(self) -> dict[tuple[int, int], list[Any]]:
        """The gradients that are in transit to this process, by stage and microbatch."""
        return self._arriving(forward=False)

    def _arriving(self, *, forward: bool) -> dict[tuple[int, int], list[Any]]:
        return {
            (stage, microbatch): [arrival]
            for executor in self._observer.executors
            for (source, stage, microbatch), arrival in (
                executor.state.activations if forward else executor.state.gradients
            ).items()
            if source not in executor.stages
        }

    def _maybe_compute_loss(
        self,
        stage: UpstreamStage,
        output: Any,
        target_mbs: Sequence[Any] | None,
        mb_index: int,
        loss_kwargs: Any = None,
    ) -> None:
        """Check the arguments only: the forward of the last stage has computed the loss along with its output."""
        if stage.is_last:
            stage.check_same_output(mb_index, output)
            stage.check_same_targets(mb_index, target_mbs)

    def _maybe_get_loss(self, stage: UpstreamStage, mb_index: int) -> Tensor | None:
        """Return the loss of a microbatch whose forward is done, on the last stage."""
        flight = stage.flights.get(mb_index) if stage.is_last else None
        return None if flight is None else flight.loss

    def _assert_unsharded(self, stage: UpstreamStage) -> None:
        """Do nothing: a stage waits for its parameters by itself."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("microbatches are run by step() and eval(): pass the whole batch there")


def is_placed(stage: object) -> bool:
    """Return True for a stage, or what says where one would be: enough to make a schedule and look at its order."""
    return isinstance(stage, PipelineStage) or all(
        isinstance(getattr(stage, name, None), int) for name in ("num_stages", "group_size")
    )


def _is_complete(stage: object) -> bool:
    """Return True for a stage that its constructor has made, False for one that only says where it is."""
    return isinstance(stage, PipelineStage) and {"submod", "flights"} <= vars(stage).keys()


def _has_unplaced_stages(stages: Sequence[PipelineStage]) -> bool:
    """Return True if stages are missing and the one-rank group has nowhere to put them."""
    return is_initialized() and stages[0].group_size == 1 and len(stages) < stages[0].num_stages


def _check_format(format: str) -> None:
    if format not in get_args(Format):
        raise FormatError(f"format={format!r} is not known: give 'compute_only' or 'compute_comms'")


def _computations(order: Order) -> dict[int, list[UpstreamAction | None]]:
    """Drop the reductions, which upstream shows in the orders of schedules with one stage per rank."""
    return {
        rank: [action for action in row if action is None or action.computation_type is not Op.REDUCE_GRAD]
        for rank, row in order.items()
    }
