"""What a rank sends and receives in a step: parcels on their way in and out, and those between its own stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import PipeError
from ..schedule import Action, Op, Plan
from ..stage import Flight, MeshLayout, PipelineStage, local_part, placement_of, ready_to_send
from .parcels import Ends, Kind, Parcels, WholeTensors, joints_of
from .random_numbers import RandomNumbers
from .state import Batch
from .transport.base import Arrival, Meta, Ready, Transport

Key = tuple[int, int, int]  # the stage that gives, the stage that takes, the microbatch


class Mail:
    """The parcels of one rank. Receives are posted when it is known what will come, and waited for when it is used."""

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, PipelineStage],
        parcels: Parcels,
        transport: Transport,
        random_numbers: RandomNumbers,
    ) -> None:
        self.rank_of = plan.placement.rank_of
        self.stages = stages
        self.parcels = parcels
        self.transport = transport
        self.random_numbers = random_numbers
        self.batch = Batch(training=False, samples=[], sizes=[])
        self.activations: dict[Key, Arrival] = {}  # that have arrived, or will, and were not used yet
        self.gradients: dict[Key, Arrival] = {}
        self._outgoing: dict[Key, list[Tensor]] = {}

    def begin(self, batch: Batch) -> None:
        """Start a step with nothing left of the one before."""
        self.activations.clear()
        self.gradients.clear()
        self._outgoing.clear()
        self.batch = batch

    def take(self, source: int, target: int, microbatch: int) -> list[Any]:
        """The values of a parcel, ready to be differentiated."""
        metas = self.metas((source, target), microbatch)
        parcel = self.activations.pop((source, target, microbatch), None)
        values = self._local_roots(target, microbatch) if parcel is None else parcel.wait()
        self.random_numbers.arrived(target, microbatch, values[len(metas) :])
        training = self.batch.training
        return [
            value.requires_grad_(training and meta.requires_grad)
            for value, meta in zip(values[: len(metas)], metas, strict=True)
        ]

    def wait_for(self, action: Action) -> None:
        """Wait until everything is here that a computation needs."""
        for leaf in action.leaves:
            waiting = self.activations if leaf.op is Op.FORWARD else self.gradients
            for key in [key for key in waiting if key[1:] == (leaf.stage, leaf.microbatch)]:
                waiting[key] = Ready(waiting[key].wait())

    def _local_roots(self, target: int, microbatch: int) -> list[Tensor]:
        """Inputs of the model for a later stage on the first stage's rank, where nobody has to hand them over."""
        ports = self.stages[target].ports
        assert ports is not None  # a module that was cut by hand has its inputs from the stage before it
        roots = self.batch.roots[microbatch]
        return [roots[item.root].detach().contiguous() for item in ports.incoming[0] if item.root is not None]

    def _kind(self, ends: Ends, microbatch: int) -> Kind:
        return Kind(ends, self.batch.sizes[microbatch], self.batch.training)

    def metas(self, ends: Ends, microbatch: int) -> tuple[Meta, ...]:
        metas = self.parcels.metas(self._kind(ends, microbatch))
        assert metas is not None  # a parcel is described before it comes
        return metas

    def hand_over(self, source: int, target: int, microbatch: int, flight: Flight) -> None:
        """Pack what goes to another stage: kept for its send, or given to a stage of this rank."""
        parcel = self._parcel(source, target, microbatch, flight)
        key = (source, target, microbatch)
        if self.rank_of[target] == self.transport.rank:
            self._describe(key, parcel)
            self.activations[key] = Ready([tensor.detach() for tensor in parcel])
        else:
            self._outgoing[key] = parcel

    def _describe(self, key: tuple[int, int, int], parcel: Sequence[Tensor]) -> None:
        """Make sure that the receiver knows what comes, and that it is what it expects."""
        source, target, microbatch = key
        ends = (source, target)
        self.parcels.tell(self._kind(ends, microbatch), self.transport, self.rank_of[target], parcel)
        self._check_parcel(ends, microbatch, parcel)

    def _parcel(self, source: int, target: int, microbatch: int, flight: Flight) -> list[Tensor]:
        ports = self.stages[source].ports
        if ports is None:
            return [ready_to_send(output) for output in flight.outputs]
        roots = self.batch.roots[microbatch] if source == 0 else {}
        return [
            ready_to_send(flight.outputs[item.output] if item.output is not None else roots[item.root])  # type: ignore[index]
            for item in ports.outgoing.get(target, ())
        ]

    def _check_parcel(self, ends: Ends, microbatch: int, parcel: Sequence[Tensor]) -> None:
        """What is sent is what the receiver expects; a gradient that nobody asked for would be lost in silence."""
        for place, (tensor, meta) in enumerate(zip(parcel, self.metas(ends, microbatch), strict=True)):
            asked_for = meta.requires_grad or not tensor.requires_grad or not self.batch.training
            alike = tuple(tensor.shape) == meta.whole_shape and tensor.dtype == meta.dtype
            if alike and asked_for and placement_of(MeshLayout.of(tensor)) == placement_of(meta.on_mesh):
                continue
            name, got = self.parcels.names(ends)[place], Meta.of(tensor)
            source, target = ends
            raise PipeError(
                f"{name}, which goes from stage {source} to stage {target}, is {got} here, and stage {target} expects "
                f"{meta}: {self.parcels.remedy(source, got, meta)}"
            )

    def send_activations(self, action: Action) -> None:
        key = (action.stage, action.other_stage, number(action))
        parcel = self._outgoing.pop(key, None)
        if parcel is None:  # an input of the model that is sent before the first stage has run
            parcel = self._parcel(*key, Flight([], []))
        self._describe(key, parcel)
        parcel = parcel + self.random_numbers.outgoing(*key)
        if parcel:
            self.transport.send(self.rank_of[key[1]], [local_part(tensor) for tensor in parcel])

    def send_gradients(self, action: Action) -> None:
        parcel = self._outgoing.pop((action.stage, action.other_stage, number(action)), None)
        if parcel:
            self.transport.send(self.rank_of[action.other_stage], [local_part(grad) for grad in parcel])

    def post(self, action: Action) -> None:
        """Post a receive, unless it is posted already."""
        microbatch = number(action)
        forward = action.op is Op.RECV_F
        ends = (action.other_stage, action.stage) if forward else (action.stage, action.other_stage)
        waiting = self.activations if forward else self.gradients
        key = (action.other_stage, action.stage, microbatch)
        if key in waiting:
            return
        peer = self.rank_of[action.other_stage]
        if forward:
            self.parcels.learn(self._kind(ends, microbatch), self.transport, peer)
        metas = self.metas(ends, microbatch)
        along = self.random_numbers.expected(*ends) if forward else ()
        wanted = metas + along if forward else [meta.of_gradient for meta in metas if meta.requires_grad]
        joints = joints_of(wanted, self.stages[action.stage])
        if wanted or forward:
            arrival = self.transport.receive(peer, wanted) if wanted else Ready([])
            waiting[key] = WholeTensors(arrival, joints) if joints else arrival

    def size_of(self, action: Action) -> int | None:
        """The bytes that will arrive, if that is known."""
        ends = (action.other_stage, action.stage) if action.op is Op.RECV_F else (action.stage, action.other_stage)
        metas = self.parcels.metas(self._kind(ends, number(action)))
        return None if metas is None else sum(meta.bytes for meta in metas)

    def give_back(self, stage: int, source: int, microbatch: int, parcel: list[Tensor]) -> None:
        """Gradients for the stage that made the values: kept for their send, or given to a stage of this rank."""
        key = (stage, source, microbatch)
        if self.rank_of[source] == self.transport.rank:
            self.gradients[key] = Ready(parcel)
        else:
            self._outgoing[key] = parcel

    def take_gradients(self, user: int, stage: int, microbatch: int) -> list[Tensor] | None:
        """The gradients that a user of a stage's values gives back, if there are any."""
        parcel = self.gradients.pop((user, stage, microbatch), None)
        return None if parcel is None else parcel.wait()


def number(action: Action) -> int:
    assert action.microbatch is not None  # a proven plan
    return action.microbatch
