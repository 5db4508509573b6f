"""What the user passed to a step, as the data of each rank that is here."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..pipe_ir import PipeInfo, TracedCall, ambient_autocast, bind_inputs, flatten, sizes_of
from ..schedule import Plan
from ..stage import Microbatches, PipelineStage, StepSeeds, batch_dims, split_by_dims, split_by_specs
from .connection import EVAL, STEP, Connection
from .examples import check_given
from .loss import Objective, Weighing, as_integer, by_name, from_integer, warned_of_uneven_labels
from .state import Batch, refuse_unknown
from .targets import cut_target
from .transport.base import Meta

# MERGED: Whether the microbatches of a call fit the trace; if not, in the words of the whole call where that tells
# MERGED: more.


_REMEDY = (
    "The trace holds for microbatches of the example's size: pass so large a batch; or, if the samples are in another "
    "dim, make the schedule with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(dim), or Replicate()"
)


def _bind_microbatches(
    call: TracedCall, made: Microbatches, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mapping[int, Tensor]]:
    """The inputs of the model in each microbatch of a call."""
    bound: list[Mapping[int, Tensor]] = []
    for nth, (part, named) in enumerate(zip(made.args, made.kwargs, strict=True)):
        try:
            bound.append(bind_inputs(call, part, named))
        except InputError as error:
            if made.sizes is None or len(made.sizes) == 1:
                raise
            if call.dims:  # the trace holds for many sizes: what it does not take may not have to do with the cut
                bind_inputs(call, args, kwargs)
            raise InputError(_told(error, made, nth)) from error
    return bound


def _told(error: InputError, made: Microbatches, nth: int) -> str:
    assert made.sizes is not None
    dims = sorted({dim for dim in made.dims if dim is not None})
    along = f"dim {dims[0]}" if len(dims) == 1 else "their dims"
    return (
        f"microbatch {nth} does not fit, with {made.sizes[nth]} of the {sum(made.sizes)} samples that the call has "
        f"along {along}, in {len(made.sizes)} microbatches: {error}\n{_REMEDY}"
    )


# MERGED: A step's arguments as microbatches, with what the other ranks have to know of them.


@dataclass(frozen=True)
class _Calls:
    """The microbatches of one step on the rank of the first stage."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    samples: list[int]
    sizes: list[tuple[int, ...]]
    roots: list[Mapping[int, Tensor]]
    made: Microbatches


def cut_traced(
    call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]
) -> _Calls:
    """The microbatches of a traced model, cut along the dim that the trace has as the batch."""
    dims = None if specs != (None, None) else batch_dims(call)
    if dims is None:
        made = split_by_specs(args, kwargs, chunks, *specs)
    else:
        made = split_by_dims(args, kwargs, chunks, dims, call.signature)
    roots = _bind_microbatches(call, made, args, kwargs)
    symbols = sorted(call.dims, key=str)
    sizes = []
    for root in roots:
        known = sizes_of(call.dims, root)
        sizes.append(tuple(known[str(symbol)] for symbol in symbols))
    return _Calls(made.args, made.kwargs, _samples(made, chunks), sizes, roots, made)


def cut_by_hand(args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]) -> _Calls:
    """The microbatches of modules that were cut by hand; all shapes together get one number."""
    made = split_by_specs(args, kwargs, chunks, *specs)
    sizes: list[tuple[int, ...]] = [
        (_number_of_shapes(part, named),) for part, named in zip(made.args, made.kwargs, strict=True)
    ]
    return _Calls(made.args, made.kwargs, _samples(made, chunks), sizes, [], made)


def _samples(made: Microbatches, chunks: int) -> list[int]:
    return [1] * chunks if made.sizes is None else list(made.sizes)


