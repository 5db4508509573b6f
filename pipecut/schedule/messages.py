"""The messages between the ranks of a plan, numbered, and how long each travels."""

from __future__ import annotations

from typing import NamedTuple

from .action import Op
from .costs import Costs
from .plan import Plan
from .record import Wait

SEND_OF = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
WAIT_FOR = {Op.RECV_F: Wait.FORWARD, Op.RECV_B: Wait.BACKWARD}


class Message(NamedTuple):
    """One kind of message: its number for microbatch 0, the others follow it; and how long each of them travels."""

    number: int
    travel: float


class Messages:
    """All messages of a plan, whether it has its transfers or not; `backward` says whether gradients go back."""

    def __init__(self, plan: Plan, costs: Costs, *, backward: bool) -> None:
        self.plan = plan
        self.by_ends: dict[tuple[Op, int, int], Message] = {}  # (SEND_F or SEND_B, source stage, target stage)
        for stage in range(plan.stages):
            for op in (Op.FORWARD, Op.BACKWARD_INPUT) if backward else (Op.FORWARD,):
                for send, other in plan.dataflow.messages(op, stage, plan.placement):
                    travel = costs.message_time(plan.placement, send, stage, other)
                    self.by_ends[send, stage, other] = Message(len(self), travel)

    def __len__(self) -> int:
        return len(self.by_ends) * self.plan.microbatches

    @property
    def inputs(self) -> list[Message]:
        """Those that carry nothing but an input of the model: there from the start, made by no computation."""
        return [message for ends, message in self.by_ends.items() if self._is_input(*ends)]

    def needed(self, op: Op, stage: int) -> tuple[tuple[int, Wait], ...]:
        """What a computation waits for: the number of each message, and what kind of wait that is."""
        received = self.plan.dataflow.receives(op, stage, self.plan.placement)
        return tuple(
            (self.by_ends[SEND_OF[receive], other, stage].number, WAIT_FOR[receive]) for receive, other in received
        )

    def made(self, op: Op, stage: int) -> tuple[Message, ...]:
        """What leaves as soon as a computation has ended: nothing, if the plan has sends of its own."""
        if self.plan.has_transfers:
            return ()
        sent = self.plan.dataflow.messages(op, stage, self.plan.placement)
        return tuple(self.by_ends[send, stage, other] for send, other in sent if not self._is_input(send, stage, other))

    def _is_input(self, send: Op, stage: int, other: int) -> bool:
        return send is Op.SEND_F and (stage, other) not in self.plan.dataflow.activations
