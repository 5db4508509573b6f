"""A published mixture of experts: the losses of its routers, which lie in all stages, are in its own loss."""

from __future__ import annotations

import pytest
from torch import Tensor

from pipecut import PlannedSchedule, TensorChunkSpec, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.training import assert_same_gradients, gradients_of
from tests.support.transformers_models import ROWS, make

STAGES, MICROBATCHES = 4, 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the forward of 'model' sets self._output_capturing")
def test_router_losses_of_all_stages() -> None:
    model, batch = make("mixtral")
    model.config.output_router_logits = True  # type: ignore[union-attr, assignment]
    model.router_aux_loss_coef = 0.5  # type: ignore[assignment]
    pipe = pipeline(model, (), batch, num_stages=STAGES)
    stages = [pipe.build_stage(index, "cpu") for index in range(STAGES)]
    size = ROWS // MICROBATCHES
    losses: list[float] = []
    auxiliary: list[float] = []
    for part in range(MICROBATCHES):
        call: dict[str, Tensor] = {key: value.narrow(0, part * size, size) for key, value in batch.items()}
        output = model(**call)
        (output.loss / MICROBATCHES).backward()
        losses.append(output.loss.item())
        auxiliary.append(output.aux_loss.item())
    expected = gradients_of(model)
    assert all(gradient is not None for name, gradient in expected.items() if "gate" in name)
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        chunks = FAMILIES[name].chunks
        plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=MICROBATCHES)
        model.zero_grad(set_to_none=True)
        schedule = PlannedSchedule(stages, plan, output_merge_spec={"router_logits": TensorChunkSpec(0)})
        merged = schedule.step(**batch)
        assert_same_gradients(gradients_of(model), expected, 1e-5)
        assert schedule.mean_loss() == pytest.approx(sum(losses) / MICROBATCHES, rel=1e-6)
        assert merged.aux_loss.item() == pytest.approx(sum(auxiliary) / MICROBATCHES, rel=1e-6)
