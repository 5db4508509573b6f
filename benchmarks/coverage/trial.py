"""One model: does it train uncut, and if so, does it train cut with the same gradients?"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, nn

import pipecut
from pipecut import PipeError

from .kinds import Batch, Kind
from .tiny import tiny_configs
from .upstream import gradients_by_upstream

MICROBATCHES = 2
TOLERANCE = 1e-3  # of a gradient's largest entry, in float32
Outcome = Literal["equal", "error", "wrong", "not uncut", "ties"]  # ties: equal once tied gradients are added up


@dataclass(frozen=True)
class Trial:
    """What came of one model. `cause` is empty where the gradients are equal."""

    kind: str
    model: str
    outcome: Outcome
    cause: str = ""
    upstream: Outcome | None = None  # None if it was not tried
    upstream_cause: str = ""


def try_model(
    kind: Kind,
    config_class: type[Any],
    model_class: type[Any],
    stages: int,
    schedule: str,
    trains_uncut: Callable[[], None],
    *,
    with_upstream: bool = False,
) -> Trial:
    """Cut, train a step, and compare with the uncut model, run microbatch by microbatch; also cut by upstream.

    `trains_uncut` is called when it is known that there is something to compare with.
    """
    name = model_class.__name__
    try:
        model, batch, expected = _trainable(kind, config_class, model_class)
    except Exception as error:  # noqa: BLE001 - it is not about our code then
        return Trial(kind.name, name, "not uncut", _in_short(error))
    trains_uncut()
    model.zero_grad(set_to_none=True)
    outcome, cause = _try_pipecut(model, batch, expected, stages, schedule)
    theirs, why = _try_upstream(model, batch, expected) if with_upstream else (None, "")
    return Trial(kind.name, name, outcome, cause, theirs, why)


def _try_pipecut(
    model: nn.Module, batch: Batch, expected: dict[str, Tensor | None], stages: int, schedule: str
) -> tuple[Outcome, str]:
    try:
        (example, _), *_ = _microbatches(batch)  # of a microbatch's size, as a forward may fix it (`len(x)`)
        pipe = pipecut.pipeline(model, (), example, num_stages=stages)
        built = [pipe.build_stage(index, "cpu") for index in range(stages)]
        made: Any = pipecut.get_schedule_class(schedule)
        _seed()
        made(built, MICROBATCHES, random_numbers="as_uncut").step(**batch, return_outputs=False)
    except PipeError as error:
        return "error", _in_short(error)
    except Exception as error:  # noqa: BLE001 - not one of our errors: worse, but not a wrong gradient
        return "error", f"NOT A PipeError: {_in_short(error)}"
    differing = _differing({name: parameter.grad for name, parameter in model.named_parameters()}, expected)
    return "wrong" if differing else "equal", ", ".join(differing[:3])


def _try_upstream(model: nn.Module, batch: Batch, expected: dict[str, Tensor | None]) -> tuple[Outcome, str]:
    """Cut by upstream, into two stages, which run in this process."""
    parts = [part for part, _ in _microbatches(batch)]
    model.zero_grad(set_to_none=True)
    _seed()
    try:
        found = gradients_by_upstream(model, parts, 1 / MICROBATCHES)
    except Exception as error:  # noqa: BLE001 - whatever it cannot do
        return "error", _in_short(error)
    differing = [
        name
        for name, wanted in expected.items()
        for got in found.get(name, [None])
        if _differing({name: got}, {name: wanted})
    ]
    added_up = {
        name: torch.stack([torch.zeros_like(wanted) if part is None else part for part in found[name]]).sum(0)
        for name, wanted in expected.items()
        if wanted is not None and name in found
    }
    if differing and not _differing({name: added_up.get(name) for name in expected}, expected):
        return "ties", ", ".join(differing[:3])
    return "wrong" if differing else "equal", ", ".join(differing[:3])


def _trainable(
    kind: Kind, config_class: type[Any], model_class: type[Any]
) -> tuple[nn.Module, Batch, dict[str, Tensor | None]]:
    """The first tiny model that trains uncut, twice in the same way, with its gradients."""
    problem: Exception | None = None
    for config in tiny_configs(config_class):
        try:
            _seed()
            model = model_class(config).train()
            batch = kind.batch(model)
            first, second = (_uncut_gradients(model, batch) for _ in range(2))
            if not any(gradient is not None and bool(gradient.any()) for gradient in first.values()):
                raise ValueError("no parameter has a gradient")
            if _differing(first, second):
                raise ValueError("two steps from the same seed differ")
            return model, batch, first
        except Exception as error:  # noqa: BLE001 - the next recipe may do
            problem = problem or error
    assert problem is not None
    raise problem


def _uncut_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor | None]:
    copied = copy.deepcopy(model)
    copied.zero_grad(set_to_none=True)
    _seed()
    for (microbatch, share), stream in zip(_microbatches(batch), pipecut.random_streams(MICROBATCHES), strict=True):
        with stream:
            loss = _own_loss(copied(**microbatch))
        (loss * share).backward()
    return {name: parameter.grad for name, parameter in copied.named_parameters()}


def _own_loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def _differing(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> list[str]:
    differing = []
    for name, wanted in expected.items():
        one, other = (torch.zeros(()) if value is None else value for value in (got[name], wanted))
        scale = float(other.abs().max())
        if not bool((one - other).abs().max() <= TOLERANCE * scale + 1e-6):
            differing.append(name)
    return differing


def _microbatches(batch: Batch) -> list[tuple[Batch, float]]:
    """Return the microbatches of a batch, with their shares of it; flags are the same for all."""
    rows = next(len(value) for value in batch.values() if isinstance(value, Tensor))
    size = rows // MICROBATCHES
    return [
        (
            {
                name: value[part * size : (part + 1) * size] if isinstance(value, Tensor) else value
                for name, value in batch.items()
            },
            size / rows,
        )
        for part in range(MICROBATCHES)
    ]


def _seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
