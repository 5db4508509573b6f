"""The arguments of a step, cut into microbatches, as the state of each rank that is in this process."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..pipe_ir import PipeInfo, TracedCall, active_autocast, bind_inputs, flatten, sizes_of
from ..schedule import Plan
from ..stage import Microbatches, PipelineStage, StepSeeds, batch_dims, cut_rows, split_by_dims, split_by_specs
from .connection import EVAL, STEP, Connection
from .examples import check_given, check_known_kwargs
from .loss import Objective, Weighing, as_integer, by_name, from_integer, warned_of_uneven_labels
from .state import StepState
from .targets import cut_target
from .transport import Meta

_Specs = tuple[Any, Any, Any]  # how positional arguments, keyword arguments and the target are cut
_STEPS_THAT_CHECK_LABELS = 8  # not more: an accelerator has to wait for the check
_KNOWN_CALLS = 64  # kinds of calls that are remembered
_NO_WEIGHT = as_integer(-1.0)


@dataclass(frozen=True)
class Given:
    """The arguments that a step was called with in this process."""

    training: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_kwargs: Mapping[str, Any] | None
    return_outputs: bool
    merge_spec: Any = None
    losses: list[Tensor] | None = None  # to be filled


class InputCutter:
    """Cuts the arguments of a step, and sends all ranks the sizes of the microbatches."""

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
        self.microbatches = plan.microbatches
        self.first = plan.placement.rank_of[0]
        self.last = plan.placement.rank_of[plan.stages - 1]
        self._steps_that_check_labels = _STEPS_THAT_CHECK_LABELS
        self._known: dict[Any, _Recipe] = {}

    def make(self, given: Given) -> dict[int, StepState]:
        """Return the state in which each rank that is here begins the step."""
        if self.info is None and given.kwargs:
            check_known_kwargs(self.stages, given.kwargs)
        calls = self._calls(given) if self.first in self.connection.ranks else None
        shared = self._share(given.training, calls)
        states = {}
        for rank in self.connection.ranks:
            state = StepState(given.training, shared.samples, shared.sizes, shared.seed)
            state.loss_kwargs, state.weights = given.loss_kwargs or {}, shared.weights
            state.keep_results, state.merge_spec = given.return_outputs, given.merge_spec
            if calls is not None and rank == self.first:
                state.args, state.kwargs, state.roots = calls.made.args, calls.made.kwargs, calls.roots
            elif self.info is None and given.kwargs:
                state.kwargs = self._own_kwargs(rank, given.kwargs, shared)
            if rank == self.last:
                self._give_target(state, given.target, shared)
            states[rank] = state
        return states

    def _calls(self, given: Given) -> _Calls:
        """Cut the arguments, on the rank of the first stage; those like arguments seen before without a check."""
        if not given.args and not given.kwargs:
            raise InputError(
                "step() got no input on the rank of the first stage: pass the arguments of the whole batch"
            )
        kind = _kind_of(given.args, given.kwargs) if self.specs == (None, None) else None
        recipe = None if kind is None else self._known.get(kind)
        if recipe is not None:
            return recipe.calls(given.args, given.kwargs)
        if self.info is not None:
            calls = cut_traced(self.info.call, given.args, given.kwargs, self.microbatches, self.specs)
        else:
            calls = cut_by_hand(given.args, given.kwargs, self.microbatches, self.specs)
            first = next(stage for stage in self.stages if stage.is_first)
            check_given(first, calls.args[0], calls.kwargs[0], calls.made.dims)
        if kind is not None:
            if len(self._known) >= _KNOWN_CALLS:
                self._known.clear()
            self._known[kind] = _Recipe.of(calls, given.kwargs)
        return calls

    def _share(self, training: bool, calls: _Calls | None) -> _Shared:
        """Share with all ranks the kind of the step, and a row of numbers for each microbatch."""
        width = 2 + (1 if self.info is None else len(self.info.call.dims))
        # Every rank draws a seed, and that of the first stage is used: so their generators stay in step.
        seed = 0 if self.seeds is None else self.seeds.next(training=training)
        numbers = None
        if calls is not None:
            numbers = [seed, int(calls.made.samples_first), int(calls.made.in_order)]
            weights = self._weights_of(calls, training)
            bits = [_NO_WEIGHT] * self.microbatches if weights is None else list(map(as_integer, weights))
            for samples, weight, sizes in zip(calls.samples, bits, calls.sizes, strict=True):
                numbers += [samples, weight, *sizes]
        kind = STEP if training else EVAL
        header = self.connection.share(kind, self.first, numbers, 3 + self.microbatches * width)
        seed, first, in_order, *rest = header
        bits = rest[1::width]
        return _Shared(
            rest[0::width],
            [tuple(rest[start + 2 : start + width]) for start in range(0, len(rest), width)],
            None if _NO_WEIGHT in bits else list(map(from_integer, bits)),
            bool(first),
            bool(in_order),
            seed,
        )

    def _weights_of(self, calls: _Calls, training: bool) -> list[float] | None:
        """Return the weights that only the rank of the first stage can know, from the arguments of the model."""
        if self.info is None or (self.weighing is not None and self.weighing.source != "arguments"):
            return None
        looks = training and self._steps_that_check_labels > 0 and self.objective.loss_fn is None
        if self.weighing is None and not looks:
            return None
        signature = self.info.call.signature
        named = [by_name(signature, *call) for call in zip(calls.args, calls.kwargs, strict=True)]
        if self.weighing is None:
            self._steps_that_check_labels = 0 if warned_of_uneven_labels(named) else self._steps_that_check_labels - 1
            return None
        return self.weighing.of(named, training=training)

    def _own_kwargs(self, rank: int, kwargs: Mapping[str, Any], shared: _Shared) -> list[dict[str, Any]]:
        """Cut the keyword arguments that a module cut by hand gets on its own rank."""
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

    def _give_target(self, state: StepState, target: Any, shared: _Shared) -> None:
        """Add what the loss needs, on the rank of the last stage."""
        state.in_order = shared.in_order
        self.objective.check(target, state.loss_kwargs, training=state.training)
        if target is not None:
            first, in_order = shared.samples_first, shared.in_order
            state.targets = cut_target(target, state.samples, self.target_spec, samples_first=first, in_order=in_order)
        if self.weighing is not None and self.weighing.source != "arguments":
            keywords = state.kwargs or [{}] * self.microbatches
            parts = state.targets if self.weighing.source == "target" else keywords
            state.weights = self.weighing.of(parts, training=state.training)


@dataclass(frozen=True)
class _Shared:
    """The numbers that all ranks know of a step."""

    samples: list[int]
    sizes: list[tuple[int, ...]]
    weights: list[float] | None
    samples_first: bool  # True if all inputs that are cut have their samples in dim 0
    in_order: bool  # True if the microbatches hold consecutive samples
    seed: int  # of the random numbers


# The calls of a microbatch.


@dataclass(frozen=True)
class _Calls:
    """The arguments of the microbatches of one step, on the rank of the first stage."""

    made: Microbatches
    samples: list[int]
    sizes: list[tuple[int, ...]]  # the symbolic dims, or one number that stands for all shapes
    roots: list[Mapping[int, Tensor]]  # the inputs of a traced model by their number

    @property
    def args(self) -> list[tuple[Any, ...]]:
        return self.made.args

    @property
    def kwargs(self) -> list[dict[str, Any]]:
        return self.made.kwargs


def cut_traced(
    call: TracedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]
) -> _Calls:
    """Cut the arguments of a traced model along the dim that the trace has as the batch."""
    dims = None if specs != (None, None) else batch_dims(call)
    if dims is None:
        made = split_by_specs(args, kwargs, chunks, *specs)
    else:
        made = split_by_dims(args, kwargs, chunks, dims, call.signature)
    roots = _bind_microbatches(call, made, args, kwargs)
    symbols = sorted(map(str, call.dims))
    known = [sizes_of(call.dims, root) for root in roots]
    return _calls(made, chunks, [tuple(each[symbol] for symbol in symbols) for each in known], roots)


def cut_by_hand(args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any]) -> _Calls:
    """Cut the arguments of modules that were cut by hand; all shapes together get one number."""
    made = split_by_specs(args, kwargs, chunks, *specs)
    sizes = [(_number_of_shapes(part, named),) for part, named in zip(made.args, made.kwargs, strict=True)]
    return _calls(made, chunks, sizes, [])


def _calls(
    made: Microbatches, chunks: int, sizes: Sequence[tuple[int, ...]], roots: list[Mapping[int, Tensor]]
) -> _Calls:
    samples = [1] * chunks if made.sizes is None else list(made.sizes)
    return _Calls(made, samples, list(sizes), roots)


def _number_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    leaves, _ = flatten((args, dict(kwargs)))
    shapes = [str(Meta.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    # Under autocast the stages give other dtypes.
    return zlib.crc32(repr((shapes, active_autocast())).encode())


_REMEDY = (
    "The trace holds for microbatches of the example's size: pass so large a batch; or, if the samples are in another "
    "dim, make the schedule with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(dim), or Replicate()"
)


def _bind_microbatches(
    call: TracedCall, made: Microbatches, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mapping[int, Tensor]]:
    """Return the inputs of the model in each microbatch, and raise on those that do not fit the trace."""
    bound: list[Mapping[int, Tensor]] = []
    for nth, (part, named) in enumerate(zip(made.args, made.kwargs, strict=True)):
        try:
            bound.append(bind_inputs(call, part, named))
        except InputError as error:
            if made.sizes is None or len(made.sizes) == 1:
                raise
            if call.dims:  # many sizes fit: if the whole call does not, its own error says more
                bind_inputs(call, args, kwargs)
            raise InputError(_misfit(error, made.sizes, made.dims, nth)) from error
    return bound


def _misfit(error: InputError, sizes: Sequence[int], dims: Sequence[int | None], nth: int) -> str:
    cut_dims = sorted({dim for dim in dims if dim is not None})
    along = f"dim {cut_dims[0]}" if len(cut_dims) == 1 else "their dims"
    return (
        f"microbatch {nth} does not fit, with {sizes[nth]} of the {sum(sizes)} samples that the call has along "
        f"{along}, in {len(sizes)} microbatches: {error}\n{_REMEDY}"
    )


# Calls seen before.

_HASHED_BY_VALUE = (bool, int, float, str, type(None))


def _kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what the checks and the cut of a call depend on; None for calls that are looked at every time.

    Those are calls with nested values, with one tensor twice, and with objects of other classes.
    """
    kinds: list[Any] = [len(args), active_autocast(), *kwargs]
    tensors = set()
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor and not value.is_nested and id(value) not in tensors:
            tensors.add(id(value))
            kinds.append((value.shape, value.dtype, value.layout))
        elif type(value) in _HASHED_BY_VALUE:
            kinds.append((type(value), value))
        else:
            return None
    return tuple(kinds)


