"""pipeline(): trace, decide where to cut, cut."""

from __future__ import annotations

from typing import Any

from torch import nn

from .pipe_ir.pipe import Pipe
from .pipe_ir.trace import trace
from .split import SplitPoint, check_split_spec, cut_model, cuts_by_marks, cuts_by_spec


def pipeline(module: nn.Module, mb_args: tuple[Any, ...], mb_kwargs: dict[str, Any] | None = None,
             split_spec: dict[str, SplitPoint] | None = None, split_policy: Any = None, _keep: bool = True) -> Pipe:
    if split_spec is not None:
        check_split_spec(module, split_spec)
    traced = trace(module, mb_args, mb_kwargs)
    plan = cuts_by_spec(traced, split_spec) if split_spec else cuts_by_marks(traced)
    return cut_model(traced, plan, keep_modules=_keep)
