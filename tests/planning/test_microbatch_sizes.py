"""Sizes of microbatches that the model cannot run are dropped, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecut
from pipecut import InputError
from pipecut.planning import measure as measuring
from pipecut.planning import search as prepared
from pipecut.split.cost.machine import Machine

MACHINE = Machine.nominal("cpu")
NORM = r"ValueError: Expected more than 1 value per channel when training, got input size torch.Size\(\[1, 16\]\)"


def normalised() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1)) for _ in range(4)))


def planned(net: nn.Module, **options: Any) -> pipecut.TrainingPlan:
    options = {"ranks": 2, "batch": 8, "schedules": ["1F1B"], "machine": MACHINE, "time_budget": 0.0} | options
    return pipecut.plan(net, torch.ones(4, 16), **options)


def reasons(plan: pipecut.TrainingPlan) -> dict[int, str]:
    return {each.choice.microbatches: each.reason for each in plan.alternatives}


def test_a_batch_norm_needs_two_samples() -> None:
    """Microbatches of 1 were planned, and the first step failed. Of 7 samples in 4 microbatches the last has one."""
    net = normalised()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    found = planned(net, batch=7, ranks=2, microbatch=[1, 2, 4])
    assert torch.equal(torch.get_rng_state(), random)
    assert found.microbatches == 2
    assert set(reasons(found)) == {4, 7}
    for reason in reasons(found).values():
        assert reason.startswith("the model does not run with 1 sample: ValueError: Expected more than 1 value")
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    found.build(loss_fn=nn.functional.mse_loss).step(torch.randn(7, 16), target=torch.randn(7, 16))
    assert planned(normalised().eval(), batch=4, ranks=2, microbatch=1).microbatch == 1


def test_no_size_is_left() -> None:
    message = (
        rf"^the model does not run with 1 sample: {NORM}. No other size of microbatches was to be tried: use a larger "
        "batch or fewer ranks, or say which sizes to try with microbatch=$"
    )
    with pytest.raises(InputError, match=message):
        planned(normalised(), ranks=4, batch=4)


def test_what_the_forward_of_the_model_decided() -> None:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if x.shape[0] % 2 == 0:
                x = torch.relu(x)
            return self.second(x)  # type: ignore[no-any-return]

    found = planned(Even(), microbatch=[1, 2, 4])
    assert reasons(found)[8].startswith("the model does not run with 1 sample: ")
    assert "Mod(batch, 2)" in reasons(found)[8]
    assert "slower" in reasons(found)[4] or found.microbatches == 4


@pytest.mark.parametrize("microbatch", [[1, 4], 1])
def test_measured_stages_that_fail(monkeypatch: pytest.MonkeyPatch, microbatch: Any) -> None:
    """What a run on stand-ins did not show is seen when the stages run."""
    monkeypatch.setattr(measuring, "_BENCHMARK_SECONDS", 0.01)
    monkeypatch.setattr(prepared, "failing_sizes", lambda *given: {})
    options: dict[str, Any] = {"cost": "measured", "microbatch": microbatch, "machine": None}
    if microbatch == 1:
        with pytest.raises(InputError, match=rf"the model does not run with 1 sample: {NORM}.* with microbatch=$"):
            planned(normalised(), **options)
    else:
        found = planned(normalised(), **options)
        assert found.microbatch == 4
        assert reasons(found)[8].startswith("the model does not run with 1 sample: ValueError: Expected more than 1")


def test_a_model_that_cannot_run_on_stand_ins_is_not_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (2.0 if float(x.detach().sum()) > 0 else 1.0)  # type: ignore[no-any-return]

    with pytest.warns(pipecut.PipeWarning, match="torch.export cannot trace all of"):
        assert planned(nn.Sequential(*(Looks() for _ in range(4))), microbatch=[1, 2]).microbatch in (1, 2)
