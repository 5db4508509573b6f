"""gradient_checkpointing_enable() before the cut: blocks run again in the backward, and gradients stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecut import PipelineStage, PlannedSchedule, pipeline, random_streams
from pipecut.schedule import plan_for
from pipecut.schedule.registry import FAMILIES
from tests.support.training import TIGHT, Gradients, assert_same_gradients, gradients_of

STAGES, MICROBATCHES, LAYERS, WORDS = 4, 4, 4, 32
SIZES = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Its dropout is on, in blocks and between them."""
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=LAYERS, n_head=2, n_positions=16, **SIZES)
    return transformers.GPT2LMHeadModel(config)


def loss_of(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def count_calls(stages: list[PipelineStage], name: str) -> list[str]:
    """Called modules of that name. A module that runs again may stop before its end, when all is there."""
    calls: list[str] = []
    for stage in stages:
        for path, module in stage.submod.named_modules():
            if path.endswith(f".{name}"):
                module.register_forward_pre_hook(lambda *_, path=path: calls.append(path))  # type: ignore[misc]
    return calls


def uncut_gradients(model: nn.Module, ids: Tensor) -> Gradients:
    """By microbatches; no graph is left alive."""
    model.zero_grad(set_to_none=True)
    for stream, part in zip(random_streams(MICROBATCHES), ids.chunk(MICROBATCHES), strict=True):
        with stream:
            loss = loss_of(model(part), part) / MICROBATCHES
        loss.backward()
    return gradients_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "reentrant"), [(llama, False), (gpt2, True)])
def test_checkpoints_of_published_models(make: Callable[[], Any], reentrant: bool) -> None:
    torch.manual_seed(0)
    model = make().double().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.randint(WORDS, (2 * MICROBATCHES, 6))
    torch.manual_seed(5)
    expected = uncut_gradients(model, ids)
    pipe = pipeline(model, (ids,), num_stages=STAGES)
    for name in ("1F1B", "ZBVZeroBubble"):
        stages = [pipe.build_stage(index, "cpu") for index in range(STAGES)]
        calls = count_calls(stages, "mlp")
        plan = plan_for(name, ranks=STAGES // FAMILIES[name].chunks, microbatches=MICROBATCHES)
        schedule = PlannedSchedule(stages, plan, loss_of, random_numbers="as_uncut")
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        schedule.step(ids, target=ids)
        assert_same_gradients(gradients_of(model), expected, TIGHT)
        assert len(set(calls)) == LAYERS
        assert len(calls) == 2 * LAYERS * MICROBATCHES
