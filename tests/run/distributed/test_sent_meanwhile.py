"""Results of a computation are sent while the next one runs: the timeline shows it, and the next may wait for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, ScheduleGPipe
from pipecut.schedule import Span
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

MICROBATCHES = 3


class Meeting:
    """Computations of two ranks that tell each other that they have begun, by files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def announce(self, name: str) -> None:
        (self.folder / name).touch()

    def await_(self, name: str) -> None:
        limit = time.monotonic() + 60
        while not (self.folder / name).exists():
            if time.monotonic() > limit:
                raise TimeoutError(f"{name} has not begun: what it needs was not sent")
            time.sleep(0.001)


class Sender(nn.Module):
    """The stage of one rank. Each forward of the first rank begins with the one before arrived at the second.

    The same holds for backwards from the second rank to the first.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rank, self.meeting = rank, meeting
        self.forwards = self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards = self._meet("F", self.forwards, sends=self.rank == 0)
        y = self.layer(x)
        y.register_hook(self._backward)
        return y

    def _backward(self, _: Tensor) -> None:
        self.backwards = self._meet("B", self.backwards, sends=self.rank == 1)

    def _meet(self, kind: str, number: int, *, sends: bool) -> int:
        if not sends:
            self.meeting.announce(f"{kind}{number}")
        elif number:
            self.meeting.await_(f"{kind}{number - 1}")
        return number + 1


def spans_of_a_step(rank: int, folder: str, transport: str) -> list[Span]:
    stage = PipelineStage(Sender(rank, Meeting(Path(folder))), rank, 2, "cpu")
    schedule = ScheduleGPipe(stage, MICROBATCHES, nn.functional.mse_loss, transport=transport)
    schedule.tracing = True
    x, y = torch.ones(2, 6, 4)
    schedule.step(x) if rank == 0 else schedule.step(target=y)
    return [span for span in schedule.trace() if span.action.is_compute]


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_outputs_and_gradients_are_sent_while_the_next_computation_runs(
    transport: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    spans = {
        str(span.action): span for part in two_ranks.run(spans_of_a_step, str(tmp_path), transport) for span in part
    }
    backwards = [[span for name, span in spans.items() if name.startswith(f"{stage}B")] for stage in (0, 1)]
    for number in range(MICROBATCHES - 1):
        assert spans[f"1F{number}"].start < spans[f"0F{number + 1}"].end
        assert backwards[0][number].start < backwards[1][number + 1].end
