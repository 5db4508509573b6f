"""PipelineTrainer beside Trainer on one process: the same losses, norms, metrics and weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.trainer_cases import accuracy, assert_same, train
from tests.support.ranks import Ranks

pytestmark = pytest.mark.distributed

PIPELINE = {"microbatches": 4}


def test_a_causal_model_trains_as_with_trainer(two_ranks: Ranks, tmp_path: Path) -> None:
    """Padded batches of all lengths, accumulated gradients, clipping, evaluation with metrics; weights at the end."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps"}
    options |= {"eval_steps": 3, "compute_metrics": accuracy}
    expected = train(0, "small", tmp_path / "plain", **options)
    run = functools.partial(train, pipeline=PIPELINE, **options)
    for found in two_ranks.run(run, "small", tmp_path / "pipeline"):
        assert_same(found, expected)
