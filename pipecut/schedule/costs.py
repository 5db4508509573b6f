"""Costs of the actions of a plan: time and memory, for each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Protocol

from ..errors import PlanError
from .action import Op
from .plan import Plan
from .rules import Placement, tie_messages


@dataclass(frozen=True)
class Link:
    """A connection: a message of n bytes takes latency + n / bandwidth, in the unit of the other costs.

    >>> Link(latency=0.5, bandwidth=4.0).time(10)
    3.0
    """

    latency: float
    bandwidth: float  # bytes in one unit of time

    def __post_init__(self) -> None:
        checked_number("latency", self.latency)
        if checked_number("bandwidth", self.bandwidth, allow_negative=True) <= 0:
            raise PlanError(
                f"bandwidth={self.bandwidth}: no message would ever arrive; give the bytes that pass in one unit of "
                "time, more than 0."
            )

    def time(self, size: float) -> float:
        """Return the time that a message of that many bytes takes."""
        return self.latency + size / self.bandwidth


class HasLink(Protocol):
    """A machine, which this room knows by its link alone."""

    @property
    def link_latency(self) -> float: ...

    @property
    def link_bandwidth(self) -> float: ...

    def linking(self, ranks: int) -> HasLink:
        """Return it with the link between this many ranks."""


_PerStage = float | Sequence[float] | Mapping[int, float]
_Pair = tuple[int, int]
_Transfer = float | Link | Mapping[_Pair, float | Link]  # for all pairs of ranks, or by (source rank, target rank)
_MessageBytes = float | Mapping[_Pair, float]  # for all messages, or by (maker stage, user stage)

TIMES = ("forward", "backward_input", "backward_weight", "full_backward")
MEMORY = ("memory_forward", "memory_backward_input", "memory_backward_weight")
_COLLECTIVES = ("unshard", "reduce_grad")


@dataclass(frozen=True)
class CostTable:
    """The costs of the four computations for every stage of one plan: `time[Op.FORWARD][stage]`."""

    time: Mapping[Op, tuple[float, ...]]
    memory: Mapping[Op, tuple[float, ...]]  # that each adds; negative where it frees


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch, in any unit of time and of memory.

    A plain number is the work of a whole rank, and is divided among the stages of that rank; a list has one number for
    each stage, and so has a dict from stage to number. A full backward takes as long as both halves unless
    `full_backward` says otherwise, and frees what both free.

    `transfer` is the time of each message between two ranks, whatever the number of stages: a number, a Link (which
    uses `message_bytes`), or a dict from (source rank, target rank) to these. Between stages of a rank nothing is sent.

    `tie_bytes` are the sizes of the gradients that stages share, by the number of the tie; `tie_messages` says which
    messages their sum takes. Without it these sums take no time.

    `unshard` and `reduce_grad` are the times of the collectives over the copies of a stage, once per UNSHARD and
    REDUCE_GRAD of a plan: to gather parameters, which passes beside computations, and to average gradients.

    >>> from pipecut.schedule.plan import Plan
    >>> plan = Plan.from_actions({0: ["0F0", "2F0"], 1: ["1F0"]})
    >>> Costs(forward=3).table(plan).time[Op.FORWARD]
    (1.5, 3.0, 1.5)
    >>> Costs(forward=[1, 2, 4]).table(plan).time[Op.FORWARD]
    (1.0, 2.0, 4.0)
    """

    forward: _PerStage = 1.0
    backward_input: _PerStage = 1.0
    backward_weight: _PerStage = 1.0
    transfer: _Transfer = 0.0
    full_backward: _PerStage | None = None
    memory_forward: _PerStage = 1.0
    memory_backward_input: _PerStage = 0.0
    memory_backward_weight: _PerStage = -1.0
    message_bytes: _MessageBytes | None = None
    tie_bytes: Sequence[float] | None = None
    unshard: _PerStage = 0.0
    reduce_grad: _PerStage = 0.0

    def __post_init__(self) -> None:
        for name in TIMES + MEMORY + _COLLECTIVES:
            value = getattr(self, name)
            if value is not None or name != "full_backward":
                object.__setattr__(self, name, _checked(name, value, allow_negative=name in MEMORY))
        _check_transfer(self.transfer)
        _check_message_bytes(self.message_bytes, self.transfer)
        if self.tie_bytes is not None:
            sizes = (checked_number(f"tie_bytes[{number}]", size) for number, size in enumerate(self.tie_bytes))
            object.__setattr__(self, "tie_bytes", tuple(sizes))
        for name in ("transfer", "message_bytes"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, dict(value))

    def on(self, machine: HasLink, ranks: int) -> Costs:
        """Return these costs, in seconds and with `message_bytes`, with a machine's link between so many ranks."""
        if not callable(getattr(machine, "linking", None)):
            raise PlanError(f"machine={machine!r}: give a pipecut.Machine, such as pipecut.Machine.named('h100').")
        linked = machine.linking(ranks)
        return replace(self, transfer=Link(linked.link_latency, linked.link_bandwidth))

    def table(self, plan: Plan) -> CostTable:
        """Return the costs of every stage of a plan."""
        column = {
            name: _by_stage(name, getattr(self, name), plan)
            for name in TIMES + MEMORY
            if getattr(self, name) is not None
        }
        both = _sums(column["backward_input"], column["backward_weight"])
        return CostTable(
            time={
                Op.FORWARD: column["forward"],
                Op.BACKWARD_INPUT: column["backward_input"],
                Op.BACKWARD_WEIGHT: column["backward_weight"],
                Op.FULL_BACKWARD: column.get("full_backward", both),
            },
            memory={
                Op.FORWARD: column["memory_forward"],
                Op.BACKWARD_INPUT: column["memory_backward_input"],
                Op.BACKWARD_WEIGHT: column["memory_backward_weight"],
                Op.FULL_BACKWARD: _sums(column["memory_backward_input"], column["memory_backward_weight"]),
            },
        )

    def collective_times(self, plan: Plan) -> dict[Op, tuple[float, ...]]:
        """Return the times of UNSHARD and REDUCE_GRAD for every stage of a plan."""
        return {
            Op.UNSHARD: _by_stage("unshard", self.unshard, plan),
            Op.REDUCE_GRAD: _by_stage("reduce_grad", self.reduce_grad, plan),
        }

    def message_time(self, placement: Placement, op: Op, stage: int, other: int) -> float:
        """Return the time of a SEND_F or SEND_B from a stage to another; a gradient has the size of its activation."""
        ranks = placement.rank_of[stage], placement.rank_of[other]
        edge = (stage, other) if op is Op.SEND_F else (other, stage)
        return _message_time(self.transfer, 0 if self.message_bytes is None else self.message_bytes, ranks, edge)

    def tie_time(self, plan: Plan, number: int) -> float:
        """Return the time of the sum of a tie, once all its ranks have reached it."""
        if self.tie_bytes is None:
            return 0.0
        if number >= len(self.tie_bytes):
            raise PlanError(
                f"tie_bytes has no value for tie {number}: the plan '{plan.name}' has {len(plan.dataflow.ties)} ties; "
                "give one for each."
            )
        return sum(
            _message_time(
                self.transfer,
                self.tie_bytes[number] if message.has_gradient else 0.0,
                (message.source, message.target),
                (0, 0),
            )
            for message in tie_messages(plan.ranks_of_tie(number))
        )


