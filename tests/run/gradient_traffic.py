"""Which stages run a backward, and which gradients go from rank to rank, while a schedule trains in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipecut.run.mail import Mail
from pipecut.stage import stage as stage_module


@dataclass
class Traffic:
    """What was seen."""

    backwards: list[str] = field(default_factory=list)  # of one stage and microbatch each
    gradients: set[tuple[int, int]] = field(default_factory=set)  # from which stage to which

    def assert_none_below(self, stage: int) -> None:
        """No gradient goes to the stages below."""
        assert self.gradients, "gradients go from stage to stage"
        below = {ends for ends in self.gradients if ends[1] < stage}
        assert not below, f"gradients go to stages below {stage}: {sorted(below)}"


@contextmanager
def watched() -> Iterator[Traffic]:
    """Watch a step."""
    traffic = Traffic()
    give_back = Mail.give_back

    def seen(self: Mail, stage: int, source: int, microbatch: int, *rest: Any) -> None:
        traffic.gradients.add((stage, source))
        give_back(self, stage, source, microbatch, *rest)

    def counted(function: Any) -> Any:
        def run(*args: Any) -> Any:
            traffic.backwards.append(function.__name__)
            return function(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mail, "give_back", seen)
        for name in ("full_backward", "input_backward"):
            patch.setattr(stage_module, name, counted(getattr(stage_module, name)))
        yield traffic
