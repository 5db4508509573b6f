"""Published models with adapters of peft, and with frozen embeddings and lower layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from pipecut import PlannedSchedule, pipeline
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.run.gradient_traffic import watched
from tests.support.training import assert_same_gradients, gradients_of
from tests.support.transformers_models import make

STAGES, MICROBATCHES = 4, 3
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
LAYERS = {"gpt2": ("h", ["c_attn", "c_proj"]), "llama": ("layers", ["q_proj", "v_proj", "down_proj"])}


def with_adapters(name: str, layers: list[int]) -> tuple[nn.Module, dict[str, Tensor]]:
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    model, batch = make(name)
    pattern, targets = LAYERS[name]
    options: Any = {"fan_in_fan_out": True} if name == "gpt2" else {}
    config = peft.LoraConfig(
        r=2,
        target_modules=targets,
        layers_to_transform=layers,
        layers_pattern=pattern,
        init_lora_weights=False,
        **options,
    )
    return peft.get_peft_model(model.double(), config), batch


def with_frozen_bottom() -> tuple[nn.Module, dict[str, Tensor]]:
    model, batch = make("gpt2")
    bottom = ("wte", "wpe", "h.0.", "h.1.")
    for key, parameter in model.named_parameters():
        if any(part in key for part in bottom):
            parameter.requires_grad_(False)
    return model.double(), batch


def assert_trains_as_uncut(model: nn.Module, batch: dict[str, Tensor], lowest_layer: int) -> None:
    model(**batch).loss.backward()
    expected = gradients_of(model)
    assert any(gradient is None for gradient in expected.values())
    pipe = pipeline(model, (), batch, num_stages=STAGES)
    held = [{key for key, _ in stage.named_parameters()} for stage in pipe.stages]
    trained = {key for key, gradient in expected.items() if gradient is not None}
    lowest = min(index for index, keys in enumerate(held) if keys & trained)
    assert (lowest > 0) == (lowest_layer > 0)
    stages = [pipe.build_stage(index, "cpu") for index in range(STAGES)]
    for name in SCHEDULES:
        chunks = FAMILIES[name].chunks
        plan = plan_for(name, ranks=STAGES // chunks, chunks=chunks, microbatches=MICROBATCHES)
        model.zero_grad(set_to_none=True)
        with watched() as traffic:
            PlannedSchedule(stages, plan).step(**batch, return_outputs=False)
        assert_same_gradients(gradients_of(model), expected, 1e-9)
        traffic.assert_none_below(lowest)
        assert len(traffic.backwards) == MICROBATCHES * (STAGES - lowest), name


@pytest.mark.slow
def test_adapters_in_all_layers() -> None:
    assert_trains_as_uncut(*with_adapters("gpt2", [0, 1, 2, 3]), lowest_layer=0)


@pytest.mark.slow
def test_adapters_in_the_upper_layers() -> None:
    assert_trains_as_uncut(*with_adapters("llama", [2, 3]), lowest_layer=2)


@pytest.mark.slow
def test_frozen_embeddings_and_lower_layers() -> None:
    assert_trains_as_uncut(*with_frozen_bottom(), lowest_layer=2)
