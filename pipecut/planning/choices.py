"""The choices of a plan: a schedule, the size of microbatches (of those that run), and recomputation of activations."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn

from ..errors import InputError, PlanError
from ..pipe_ir import TracedModel, bind_inputs, clone, flatten, stand_in_for_meta, unflatten
from ..schedule import FAMILIES, Op, Plan, plan_for
from ..split import ConcreteCosts, changed_state
from ..text import counted
from ..torch_internals import HOOK_DICTS, FakeTensorMode
from .replicas import Layout

Source = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # a model and an example of its arguments

# Schedules that train; the search finds out which of them fit.
TRAINING = tuple(family.name for family in FAMILIES.values() if family.training)


@dataclass(frozen=True)
class Choice:
    """One way to run a batch."""

    schedule: str
    microbatch: int  # samples
    microbatches: int
    recompute: bool
    layout: Layout

    def plan(self) -> Plan:
        """Return the plan of the schedule, for one pipeline."""
        return plan_for(self.schedule, ranks=self.layout.depth, microbatches=self.microbatches)


def all_choices(
    schedules: Sequence[str], counts: Sequence[int], batch: int, recompute: Sequence[bool], layouts: Iterable[Layout]
) -> Iterator[Choice]:
    """Yield every combination for the batch of one pipeline.

    If it is not divided evenly, a microbatch counts as the largest of them.
    """
    for layout in layouts:
        for count in counts:
            for name in schedules:
                for again in recompute:
                    yield Choice(name, largest_microbatch(batch, count), count, again, layout)


def in_flight(plan: Plan) -> list[float]:
    """Return the most microbatches that each stage holds: from a forward until the backward that frees it."""
    most = [0.0] * plan.stages
    held = [0] * plan.stages
    for row in plan.actions:
        for action in row:
            for leaf in () if action is None else action.leaves:
                change = _HELD.get(leaf.op, 0)
                held[leaf.stage] += change
                most[leaf.stage] = max(most[leaf.stage], held[leaf.stage])
    return most


# The balance counts a microbatch as a whole until its backward is done; what is left between the halves is finer.
_HELD = {Op.FORWARD: 1, Op.FULL_BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}


def recompute_options(traced: TracedModel, recompute: bool | Literal["auto"]) -> tuple[bool, ...]:
    """Return the values of recompute to try: not True if a forward changes buffers, which it would change twice."""
    changed = sorted(changed_state(traced))
    if changed and recompute is True:
        raise InputError(
            f"recompute=True runs forwards twice, and this model's forward changes {changed[0]!r}: it would be changed "
            "twice; put the model in evaluation mode, or leave recompute at 'auto'"
        )
    if recompute == "auto":
        return (False,) if changed else (False, True)
    return (bool(recompute),)


def check_request(ranks: int, batch: int, recompute: object, time_budget: object, speeds: object, cost: object) -> None:
    """Raise InputError for options that cannot be planned for."""
    if cost not in ("analytic", "measured"):
        raise InputError(f"cost must be 'analytic' or 'measured', got {cost!r}")
    if recompute not in (True, False, "auto"):
        raise InputError(f"recompute must be True, False or 'auto', got {recompute!r}")
    if not isinstance(time_budget, int | float) or not 0 <= time_budget < float("inf"):
        raise InputError(f"time_budget must be seconds, 0 or more, got {time_budget!r}")
    if speeds is not None and not (
        isinstance(speeds, Sequence) and all(isinstance(each, int | float) for each in speeds)
    ):
        raise InputError(f"speeds must be a list with a number for each rank, got {speeds!r}")
    for name, value in (("ranks", ranks), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, got {value!r}")
    if batch < ranks:
        raise InputError(
            f"a batch of {batch} has fewer samples than there are ranks ({ranks}): ranks would have nothing to do; use "
            "a larger batch, or fewer ranks"
        )


def known_schedules(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the schedules to try."""
    if names is None:
        return TRAINING
    if isinstance(names, str) or not names:
        raise PlanError(f"schedules={names!r}: give a list of names, such as ['1F1B', 'ZB-H1'].")
    unknown = [name for name in names if name not in TRAINING]
    if unknown:
        raise PlanError(f"There is no schedule '{unknown[0]}' that trains: choose among {', '.join(TRAINING)}.")
    return tuple(names)


# Sizes of microbatches: those to try, and those that the model cannot run.

_MOST_SIZES = 6
_NEAR = 0.25  # numbers of microbatches that differ by this much are as good
_SMALL_WASTE = 0.05  # an uneven division that is worse than an even one by so little is as good


