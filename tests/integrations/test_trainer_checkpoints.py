"""Checkpoints of PipelineTrainer: those of Trainer, resumed by either and under any number of stages."""

from __future__ import annotations

import functools
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecut import CheckpointError
from tests.integrations.trainer_cases import CASES, Trained, as_torchrun, assert_same, make_trainer, train
from tests.support.ranks import Ranks
from tests.support.sampling import sampled

pytestmark = pytest.mark.distributed

PIPELINE = {"microbatches": 4}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


@pytest.mark.slow
def test_a_checkpoint_is_resumed_by_trainer_and_by_other_numbers_of_stages(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    saved = two_ranks.run(functools.partial(train, pipeline=PIPELINE, **SAVES), "tied", folder)[0]
    resume = str(folder / "checkpoint-2")
    assert_same(train(0, "tied", tmp_path / "plain", resume=resume), saved, resumed=True)
    assert_same(train(0, "tied", tmp_path / "one", PIPELINE, resume), saved, resumed=True)


@pytest.mark.slow
def test_a_checkpoint_of_trainer_is_resumed_on_ranks_and_loads_by_from_pretrained(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import LlamaForCausalLM

    saved = train(0, "small", tmp_path / "plain", **SAVES)
    resume = str(tmp_path / "plain" / "checkpoint-4")
    options = {**SAVES, "save_steps": 5, "save_total_limit": 1}
    for found in two_ranks.run(
        functools.partial(train, pipeline=PIPELINE, resume=resume, **options), "small", tmp_path / "pipeline"
    ):
        assert_same(found, saved, resumed=True)
    assert [each.name for each in (tmp_path / "pipeline").glob("checkpoint-*")] == ["checkpoint-6"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "pipeline" / "checkpoint-6", dtype=torch.float64)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, found.weights[name]), name


class _StopsOnOneRank:
    """Makes a callback that stops the training at a step, on the second rank only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self) -> Any:
        from transformers import TrainerCallback

        class Stops(TrainerCallback):
            def on_step_end(inner, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: N805
                if args.process_index == 1 and state.global_step == self.step:
                    control.should_training_stop = True

        return Stops()


def best_model(rank: int, folder: Path, step: int) -> tuple[Trained, str, list[dict[str, float]]]:
    """Train so that the first evaluation has the highest loss, which counts as the best, and load that model."""
    options = {**SAVES, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer("small", folder, PIPELINE, callbacks=[_StopsOnOneRank(step)()], **options)
        trainer.train()
        best = trainer.state.best_model_checkpoint
        evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-12)
    return Trained([], weights, trainer.state.global_step), best, evaluated


@pytest.mark.slow
def test_all_ranks_stop_where_one_does_and_load_the_best_model(two_ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for found, best, evaluated in two_ranks.run(best_model, tmp_path, 4):
        assert found.steps == 4
        losses = [entry["eval_loss"] for entry in evaluated]
        assert losses[0] > losses[1]
        assert Path(best).name == "checkpoint-2"
        for name, weight in load_file(Path(best) / "model.safetensors").items():
            assert torch.equal(weight, found.weights[name]), name


class _Killed(Exception):  # noqa: N818
    """Ends a save in the middle."""


def killed_in_a_save(rank: int, folder: Path) -> list[str]:
    """Train until a save ends after its weights were written; return what is there then."""
    from pipecut.integrations.transformers import PipelineTrainer

    class Kills(PipelineTrainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if self.state.global_step == 4:
                raise _Killed
            super()._save_rng_state(output_dir)

    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer("tied", folder, PIPELINE, trainer=(Kills, Kills), **SAVES)
        with pytest.raises(_Killed):
            trainer.train()
    return sorted(each.name for each in folder.iterdir())


@pytest.mark.slow
def test_a_checkpoint_is_complete_or_not_there(two_ranks: Ranks, tmp_path: Path) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    for found in two_ranks.run(killed_in_a_save, tmp_path):
        assert found == [".checkpoint-4.unfinished", "checkpoint-2"]
    assert Path(str(get_last_checkpoint(str(tmp_path)))).name == "checkpoint-2"
    two_ranks.run(functools.partial(train, pipeline=PIPELINE, resume=True, **SAVES), "tied", tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()


def cannot_write(rank: int, folder: Path, who: int) -> str:
    """Train until one rank cannot write more than some bytes into a file; return the error of this one."""
    from pipecut.integrations.transformers import PipelineTrainer

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Full(PipelineTrainer):
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if rank == who and self.state.global_step == 4:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            super()._save_checkpoint(model, trial)

    with as_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer("small", folder, PIPELINE, trainer=(Full, Full), **SAVES)
        try:
            with pytest.raises(CheckpointError) as raised:
                trainer.train()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(raised.value)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_one_rank_cannot_write_is_an_error_on_all(who: int, two_ranks: Ranks, tmp_path: Path) -> None:
    """The first rank writes the weights, each its random numbers; the others waited until their connection was lost."""
    for text in two_ranks.run(cannot_write, tmp_path, who):
        assert f"on rank {who}: the checkpoint was not saved: " in text
        assert str(tmp_path) in text
        assert text.endswith("Checkpoints that were complete before still are")
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sampled(sorted(CASES.keys() - {"small"}), lambda case: case in ("adapters", "vision"), lambda case: True)
)
def test_every_kind_of_model_trains_and_resumes_as_with_trainer(case: str, four_ranks: Ranks, tmp_path: Path) -> None:
    """20 steps on 4 stages, then from the 10th on 2 stages."""
    options = {**SAVES, "save_steps": 10, "max_steps": 20, "eval_strategy": "steps", "eval_steps": 10}
    expected = train(0, case, tmp_path / "plain", **options)
    folder = tmp_path / "pipeline"
    for found in four_ranks.run(functools.partial(train, pipeline=PIPELINE, **options), case, folder):
        assert_same(found, expected)
    resume = str(folder / "checkpoint-10")
    with Ranks(2) as two:
        run = functools.partial(train, pipeline=PIPELINE, resume=resume, **options)
        for found in two.run(run, case, tmp_path / "resumed"):
            assert_same(found, expected, resumed=True)