@dataclass(frozen=True)
class _Recipe:
    """The way to cut calls of one kind: along the dims of their arguments, which are not nested."""

    made: Microbatches  # without the arguments
    samples: list[int]
    sizes: list[tuple[int, ...]]
    places: Mapping[int, int]  # from the number of a model input to the place of the argument that it is

    @classmethod
    def of(cls, calls: _Calls, kwargs: Mapping[str, Any]) -> _Recipe:
        """Take the recipe from a call that was checked and cut."""
        parts = [*calls.args[0], *(calls.kwargs[0][name] for name in kwargs)]
        place_of = {id(part): place for place, part in enumerate(parts)}
        places = {number: place_of[id(part)] for number, part in calls.roots[0].items()} if calls.roots else {}
        return cls(replace(calls.made, args=[], kwargs=[]), calls.samples, calls.sizes, places)

    def calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Calls:
        """Cut another call of the kind."""
        chunks, sizes = len(self.samples), self.made.sizes
        columns = [
            [value] * chunks if dim is None or sizes is None else cut_rows(value, dim, sizes)
            for value, dim in zip((*args, *kwargs.values()), self.made.dims, strict=True)
        ]
        rows = list(zip(*columns, strict=True))
        made = Microbatches(
            [row[: len(args)] for row in rows],
            [dict(zip(kwargs, row[len(args) :], strict=True)) for row in rows],
            sizes,
            self.made.dims,
            self.made.in_order,
        )
        roots: list[Mapping[int, Tensor]] = [
            {number: row[place] for number, place in self.places.items()} for row in rows if self.places
        ]
        return _Calls(made, self.samples, self.sizes, roots)
