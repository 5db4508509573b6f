"""Training plans as JSON: versioned, readable, and without anything that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..errors import InputError
from ..schedule.costs import Costs
from ..schedule.link import Link
from ..schedule.plan import Plan
from ..schedule.simulate import simulate
from .training_plan import TrainingPlan, fingerprint

FORMAT, VERSION = "pipecut training plan", 1
TIMES = ("forward", "backward_input", "backward_weight")
BY_STAGE = (*TIMES, "memory_forward", "memory_backward_input", "memory_backward_weight")


def write_plan(plan: TrainingPlan, path: Path) -> None:
    """Write a plan."""
    costs, scheduled = plan.report.costs, plan.schedule_plan
    assert isinstance(costs.transfer, Link)
    assert isinstance(costs.message_bytes, dict)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": {"class": plan.model_name, "fingerprint": plan.fingerprint},
        "batch": plan.batch,
        "microbatch": plan.microbatch,
        "recompute": plan.recompute,
        "cuts": list(plan.cuts),
        "memory": list(plan.memory),
        "schedule": {
            "name": scheduled.name,
            "rank of each stage": list(scheduled.placement.rank_of),
            "actions": [[None if action is None else str(action) for action in row] for row in scheduled.actions],
        },
        "costs": {name: list(getattr(costs, name)) for name in BY_STAGE}
        | {
            "full_backward": None
            if costs.full_backward is None
            else list(cast("tuple[float, ...]", costs.full_backward)),
            "link": {"latency": costs.transfer.latency, "bandwidth": costs.transfer.bandwidth},
            "message_bytes": [[*edge, size] for edge, size in costs.message_bytes.items()],
        },
    }
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_plan(path: Path, source: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]) -> TrainingPlan:
    """Read a plan, and check that it is one, and one for this model."""
    content = _checked(path)
    try:
        return _plan_of(path, content, source)
    except (KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error}): make the plan again with pipecut.plan()"
        ) from error


def _plan_of(
    path: Path, content: dict[str, Any], source: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
) -> TrainingPlan:
    model = source[0]
    made_for = content["model"]
    if fingerprint(model) != made_for["fingerprint"]:
        raise InputError(
            f"{path} was made for a {made_for['class']} with other parameters than this {type(model).__name__} has: "
            "make a plan for it with pipecut.plan()"
        )
    scheduled, costs = content["schedule"], content["costs"]
    plan = Plan.from_actions(
        scheduled["actions"], name=scheduled["name"], placement=scheduled["rank of each stage"]
    ).validate()
    return TrainingPlan(
        model_name=made_for["class"],
        fingerprint=made_for["fingerprint"],
        batch=content["batch"],
        microbatch=content["microbatch"],
        recompute=content["recompute"],
        cuts=tuple(content["cuts"]),
        report=simulate(
            plan,
            Costs(
                **{name: costs[name] for name in BY_STAGE},
                full_backward=costs.get("full_backward"),
                transfer=Link(**costs["link"]),
                message_bytes={(maker, user): size for maker, user, size in costs["message_bytes"]},
            ),
        ),
        memory=tuple(content["memory"]),
        source=source,
    )


def _checked(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no training plan: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path} is no training plan: write one with plan.save()")
    if content.get("version") != VERSION:
        raise InputError(
            f"{path} has version {content.get('version')!r} of the format, and this pipecut reads version {VERSION}: "
            "make the plan again with pipecut.plan()"
        )
    return content