def _number_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    leaves, _ = flatten((args, dict(kwargs)))
    shapes = [str(Meta.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    # Under autocast the stages give other dtypes.
    return zlib.crc32(repr((shapes, ambient_autocast())).encode())


_Specs = tuple[Any, Any, Any]  # how positional arguments, keyword arguments and the target are cut


_LOOKS = 8  # steps in which labels are looked at: after that nothing has to wait for it


@dataclass(frozen=True)
class Given:
    """What a step was called with in this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any] | None
    return_outputs: bool
    merge_spec: Any = None
    losses: list[Tensor] | None = None  # to be filled


class BatchMaker:
    """Cuts what was given, and tells all ranks the sizes of the microbatches."""

    def __init__(
        self,
        plan: Plan,
        info: PipeInfo | None,
        stages: Sequence[PipelineStage],
        specs: _Specs,
        connection: Connection,
        objective: Objective,
        weighing: Weighing | None,
        seeds: StepSeeds | None,
    ) -> None:
        self.info = info
        self.stages = stages
        self.seeds = seeds
        self.specs = specs[:2]
        self.target_spec = specs[2]
        self.connection = connection
        self.objective = objective
        self.weighing = weighing
        self.steps_to_look_at = _LOOKS
        self.microbatches = plan.microbatches
        self.first = plan.placement.rank_of[0]
        self.last = plan.placement.rank_of[plan.stages - 1]

    def make(self, given: Given) -> dict[int, Batch]:
        """The data of each rank that is here."""
        if self.info is None:
            refuse_unknown(self.stages, given.kwargs)
        calls = self._calls(given) if self.first in self.connection.ranks else None
        shared = self._share(given.training, calls)
        batches = {}
        for rank in self.connection.ranks:
            loss_kwargs = given.loss_kwargs or {}
            batch = Batch(given.training, shared.samples, shared.sizes, loss_kwargs=loss_kwargs)
            batch.merge_spec, batch.losses_to_fill = given.merge_spec, given.losses
            batch.keep_results, batch.weights, batch.seed = given.return_outputs, shared.weights, shared.seed
            if calls is not None and rank == self.first:
                batch.args, batch.kwargs, batch.roots = calls.args, calls.kwargs, calls.roots
            elif self.info is None and given.kwargs:
                batch.kwargs = self._own_kwargs(rank, given.kwargs, shared)
            if rank == self.last:
                self._give_target(batch, given.target, shared)
            batches[rank] = batch
        return batches

    def _calls(self, given: Given) -> _Calls:
        """The microbatches, on the rank of the first stage."""
        if not given.args and not given.kwargs:
            raise InputError(
                "step() got no input on the rank of the first stage: pass the arguments of the whole batch"
            )
        if self.info is not None:
            return cut_traced(self.info.call, given.args, given.kwargs, self.microbatches, self.specs)
        calls = cut_by_hand(given.args, given.kwargs, self.microbatches, self.specs)
        first = next(stage for stage in self.stages if stage.is_first)
        first.validate_tensors("input_args", first.input_args, calls.args[0], in_part=bool(calls.kwargs[0]))
        check_given(first, calls.args[0], calls.kwargs[0], calls.made.dims)
        return calls

    def _share(self, training: bool, calls: _Calls | None) -> _Shared:
        """Tell all ranks what kind of step it is, and of its microbatches a row of numbers each."""
        width = 2 + (1 if self.info is None else len(self.info.call.dims))
        # Every rank draws a seed, and that of the first stage is used: so their generators stay in step.
        seed = 0 if self.seeds is None else self.seeds.next(training=training)
        numbers = None
        if calls is not None:
            numbers = [seed, int(calls.made.samples_first), int(calls.made.in_order)]
            weights = self._weights_of(calls, training)
            for nth, (samples, sizes) in enumerate(zip(calls.samples, calls.sizes, strict=True)):
                numbers += [samples, as_integer(-1.0 if weights is None else weights[nth]), *sizes]
        kind = STEP if training else EVAL
        header = self.connection.share(kind, self.first, numbers, 3 + self.microbatches * width)
        seed, first, in_order, *rest = header
        rows = [rest[nth * width :][:width] for nth in range(self.microbatches)]
        told = [from_integer(row[1]) for row in rows]
        return _Shared(
            [row[0] for row in rows],
            [tuple(row[2:]) for row in rows],
            None if -1.0 in told else told,
            bool(first),
            bool(in_order),
            seed,
        )

    def _weights_of(self, calls: _Calls, training: bool) -> list[float] | None:
        """Those that only the rank of the first stage can know, by the arguments of the model."""
        if self.info is None or (self.weighing is not None and self.weighing.source != "arguments"):
            return None
        looks = training and self.steps_to_look_at > 0 and self.objective.is_own
        if self.weighing is None and not looks:
            return None
        signature = self.info.call.signature
        named = [by_name(signature, *call) for call in zip(calls.args, calls.kwargs, strict=True)]
        if self.weighing is None:
            self.steps_to_look_at = 0 if warned_of_uneven_labels(named) else self.steps_to_look_at - 1
            return None
        return self.weighing.of(named, training=training)

    def _own_kwargs(self, rank: int, kwargs: Mapping[str, Any], shared: _Shared) -> list[dict[str, Any]]:
        """The keyword arguments that a module cut by hand gets on its own rank."""
        own = cut_by_hand((), kwargs, self.microbatches, (None, self.specs[1]))
        if own.made.sizes is not None and own.samples != shared.samples:
            raise InputError(
                f"the keyword arguments of rank {rank} have {sum(own.samples)} samples, and the batch has "
                f"{sum(shared.samples)}: pass those of the whole batch"
            )
        if own.made.sizes is not None and own.made.in_order != shared.in_order:
            raise InputError(
                f"the keyword arguments of rank {rank} and the inputs of the first stage are not cut into the same "
                "samples: give them the same spec in args_chunk_spec= and kwargs_chunk_spec="
            )
        return own.kwargs

    def _give_target(self, batch: Batch, target: Any, shared: _Shared) -> None:
        """What the loss needs, on the rank of the last stage."""
        batch.in_order = shared.in_order
        self.objective.check(target, batch.loss_kwargs, training=batch.training)
        if target is not None:
            first, in_order = shared.samples_first, shared.in_order
            batch.targets = cut_target(target, batch.samples, self.target_spec, samples_first=first, in_order=in_order)
        if self.weighing is not None and self.weighing.source != "arguments":
            keywords = batch.kwargs or [{}] * self.microbatches
            parts = batch.targets if self.weighing.source == "target" else keywords
            batch.weights = self.weighing.of(parts, training=batch.training)


@dataclass(frozen=True)
class _Shared:
    """What all ranks know of a step."""

    samples: list[int]
    sizes: list[tuple[int, ...]]
    weights: list[float] | None
    samples_first: bool  # True if all inputs that are cut have their samples in dim 0
    in_order: bool  # True if the microbatches hold consecutive samples
    seed: int  # of the random numbers