def _message_time(transfer: _Transfer, message_bytes: _MessageBytes, ranks: _Pair, edge: _Pair) -> float:
    """Return the time of a message along an edge (maker stage, user stage) from the first rank to the second."""
    link = _of_pair(transfer, ranks)
    return link.time(_size(message_bytes, edge)) if isinstance(link, Link) else float(link)


def _of_pair(transfer: _Transfer, ranks: _Pair) -> float | Link:
    if not isinstance(transfer, Mapping):
        return transfer
    if ranks not in transfer:
        raise PlanError(
            f"transfer has no value for messages from rank {ranks[0]} to rank {ranks[1]}: add transfer[{ranks}]."
        )
    return transfer[ranks]


def _size(message_bytes: _MessageBytes, edge: _Pair) -> float:
    if not isinstance(message_bytes, Mapping):
        return message_bytes
    if edge not in message_bytes:
        raise PlanError(
            f"message_bytes has no value for what passes between stage {edge[0]}, its maker, and stage {edge[1]}, its "
            f"user: add message_bytes[{edge}]."
        )
    return message_bytes[edge]


def _check_transfer(transfer: object) -> None:
    """Raise unless it is a time, a Link, or one of them for each pair of ranks."""
    if not isinstance(transfer, Mapping):
        _check_one("transfer", transfer)
        return
    for pair, value in transfer.items():
        _check_pair("transfer", pair, "(source rank, target rank)")
        _check_one(f"transfer[{pair}]", value)


