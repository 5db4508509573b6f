"""Training plans as JSON files: versioned, readable, and without code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..errors import InputError, PipeError
from ..files import read_json, write_text
from ..pipe_ir import read_example
from ..schedule import Costs, Dataflow, Link, Placement, Plan, simulate
from .choices import Choice, Source, largest_microbatch
from .replicas import WRAPPERS, Layout
from .training_plan import Alternative, TrainingPlan, fingerprint

_FORMAT, _VERSION = "pipecut training plan", 3
_BY_STAGE = (
    *("forward", "backward_input", "backward_weight"),
    *("memory_forward", "memory_backward_input", "memory_backward_weight"),
)
_COLLECTIVES = ("unshard", "reduce_grad")


def write_plan(plan: TrainingPlan, path: Path) -> None:
    """Write a plan to a file."""
    costs, scheduled = plan.report.costs, plan.schedule_plan
    assert plan.source is not None  # by construction: plan() and load() both know the model
    assert isinstance(costs.transfer, Link)
    assert isinstance(costs.message_bytes, dict)
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": {"class": plan.model_name, "fingerprint": plan.fingerprint},
        "inputs": _shapes(plan.source),
        "batch": plan.batch,
        "microbatch": plan.microbatch,
        "recompute": plan.recompute,
        "cuts": list(plan.cuts),
        "memory": list(plan.memory),
        "layout": asdict(plan.layout),
        "balance": plan.balance,
        "alternatives": [asdict(each) for each in plan.alternatives],
        "factorisations": [asdict(each) for each in plan.factorisations],
        "left out": list(plan.left_out),
        "times": plan.times,
        "executed": list(plan.executed),
        "schedule": {
            "name": scheduled.name,
            "rank of each stage": list(scheduled.placement.rank_of),
            "ties": [sorted(tie) for tie in scheduled.dataflow.ties],
            "actions": [[None if action is None else str(action) for action in row] for row in scheduled.actions],
        },
        "costs": {name: list(getattr(costs, name)) for name in _BY_STAGE}
        | {
            "full_backward": None
            if costs.full_backward is None
            else list(cast("tuple[float, ...]", costs.full_backward)),
            "link": {"latency": costs.transfer.latency, "bandwidth": costs.transfer.bandwidth},
            "message_bytes": [[*edge, size] for edge, size in costs.message_bytes.items()],
            "tie_bytes": list(costs.tie_bytes or ()),
        }
        | {name: getattr(costs, name) for name in _COLLECTIVES},
    }
    write_text(path, json.dumps(content, indent=1), InputError)


def read_plan(path: Path, source: Source) -> TrainingPlan:
    """Read a plan from a file, and check that it is one for this model."""
    content = _checked(path)
    try:
        plan = _plan_of(content, source)
    except (PipeError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}): make the plan again with pipecut.plan()"
        ) from error
    if fingerprint(source[0]) != plan.fingerprint:
        raise InputError(
            f"{path} was made for a {plan.model_name} with other parameters than this {type(source[0]).__name__} has: "
            "make a plan for it with pipecut.plan()"
        )
    expected, given = content["inputs"], _shapes(source)
    for name in expected.keys() | given.keys():
        if expected.get(name) != given.get(name):
            raise InputError(
                f"{path} was made with an example whose {name} is {_shape_text(expected.get(name))}, and here it is "
                f"{_shape_text(given.get(name))}: load it with an example like that, or make the plan again with "
                "pipecut.plan()"
            )
    return plan


def _shapes(source: Source) -> dict[str, list[int | None]]:
    """Return the shapes of the example's tensors by the name of the argument, with None for the samples."""
    example = read_example(*source)
    return {path: [None, *leaf.shape[1:]][: leaf.dim()] for path, _, leaf in example.named if isinstance(leaf, Tensor)}


def _shape_text(shape: Sequence[int | None] | None) -> str:
    """Return the text of a shape.

    >>> _shape_text([None, 3, 8]), _shape_text(None)
    ('a tensor of shape (any, 3, 8)', 'no tensor')
    """
    if shape is None:
        return "no tensor"
    return f"a tensor of shape ({', '.join('any' if size is None else str(size) for size in shape)})"


