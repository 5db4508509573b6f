"""Parcels of one rank in a step: what it sends and receives, and what its own stages hand to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import PipeError
from ..schedule import Action, Op, Plan
from ..stage import Flight, MeshLayout, PipelineStage, local_part, placement_of, ready_to_send
from .parcels import Contents, Ends, Kind, Parcels, WholeTensors, joints_of, receive_numbers, send_numbers
from .random_numbers import RandomNumbers
from .state import Key, StepState
from .transport import Arrival, Meta, Ready, Transport


def sendable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent as it lies in memory: mostly the tensor itself."""
    is_ready = type(tensor) is Tensor and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor if is_ready else ready_to_send(tensor)


class Mail:
    """Sends and receives the parcels of one rank.

    A receive is posted when it is known what will arrive, and waited for when a computation needs it.
    """

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
        self._contents: dict[tuple[Ends, tuple[int, ...], bool], Contents] = {}  # by Kind

    def contents(self, ends: Ends, microbatch: int, state: StepState) -> Contents:
        """Return what is in the parcel between two stages, which is known by now."""
        known = self._contents.get((ends, state.sizes[microbatch], state.training))
        return known if known is not None else self._first_contents(ends, microbatch, state)

    def _first_contents(self, ends: Ends, microbatch: int, state: StepState) -> Contents:
        if ends in self.parcels.from_data.dims:
            return state.measured[ends, microbatch]
        kind = Kind(ends, state.sizes[microbatch], state.training)
        metas = self.parcels.metas(kind)
        assert metas is not None  # a parcel is described before it comes
        made = self._contents[kind] = Contents.of(metas)
        return made

    # Activations.

    def hand_over(self, source: int, target: int, microbatch: int, flight: Flight, state: StepState) -> None:
        """Pack what goes to another stage: kept for its send, or given to a stage of this rank."""
        parcel = self._parcel(source, target, microbatch, flight, state)
        key = (source, target, microbatch)
        if self.rank_of[target] == self.transport.rank:
            self._describe(key, parcel, state)
            state.activations[key] = Ready([tensor.detach() for tensor in parcel])
        else:
            state.outgoing[key] = parcel

    def _parcel(self, source: int, target: int, microbatch: int, flight: Flight, state: StepState) -> list[Tensor]:
        ports = self.stages[source].ports
        if ports is None:
            return [sendable(output) for output in flight.outputs]
        roots = state.roots[microbatch] if source == 0 else {}
        return [
            sendable(flight.outputs[item.output] if item.output is not None else roots[item.root])  # type: ignore[index]
            for item in ports.outgoing.get(target, ())
        ]

    def send_activations(self, action: Action, state: StepState) -> None:
        """Send what a stage made for another one."""
        target, microbatch = action.other_stage, action.microbatch
        assert microbatch is not None  # a proven plan
        key = (action.stage, target, microbatch)
        parcel = state.outgoing.pop(key, None)
        if parcel is None:  # an input of the model that is sent before the first stage has run
            parcel = self._parcel(*key, Flight([], []), state)
        contents = self._describe(key, parcel, state)
        if not contents.is_plain:
            parcel = [local_part(tensor) for tensor in parcel]
        if self.random_numbers.travel:
            parcel = parcel + self.random_numbers.outgoing(*key, state)
        if parcel:
            self.transport.send(self.rank_of[target], parcel)

    def _describe(self, key: Key, parcel: Sequence[Tensor], state: StepState) -> Contents:
        """Make sure that the receiver knows what comes, and that it is what it expects."""
        source, target, microbatch = key
        ends = (source, target)
        if self.parcels.are_learnt:
            kind = Kind(ends, state.sizes[microbatch], state.training)
            self.parcels.send_description_if_new(kind, self.transport, self.rank_of[target], parcel)
        if ends in self.parcels.from_data.dims:
            self._measure(key, parcel, state)
        contents = self.contents(ends, microbatch, state)
        training = state.training
        for place, (tensor, meta) in enumerate(zip(parcel, contents.metas, strict=True)):
            # A gradient that nobody asked for would be lost in silence.
            asked_for = meta.requires_grad or not tensor.requires_grad or not training
            is_plain = type(tensor) is Tensor and meta.on_mesh is None
            if is_plain and asked_for and tensor.dtype == meta.dtype and tensor.shape == meta.shape:
                continue
            alike = tensor.shape == meta.whole_shape and tensor.dtype == meta.dtype
            if not (asked_for and alike and placement_of(MeshLayout.of(tensor)) == placement_of(meta.on_mesh)):
                self._raise_mismatch(ends, place, tensor, meta)
        return contents

    def _measure(self, key: Key, parcel: Sequence[Tensor], state: StepState) -> None:
        """Note the sizes of a parcel that depend on the data, and send them ahead if it goes to another rank."""
        source, target, microbatch = key
        sizes = self.parcels.from_data.in_parcel((source, target), parcel)
        self._note_sizes((source, target), microbatch, sizes, state)
        if self.rank_of[target] != self.transport.rank:
            send_numbers(self.transport, self.rank_of[target], sizes, parcel[0].device)

    def _note_sizes(self, ends: Ends, microbatch: int, sizes: Sequence[int], state: StepState) -> None:
        kind = Kind(ends, state.sizes[microbatch], state.training)
        metas = self.parcels.metas(kind)
        assert metas is not None  # of a traced model
        state.measured[ends, microbatch] = self.parcels.from_data.contents(ends, metas, sizes)

    def _raise_mismatch(self, ends: Ends, place: int, tensor: Tensor, meta: Meta) -> None:
        (source, target), got = ends, Meta.of(tensor)
        raise PipeError(
            f"{self.parcels.names(ends)[place]}, which goes from stage {source} to stage {target}, is {got} here, and "
            f"stage {target} expects {meta}: {self.parcels.remedy(source, got, meta)}"
        )

    def take(self, source: int, target: int, microbatch: int, state: StepState) -> list[Any]:
        """Return the values of a parcel as leaves of the graph of the stage that they are for."""
        metas = self.contents((source, target), microbatch, state).metas
        arrival = state.activations.pop((source, target, microbatch), None)
        values = self._local_roots(target, microbatch, state) if arrival is None else arrival.wait()
        if len(values) > len(metas):
            self.random_numbers.arrived(target, microbatch, values[len(metas) :], state)
            values = values[: len(metas)]
        if state.training:
            for value, meta in zip(values, metas, strict=True):
                value.requires_grad_(meta.requires_grad)
        return values

    def _local_roots(self, target: int, microbatch: int, state: StepState) -> list[Tensor]:
        """Return inputs of the model for a later stage on the first stage's rank, where nobody hands them over."""
        ports = self.stages[target].ports
        assert ports is not None  # a module that was cut by hand has its inputs from the stage before it
        roots = state.roots[microbatch]
        return [roots[item.root].detach().contiguous() for item in ports.incoming[0] if item.root is not None]

    # Gradients.

    def give_back(self, stage: int, source: int, microbatch: int, parcel: list[Tensor], state: StepState) -> None:
        """Pack gradients for the stage that made the values: kept for their send, or given to a stage of this rank."""
        key = (stage, source, microbatch)
        if self.rank_of[source] == self.transport.rank:
            state.gradients[key] = Ready(parcel)
        else:
            state.outgoing[key] = parcel

    def send_gradients(self, action: Action, state: StepState) -> None:
        """Send the gradients of what another stage made."""
        source, microbatch = action.other_stage, action.microbatch
        assert microbatch is not None  # a proven plan
        parcel = state.outgoing.pop((action.stage, source, microbatch), None)
        if not parcel:
            return
        if not self.contents((source, action.stage), microbatch, state).is_plain:
            kind = Kind((action.stage, source), state.sizes[microbatch], True)
            self.parcels.send_description_if_new(kind, self.transport, self.rank_of[source], parcel)
            parcel = [local_part(grad) for grad in parcel]
        self.transport.send(self.rank_of[source], parcel)

    def gradient_layouts(self, stage: int, source: int, microbatch: int, state: StepState) -> list[MeshLayout | None]:
        """Return how the gradients that a stage sends back have to lie; nothing if they may lie as they come."""
        metas = self.parcels.metas(Kind((stage, source), state.sizes[microbatch], True))
        return [] if metas is None else [meta.on_mesh for meta in metas]

    # Receives.

    def post(self, action: Action, state: StepState) -> None:
        """Post a receive, unless it is posted already."""
        other, microbatch = action.other_stage, action.microbatch
        assert microbatch is not None  # a proven plan
        forward = action.op is Op.RECV_F
        waiting = state.activations if forward else state.gradients
        key = (other, action.stage, microbatch)
        if key in waiting:
            return
        peer = self.rank_of[other]
        ends = (other, action.stage) if forward else (action.stage, other)
        if forward and self.parcels.are_learnt:
            self.parcels.learn(Kind(ends, state.sizes[microbatch], state.training), self.transport, peer)
        if forward and ends in self.parcels.from_data.dims:
            sizes = receive_numbers(self.transport, peer, len(self.parcels.from_data.dims[ends]))
            self._note_sizes(ends, microbatch, sizes, state)
        contents = self.contents(ends, microbatch, state)
        wanted = contents.metas if forward else self._gradient_metas(ends, contents, microbatch, state)
        if forward and self.random_numbers.travel:
            wanted += self.random_numbers.expected(*ends)
        if not wanted and not forward:
            return
        arrival: Arrival = self.transport.receive(peer, wanted) if wanted else Ready([])
        if not contents.is_plain:
            joints = joints_of(wanted, self.stages[action.stage])
            arrival = WholeTensors(arrival, joints) if joints else arrival
        waiting[key] = arrival

    def _gradient_metas(self, ends: Ends, contents: Contents, microbatch: int, state: StepState) -> tuple[Meta, ...]:
        """Return what comes back for a parcel. Where there are DTensors, the first time the sender tells."""
        if contents.is_plain or not contents.gradient_places:
            return contents.gradient_metas
        kind = Kind((ends[1], ends[0]), state.sizes[microbatch], True)
        self.parcels.learn(kind, self.transport, self.rank_of[ends[1]])
        metas = self.parcels.metas(kind)
        assert metas is not None  # just told
        return metas

    def size_of(self, action: Action, state: StepState) -> int | None:
        """Return the bytes that will arrive, if that is known."""
        assert action.microbatch is not None  # a proven plan
        other, sizes = action.other_stage, state.sizes[action.microbatch]
        ends = (other, action.stage) if action.op is Op.RECV_F else (action.stage, other)
        known = self._contents.get((ends, sizes, state.training))
        if known is not None and not known.is_plain and action.op is Op.RECV_B:
            told = self.parcels.metas(Kind((ends[1], ends[0]), sizes, True))
            return None if told is None else sum(meta.bytes for meta in told)
        if known is None:
            known = state.measured.get((ends, action.microbatch))
        if known is None and ends in self.parcels.from_data.dims:
            return None
        if known is None:
            metas = self.parcels.metas(Kind(ends, sizes, state.training))
            return None if metas is None else Contents.of(metas).bytes
        return known.bytes

    def wait_for(self, action: Action, state: StepState) -> None:
        """Wait until everything is here that a computation needs."""
        for leaf in action.leaves:
            waiting = state.activations if leaf.op is Op.FORWARD else state.gradients
            for key in [key for key in waiting if key[1:] == (leaf.stage, leaf.microbatch)]:
                waiting[key] = Ready(waiting[key].wait())
