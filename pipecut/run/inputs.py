"""The arguments of a step, cut into microbatches, as the state of each rank that is in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError, warn
from ..pipe_ir import PipeInfo
from ..schedule import Plan
from ..stage import PipelineStage, StepSeeds
from .calls import OTHER_DIM, Calls, Recipe, cut_by_hand, cut_target, cut_traced, kind_of, size_for, untied_text
from .connection import EVAL, STEP, Connection
from .examples import check_given, check_known_kwargs, check_traced_keywords
from .loss import Objective, Weighing, as_integer, by_name, from_integer, warned_of_uneven_labels
from .state import StepState
from .variants import NEW, Forms, first_microbatch

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
        forms: Forms,
        *,
        fewer: bool,
    ) -> None:
        self.info = info
        self.stages = stages
        self.seeds = seeds
        self.forms = forms
        self.specs = specs[:2]
        self.target_spec = specs[2]
        self.connection = connection
        self.objective = objective
        self.weighing = weighing
        self.microbatches = plan.microbatches
        self.fewer = fewer  # True: too few samples make fewer microbatches
        self._warned_of_few = self._warned_of_untied = False
        self.first = plan.placement.rank_of[0]
        self.last = plan.placement.rank_of[plan.stages - 1]
        self._steps_that_check_labels = _STEPS_THAT_CHECK_LABELS
        self._known: dict[Any, Recipe] = {}
        self._keywords: set[str] = set()  # that were checked

    def make(self, given: Given) -> dict[int, StepState]:
        """Return the state in which each rank that is here begins the step."""
        if self.info is None and given.kwargs:
            check_known_kwargs(self.stages, given.kwargs)
        elif self.info is not None and not self._keywords.issuperset(given.kwargs):
            check_traced_keywords(self.info.call, given.kwargs)
            self._keywords.update(given.kwargs)
        calls = self._calls(given) if self.first in self.connection.ranks else None
        if calls is not None and given.training:
            self._warn_of_few(calls)
        shared = self._share(given.training, calls)
        self.connection.seed = shared.seed
        states = {}
        for rank in self.connection.ranks:
            state = StepState(given.training, shared.samples, shared.sizes, shared.seed, shared.form, shared.whole)
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

    def _calls(self, given: Given) -> Calls:
        """Cut the arguments, on the rank of the first stage; those like arguments seen before without a check."""
        if not given.args and not given.kwargs:
            raise InputError(
                "step() got no input on the rank of the first stage: pass the arguments of the whole batch"
            )
        kind = kind_of(given.args, given.kwargs) if self.specs == (None, None) else None
        recipe = None if kind is None else self._known.get(kind)
        if recipe is not None:
            return recipe.calls(given.args, given.kwargs)
        if self.info is not None:
            form = self._form_of(given)
            info = self.forms.info(form)
            assert info is not None  # a traced model
            calls = cut_traced(info.call, given.args, given.kwargs, self.microbatches, self.specs, fewer=self.fewer)
            calls = replace(calls, form=form)
        else:
            calls = cut_by_hand(given.args, given.kwargs, self.microbatches, self.specs, fewer=self.fewer)
            first = next(stage for stage in self.stages if stage.is_first)
            check_given(first, calls.args[0], calls.kwargs[0], calls.made.dims)
        if calls.untied and len(calls.samples) > 1 and not self._warned_of_untied:
            self._warned_of_untied = True
            warn(untied_text(calls.untied, calls.samples))
        if kind is not None:
            if len(self._known) >= _KNOWN_CALLS:
                self._known.clear()
            self._known[kind] = Recipe.of(calls, given.kwargs)
        return calls

    def _warn_of_few(self, calls: Calls) -> None:
        """Warn once of a step that has fewer microbatches than the schedule: it is right, and slower than planned."""
        total, count = sum(calls.samples), len(calls.samples)
        if count == self.microbatches or self._warned_of_few:
            return
        self._warned_of_few = True
        why, remedy = "", "make a schedule with fewer microbatches"
        if calls.fixed:
            why = f", for {calls.fixed}, and the trace holds for microbatches of exactly {calls.samples[0]}"
            size = size_for(total, self.microbatches, fewer=self.fewer)
            remedy += f"; or, if the model runs with {size}, call pipeline() with an example of {size}" if size else ""
            remedy += f"; {OTHER_DIM}"
        warn(
            f"the batch has {total} {'sample' if total == 1 else 'samples'}, and the schedule {self.microbatches} "
            f"microbatches: the step runs {count}, and its ranks are idle for longer{why}. "
            f"If this is not the last batch of a data loader, pass more samples, or {remedy}"
        )

    def _form_of(self, given: Given) -> int:
        """Return the form of a call; one that is new is traced on all ranks."""
        form = self.forms.find(given.args, given.kwargs)
        if form is None:
            assert self.info is not None  # a traced model
            call = first_microbatch(self.info.call, given.args, given.kwargs, self.microbatches, self.specs)
            if self.connection.in_process:
                self.forms.add(call)
            else:
                description = self.forms.description(call)
                self.connection.share(STEP if given.training else EVAL, self.first, [NEW])
                self.forms.add_on_ranks(description)
            form = self.forms.find(given.args, given.kwargs)
            assert form is not None  # it was traced for this call
        return form

    def _share(self, training: bool, calls: Calls | None) -> _Shared:
        """Share with all ranks the kind of the step, and a row of numbers for each microbatch."""
        # Every rank draws a seed, and that of the first stage is used: so their generators stay in step.
        seed = 0 if self.seeds is None else self.seeds.next(training=training)
        numbers = None
        if calls is not None:
            whole = int(not training and self.forms.can_return_all(calls.form))
            numbers = [calls.form, seed, int(calls.made.samples_first), int(calls.made.in_order), whole]
            weights = self._weights_of(calls, training)
            bits = [_NO_WEIGHT] * len(calls.samples) if weights is None else list(map(as_integer, weights))
            for samples, weight, sizes in zip(calls.samples, bits, calls.sizes, strict=True):
                numbers += [samples, weight, *sizes]
        kind = STEP if training else EVAL
        header = self.connection.share(kind, self.first, numbers)
        while header[0] == NEW:
            self.forms.add_on_ranks(None)
            header = self.connection.share(kind, self.first, numbers)
        form, seed, first, in_order, whole, *rest = header
        info = self.forms.info(form)
        width = 2 + (1 if info is None else len(info.call.dims))
        bits = rest[1::width]
        return _Shared(
            rest[0::width],
            [tuple(rest[start + 2 : start + width]) for start in range(0, len(rest), width)],
            None if _NO_WEIGHT in bits else list(map(from_integer, bits)),
            bool(first),
            bool(in_order),
            seed,
            form,
            bool(whole),
        )

    def _weights_of(self, calls: Calls, training: bool) -> list[float] | None:
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
        own = cut_by_hand((), kwargs, len(shared.samples), (None, self.specs[1]), fewer=self.fewer)
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
            keywords = state.kwargs or [{}] * len(state.samples)
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
    form: int  # of the call
    whole: bool  # True if all outputs are sent
