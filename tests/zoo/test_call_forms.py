"""Published models, traced with labels: evaluated without them, and trained with other flags, as a new user would."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pipecut import PipeWarning, Schedule1F1B, pipeline
from tests.support.training import Problem, assert_same_gradients, cut_step, uncut_step
from tests.support.transformers_models import make

WITHIN = 1e-6  # some of these models compute their loss in single precision


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_without_labels_and_with_hidden_states(name: str) -> None:
    model, batch = make(name)
    model = model.double()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    pipe = pipeline(model, mb_kwargs=batch, num_stages=2)
    schedule = Schedule1F1B([pipe.build_stage(index, "cpu") for index in range(2)], 2)
    words: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if name == "t5":
        words["decoder_input_ids"] = batch["labels"]
    known = []
    for _ in range(2):
        output = schedule.eval(**words)
        with torch.no_grad():
            expected = model(**words)
        assert "loss" not in output
        torch.testing.assert_close(output["logits"], expected["logits"], rtol=WITHIN, atol=WITHIN)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PipeWarning)  # the models note that they have installed hooks
            for call in (batch, {**batch, "output_hidden_states": True}):
                problem = Problem(model, (), None, lambda output, _: output["loss"], call)
                step = cut_step(schedule, problem)
                assert_same_gradients(step.gradients, uncut_step(problem).gradients, WITHIN)
        known.append(len(pipe.variants))
    # One per form of call; where steps do not send a cache, one more for eval(), which returns it.
    forms = 4 if name in ("gpt2", "llama") else 3
    assert known == [forms, forms]
