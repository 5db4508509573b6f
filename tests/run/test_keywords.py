"""Misspelt keywords and options of the wrong type are reported as such, where they are given."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import InputError, PipelineStage, PipeWarning, PlannedSchedule, Schedule1F1B, pipe_split, pipeline
from pipecut import ScheduleInterleaved1F1B as Interleaved
from pipecut.schedule import plan_for


class Tagger(nn.Module):
    """A model with a loss of its own that takes any keyword, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, labels: Tensor, scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids)) * scale
        return {"loss": F.cross_entropy(logits.mT, labels), "logits": logits}


IDS = torch.ones(4, 3, dtype=torch.long)


def tagger_stages() -> list[PipelineStage]:
    pipe = pipeline(Tagger(), mb_kwargs={"ids": IDS, "labels": IDS}, num_stages=2)
    return [pipe.build_stage(index, "cpu") for index in range(2)]


def chain_stages() -> list[PipelineStage]:
    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.ones(2, 4),), num_stages=2)
    return [pipe.build_stage(index, "cpu") for index in range(2)]


@pytest.mark.parametrize("cls", [Schedule1F1B, Interleaved])
def test_a_misspelt_option_of_a_schedule(cls: Any) -> None:
    """Python said that n_microbatches was missing, not that n_microbatch was too much."""
    with pytest.raises(InputError, match=r"got the keyword 'n_microbatch', .*Did you mean 'n_microbatches'\?") as info:
        cls(chain_stages(), n_microbatch=4)
    assert isinstance(info.value, TypeError)
    with pytest.raises(InputError, match=r"got the keyword 'lossfn', .*Did you mean 'loss_fn'\?"):
        cls(chain_stages(), 2, lossfn=F.mse_loss)


def test_a_misspelt_option_of_a_planned_schedule() -> None:
    with pytest.raises(InputError, match=r"PlannedSchedule got the keyword 'scale_grad', .*'scale_grads'\?"):
        PlannedSchedule(chain_stages(), plan_for("1F1B", ranks=2, microbatches=2), scale_grad=False)


def test_a_schedule_of_the_users_own_may_take_other_options() -> None:
    class Named(Schedule1F1B):
        def __init__(self, *args: Any, title: str, **options: Any) -> None:
            super().__init__(*args, **options)
            self.title = title

    assert Named(chain_stages(), 2, F.mse_loss, title="mine", check_loss=False).title == "mine"
    with pytest.raises(InputError, match=r"Did you mean .*'title'"):
        Named(chain_stages(), 2, F.mse_loss, titel="mine")


def test_a_misspelt_keyword_of_step() -> None:
    schedule = Schedule1F1B(chain_stages(), 2, F.mse_loss)
    x = torch.ones(4, 4)
    with pytest.raises(InputError, match=r"neither step\(\) nor the forward of Sequential takes.*'target'"):
        schedule.step(x, targets=x)


def test_a_misspelt_keyword_that_the_model_would_swallow() -> None:
    """`**options` took `label=`, and the step warned of labels that were missing."""
    schedule = Schedule1F1B(tagger_stages(), 2)
    with pytest.raises(InputError, match=r"got the keyword 'label', .*Did you mean 'labels'\?"):
        schedule.step(ids=IDS, label=IDS)
    schedule.step(ids=IDS, labels=IDS)


def test_a_misspelt_keyword_of_modules_cut_by_hand() -> None:
    stages = [PipelineStage(nn.Linear(4, 4), index, 2, "cpu") for index in range(2)]
    with pytest.raises(InputError, match=r"got the keyword 'targets'.*Did you mean 'target'\?"):
        Schedule1F1B(stages, 2, F.mse_loss).step(torch.ones(4, 4), targets=torch.ones(4, 4))


def test_loss_fn_of_the_wrong_type() -> None:
    with pytest.raises(InputError, match=r"loss_fn must be a function of \(output, target\).*got 'mse' \(str\)"):
        Schedule1F1B(chain_stages(), 2, "mse")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"loss_fn is the class MSELoss: pass a loss of it, loss_fn=MSELoss\(\)"):
        Schedule1F1B(chain_stages(), 2, nn.MSELoss)


def test_schedules_and_stages_print_in_a_line() -> None:
    stages = chain_stages()
    assert repr(stages[1]) == ("PipelineStage(stage 1 of 2 of a traced Sequential: Sequential, 20 parameters, on cpu)")
    assert repr(Schedule1F1B(stages, 4)) == "Schedule1F1B(2 stages on 2 ranks in this process, 4 microbatches)"


def test_no_cut_is_one_stage_with_a_warning() -> None:
    """A user who forgot the marks trained one stage, and did not notice."""

    class Marked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            pipe_split()
            return torch.relu(y)

    x = torch.ones(2, 4)
    with pytest.warns(PipeWarning, match=r"found no place to cut Linear at, and made one stage.*num_stages=2"):
        assert pipeline(nn.Linear(4, 4), (x,)).num_stages == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipeWarning)
        assert pipeline(nn.Linear(4, 4), (x,), num_stages=1).num_stages == 1
        assert pipeline(Marked(4, 4), (x,)).num_stages == 2