def microbatch_counts(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int, ranks: int) -> list[int]:
    """Return the numbers of microbatches to try; `microbatch` is the option of plan()."""
    if "batch" not in {str(symbol) for symbol in traced.dims}:
        return [batch // _only_size(traced, microbatch, batch)]
    if microbatch is None:
        return _default_counts(batch, ranks)
    given = (
        [microbatch] if isinstance(microbatch, int) else list(microbatch) if isinstance(microbatch, Sequence) else []
    )
    wrong = [size for size in given if type(size) is not int or size < 1 or size > batch]
    if wrong or not given:
        raise InputError(f"microbatch={microbatch!r}: give sizes from 1 to the batch, {batch}")
    return list(dict.fromkeys(-(-batch // size) for size in given))


def _only_size(traced: TracedModel, microbatch: int | Sequence[int] | None, batch: int) -> int:
    """Return the size of microbatches for which the trace holds."""
    fixed = traced.hints.get("batch")
    example = next((entry.spec for entry in traced.inputs if entry.spec is not None and entry.spec.shape), None)
    size = int(example.shape[0]) if example is not None else fixed or 1
    if microbatch not in (None, size):
        raise InputError(
            f"microbatch={microbatch!r}: the trace holds for microbatches of {size} samples only, as in the example"
        )
    if batch % size:
        raise InputError(
            f"the trace holds for microbatches of {size} samples only, and a batch of {batch} is not a multiple of "
            "that: pass an example of another size"
        )
    return size


def largest_microbatch(batch: int, count: int) -> int:
    """Return the samples of the largest of `count` microbatches; the smallest has one less, if any has.

    >>> largest_microbatch(10, 4)
    3
    """
    return -(-batch // count)


def _default_counts(batch: int, ranks: int) -> list[int]:
    """Return numbers of microbatches to try: the ranks, twice that, four times that... up to the batch.

    Each is replaced by one near it that divides the batch about evenly, a multiple of the ranks if possible.

    >>> _default_counts(64, 4)
    [4, 8, 16, 32, 64]
    >>> _default_counts(251, 4)
    [4, 8, 16, 64, 128, 251]
    """
    doubled = itertools.takewhile(lambda count: count < batch, (ranks * 2**power for power in itertools.count()))
    found = sorted({_near(count, batch, ranks) for count in doubled} | {batch})
    if len(found) <= _MOST_SIZES:
        return found
    steps = [round(nth * (len(found) - 1) / (_MOST_SIZES - 1)) for nth in range(_MOST_SIZES)]
    return [found[step] for step in steps]


def _near(count: int, batch: int, ranks: int) -> int:
    """Return the number of microbatches near one with the least waste: time that smaller microbatches leave idle."""

    def quality(other: int) -> tuple[float, bool, int]:
        waste = other * largest_microbatch(batch, other) / batch - 1
        return (max(waste, _SMALL_WASTE), other % ranks > 0, abs(other - count))

    near = range(max(ranks, math.ceil(count * (1 - _NEAR))), min(batch, math.floor(count * (1 + _NEAR))) + 1)
    return min(near, key=quality)


# Sizes that the model cannot run.


def failing_sizes(traced: TracedModel, source: Source, sizes: Iterable[int]) -> dict[int, str]:
    """Return the numbers of samples that the model cannot run, each with the reason.

    They are tried on fake tensors, which hold no data. A size is kept if such a run shows nothing.
    """
    example = traced.hints.get("batch")
    others = sorted(set(sizes) - {example})
    found = {size: fault for size in others for fault in [_broken_condition(traced, size)] if fault}
    unchecked = [size for size in others if size not in found]
    if example is not None and unchecked:
        trial = _FakeForward(traced, source)
        if trial.failure(example) is None:  # otherwise the model cannot run on fake tensors at all
            found |= {size: fault for size in unchecked for fault in [trial.failure(size)] if fault}
    return {size: f"the model does not run with {counted(size, 'sample')}: {why}" for size, why in found.items()}


def no_size_error(reasons: Iterable[str]) -> InputError:
    """Return the error for a model that can run no size."""
    return InputError(
        f"{'; '.join(dict.fromkeys(reasons))}. No other size of microbatches was to be tried: use a larger batch or "
        "fewer ranks, or say which sizes to try with microbatch="
    )


def _broken_condition(traced: TracedModel, size: int) -> str | None:
    """Return a decision of the model's forward that holds for the example, and not for this size."""
    sizes = {**traced.hints, "batch": size}
    values = {symbol: sizes[str(symbol)] for symbol in traced.dims if str(symbol) in sizes}
    for condition in traced.conditions:
        # A module that stays whole decides anew; the model itself is cut, and does not.
        if condition.span_begin == traced.root.begin and condition.holds.subs(values) == sympy.false:
            return f"{condition.source} was traced with {condition}"
    return None


class _FakeForward:
    """Forward of a copy of the model whose tensors hold no data."""

    def __init__(self, traced: TracedModel, source: Source) -> None:
        self.traced = traced
        model, self.args, self.kwargs = source
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.model = clone(model)
        stand_in_for_meta(self.model, (), self.mode)
        for module in self.model.modules():
            for name in HOOK_DICTS:
                getattr(module, name).clear()

    def failure(self, size: int) -> str | None:
        """Return the error of a forward with `size` samples, or None."""
        try:
            with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings(), self.mode:
                warnings.simplefilter("ignore")
                args, kwargs = self._call(size)
                self.model(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return None

    def _call(self, size: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        weigh = ConcreteCosts(self.traced, {**self.traced.hints, "batch": size})
        shapes = {
            id(value): [int(weigh.number(dim)) for dim in spec.shape]
            for index, value in bind_inputs(self.traced.call, self.args, self.kwargs).items()
            for spec in [self.traced.operations[index].spec]
            if spec is not None
        }
        leaves, structure = flatten((self.args, self.kwargs))
        args, kwargs = unflatten(structure, [_sized(leaf, shapes.get(id(leaf))) for leaf in leaves])
        return args, kwargs


def _sized(leaf: Any, shape: list[int] | None) -> Any:
    if not isinstance(leaf, Tensor) or shape is None:
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="cpu")
