"""Whether the model runs with other numbers of samples than the example has: tried on stand-ins, which hold no data."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import InputError
from ..pipe_ir.clone import HOOK_DICTS, clone
from ..pipe_ir.fake import stand_in_for_meta
from ..pipe_ir.inputs import bind_inputs
from ..pipe_ir.structure import flatten, unflatten
from ..pipe_ir.traced import TracedModel
from ..split.cost import Weights
from .training_plan import Source


def refused_sizes(traced: TracedModel, source: Source, sizes: Iterable[int]) -> dict[int, str]:
    """Numbers of samples that the model cannot take, and why. What a run on stand-ins cannot tell is not refused."""
    example = traced.hints.get("batch")
    others = sorted(set(sizes) - {example})
    found = {size: fault for size in others for fault in [_broken_condition(traced, size)] if fault}
    unsettled = [size for size in others if size not in found]
    if example is not None and unsettled:
        trial = _Trial(traced, source)
        if trial.failure(example) is None:  # otherwise the model cannot run on stand-ins at all
            found |= {size: fault for size in unsettled for fault in [trial.failure(size)] if fault}
    return {size: f"the model does not run with {size} sample{'s' * (size > 1)}: {why}" for size, why in found.items()}


def nothing_runs(reasons: Iterable[str]) -> InputError:
    """The error where no size is left."""
    return InputError(
        f"{'; '.join(dict.fromkeys(reasons))}. No other size of microbatches was to be tried: use a larger batch or "
        "fewer ranks, or say which sizes to try with microbatch="
    )


def _broken_condition(traced: TracedModel, size: int) -> str | None:
    """What the model's own forward decided for the example, and would decide otherwise."""
    sizes = {**traced.hints, "batch": size}
    values = {symbol: sizes[str(symbol)] for symbol in traced.dims if str(symbol) in sizes}
    for condition in traced.conditions:
        # A module that stays whole decides anew; the model itself is cut, and does not.
        if condition.span_begin == traced.root.begin and condition.holds.subs(values) == sympy.false:
            return f"{condition.source} was traced with {condition}"
    return None


class _Trial:
    """Forwards of a copy of the model whose tensors hold no data."""

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
        """What a forward with so many samples fails with."""
        try:
            with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings(), self.mode:
                warnings.simplefilter("ignore")
                args, kwargs = self._call(size)
                self.model(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return None

    def _call(self, size: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        weigh = Weights(self.traced, {**self.traced.hints, "batch": size})
        shapes = {
            id(value): [int(weigh.number(dim)) for dim in spec.shape]
            for index, value in bind_inputs(self.traced.call, self.args, self.kwargs).items()
            for spec in [self.traced.steps[index].spec]
            if spec is not None
        }
        leaves, structure = flatten((self.args, self.kwargs))
        args, kwargs = unflatten(structure, [_sized(leaf, shapes.get(id(leaf))) for leaf in leaves])
        return args, kwargs


def _sized(leaf: Any, shape: list[int] | None) -> Any:
    if not isinstance(leaf, Tensor) or shape is None:
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="cpu")