def _check_message_bytes(message_bytes: object, transfer: object) -> None:
    """Raise unless it is a size or one for each pair of stages, and for a Link without sizes."""
    links = list(transfer.values()) if isinstance(transfer, Mapping) else [transfer]
    with_link = any(isinstance(link, Link) for link in links)
    if message_bytes is None:
        if with_link:
            raise PlanError("transfer has a Link, whose time depends on the size of a message: give message_bytes too.")
        return
    if not isinstance(message_bytes, Mapping):
        checked_number("message_bytes", message_bytes)
        return
    for pair, value in message_bytes.items():
        _check_pair("message_bytes", pair, "(maker stage, user stage)")
        checked_number(f"message_bytes[{pair}]", value)


def _check_one(what: str, value: object) -> None:
    if not isinstance(value, Link | Real):
        raise PlanError(
            f"{what}={value!r}: give the time that a message takes, a Link(latency, bandwidth), or a dict from "
            "(source rank, target rank) to these."
        )
    if not isinstance(value, Link):
        checked_number(what, value)


def _check_pair(what: str, pair: object, names: str) -> None:
    numbers = pair if isinstance(pair, tuple) else ()
    if len(numbers) != 2 or not all(isinstance(number, int) for number in numbers):
        raise PlanError(f"{what} has the key {pair!r}: its keys are pairs {names}, such as (0, 1).")


def _checked(name: str, value: object, *, allow_negative: bool) -> _PerStage:
    """Return a copy of the value with its numbers checked: the caller may change theirs."""
    if isinstance(value, Mapping):
        wrong = [stage for stage in value if not isinstance(stage, int)]
        if wrong:
            raise PlanError(f"{name} has the key {wrong[0]!r}: its keys are the numbers of stages, 0, 1, 2...")
        return {
            stage: checked_number(f"{name}[{stage}]", each, allow_negative=allow_negative)
            for stage, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(
            checked_number(f"{name}[{stage}]", each, allow_negative=allow_negative) for stage, each in enumerate(value)
        )
    if not isinstance(value, Real):
        raise PlanError(
            f"{name}={value!r}: give a number for a rank's work on one microbatch, a list with one for each stage, "
            "or a dict from stage to number."
        )
    return checked_number(name, value, allow_negative=allow_negative)


def _by_stage(name: str, value: _PerStage, plan: Plan) -> tuple[float, ...]:
    if isinstance(value, float):
        held = [len(stages) for stages in plan.placement.stages_of]
        return tuple(value / held[rank] for rank in plan.placement.rank_of)
    assert not isinstance(value, int)  # made a float when the costs were checked
    given = value if isinstance(value, Mapping) else dict(enumerate(value))
    where = f"the plan '{plan.name}' has stages 0 to {plan.stages - 1}"
    missing = [stage for stage in range(plan.stages) if stage not in given]
    if missing:
        raise PlanError(f"{name} has no value for stage {missing[0]}: {where}; give one for each.")
    unknown = sorted(stage for stage in given if not 0 <= stage < plan.stages)
    if unknown:
        raise PlanError(f"{name} has a value for stage {unknown[0]}, but {where}; remove it.")
    return tuple(given[stage] for stage in range(plan.stages))


def _sums(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    return tuple(one + other for one, other in zip(first, second, strict=True))


def checked_number(name: str, value: object, *, allow_negative: bool = False, allow_inf: bool = False) -> float:
    """Return the value as a float; raise an error that names it unless it is a finite number, 0 or more.

    >>> checked_number("forward", 18), checked_number("memory_limit", float("inf"), allow_inf=True)
    (18.0, inf)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PlanError(f"{name}={value!r} is not a number: give one such as 18.5.")
    try:
        number = float(value)
    except OverflowError:
        number = -math.inf if value < 0 else math.inf
    if math.isnan(number) or (math.isinf(number) and not allow_inf):
        remedy = "give a finite number, or inf for no limit" if allow_inf else "give a finite number"
        raise PlanError(f"{name}={number} is not finite: {remedy}.")
    if number < 0 and not allow_negative:
        raise PlanError(f"{name}={value} is negative: give 0 or more.")
    return number