def _plan_of(content: dict[str, Any], source: Source) -> TrainingPlan:
    made_for, scheduled, costs = content["model"], content["schedule"], content["costs"]
    texts = {"class": made_for["class"], "fingerprint": made_for["fingerprint"], "name": scheduled["name"]}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InputError(f"{name!r} is {value!r} and not a text")
    placement = Placement.explicit(scheduled["rank of each stage"])
    plan = Plan.from_actions(
        scheduled["actions"],
        name=scheduled["name"],
        placement=placement,
        dataflow=Dataflow.chain(placement.stages, ties=scheduled["ties"]),
    ).validate()
    for name, check in _CHECKS.items():
        if not check.holds(content[name], plan):
            raise InputError(f"{name!r} is {content[name]!r} and not {check.what}")
    layout = Layout(**content["layout"])
    batch, microbatch = content["batch"] // layout.replicas, content["microbatch"]
    if batch < plan.microbatches or largest_microbatch(batch, plan.microbatches) != microbatch:
        raise InputError(f"{batch} samples in microbatches of {microbatch} are not the schedule's {plan.microbatches}")
    return TrainingPlan(
        model_name=made_for["class"],
        fingerprint=made_for["fingerprint"],
        batch=content["batch"],
        microbatch=microbatch,
        recompute=content["recompute"],
        cuts=tuple(content["cuts"]),
        report=simulate(
            plan,
            Costs(
                **{name: costs[name] for name in (*_BY_STAGE, *_COLLECTIVES)},
                full_backward=costs.get("full_backward"),
                transfer=Link(**costs["link"]),
                message_bytes={(maker, user): size for maker, user, size in costs["message_bytes"]},
                tie_bytes=costs["tie_bytes"],
            ),
        ),
        memory=tuple(content["memory"]),
        layout=layout,
        balance=content["balance"],
        alternatives=tuple(_alternative(**each) for each in content["alternatives"]),
        factorisations=tuple(_alternative(**each) for each in content["factorisations"]),
        left_out=tuple(content["left out"]),
        times=content["times"],
        executed=list(content["executed"]),
        source=source,
    )


def _alternative(choice: dict[str, Any], memory: list[float] | None, **others: Any) -> Alternative:
    choice["layout"] = Layout(**choice["layout"])
    return Alternative(Choice(**choice), memory=None if memory is None else tuple(memory), **others)


@dataclass(frozen=True)
class _Check:
    """Requirement for an entry of a file, in words and as a test of the entry with the plan of its schedule."""

    what: str
    holds: Callable[[Any, Plan], bool]


def _is_count(value: Any, plan: Plan) -> bool:
    return type(value) is int and value >= 1


def _are_cuts(value: Any, plan: Plan) -> bool:
    return isinstance(value, list) and len(value) == plan.stages - 1 and all(isinstance(each, str) for each in value)


def _are_sizes(value: Any, plan: Plan) -> bool:
    return isinstance(value, list) and len(value) == plan.ranks and all(map(_is_size, value))


def _are_alternatives(value: Any, plan: Plan) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and _is_alternative(each) for each in value)


def _is_alternative(entry: dict[str, Any]) -> bool:
    numbers = [entry.get("step_time"), entry.get("bubble"), entry.get("collectives"), *(entry.get("memory") or ())]
    return isinstance(entry.get("reason"), str) and all(number is None or _is_size(number) for number in numbers)


def _is_layout(value: Any, plan: Plan) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"ranks", "replicas", "wrapper", "inner"}
        and _is_count(value["replicas"], plan)
        and value["ranks"] == value["replicas"] * plan.ranks
        and value["inner"] in ("dp", "pp")
        and (value["wrapper"] in WRAPPERS) == (value["replicas"] > 1)
    )


def _are_texts(value: Any, plan: Plan) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_shapes(value: Any, plan: Plan) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shape, list) and all(size is None or (type(size) is int and size >= 0) for size in shape)
        for shape in value.values()
    )


_CHECKS = {
    "inputs": _Check("the shapes of the example by the names of arguments, with null for the samples", _are_shapes),
    "batch": _Check("a number of samples", _is_count),
    "microbatch": _Check("a number of samples", _is_count),
    "recompute": _Check("true or false", lambda value, plan: isinstance(value, bool)),
    "cuts": _Check("a list with the name of each cut between the stages of the schedule", _are_cuts),
    "memory": _Check("a list with the bytes of each rank", _are_sizes),
    "layout": _Check("a layout of pipelines with the ranks of the schedule", _is_layout),
    "times": _Check("a text", lambda value, plan: isinstance(value, str)),
    "executed": _Check("a list of ratios", lambda value, plan: isinstance(value, list) and all(map(_is_size, value))),
    "balance": _Check("a text", lambda value, plan: isinstance(value, str)),
    "alternatives": _Check("a list of alternatives", _are_alternatives),
    "factorisations": _Check("a list of alternatives", _are_alternatives),
    "left out": _Check("a list of texts", _are_texts),
}


def _checked(path: Path) -> dict[str, Any]:
    content = read_json(path, InputError, "a training plan")
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{path} is not a training plan: write one with plan.save()")
    version = content.get("version")
    if type(version) is not int or version != _VERSION:
        raise InputError(
            f"{path} has version {version!r} of the format, and this pipecut reads version {_VERSION}: "
            "make the plan again with pipecut.plan()"
        )
    return content
