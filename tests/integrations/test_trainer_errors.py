"""Arguments that PipelineTrainer cannot serve: an error before anything is trained, which says what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipecut import InputError, PipeError, PipeWarning, PlanError, pipeline
from tests.integrations.trainer_cases import as_torchrun, make_trainer, padded, sentences
from tests.support.ranks import Ranks

pytest.importorskip("accelerate", reason="the extra `hf` is not installed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": True}, "does not take fsdp: a stage is the shard of a rank"),
        ({"torch_compile": True}, r"does not take torch_compile: leave it out; compile the blocks of the model before"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: .* set per_device_train_batch_size"),
        ({"use_cache": True}, "use_cache: a key/value cache cannot cross a cut"),
        ({"fp16_full_eval": True}, "fp16_full_eval: they convert the model, .*: pass bf16=True or fp16=True"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches: every rank reads the batches"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance.*: use 'random' or 'group_by_length'"),
    ],
)
def test_arguments_of_trainer_that_do_not_go_with_a_pipeline(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        make_trainer("causal", tmp_path, {}, **options)


def test_deepspeed_and_generate_are_refused() -> None:
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    from pipecut.integrations.transformers.arguments import check_arguments

    args = TrainingArguments("unused", use_cpu=True)
    args.deepspeed = "config.json"  # to pass it would need deepspeed
    with pytest.raises(InputError, match="does not take deepspeed: the stages are trained by pipecut"):
        check_arguments(args)
    with pytest.raises(InputError, match=r"predict_with_generate: .* call trainer.model.generate\(\) after training"):
        check_arguments(Seq2SeqTrainingArguments("unused", use_cpu=True, predict_with_generate=True))


def test_arguments_of_the_pipeline() -> None:
    from pipecut.integrations.transformers import PipelineArguments

    with pytest.raises(InputError, match=r"PipelineArguments\(microbatches=0\): it must be an integer of at least 1"):
        PipelineArguments(microbatches=0)
    with pytest.raises(InputError, match=r"PipelineArguments\(timeout=-1\): it must be a number of seconds above 0"):
        PipelineArguments(timeout=-1)
    with pytest.raises(PlanError, match="1F1B"):
        PipelineArguments(schedule="1F1")
    with pytest.raises(InputError, match="ForwardOnly trains nothing: choose another schedule"):
        PipelineArguments(schedule="ForwardOnly")
    with pytest.raises(InputError, match="schedule='auto', outputs='all'.*name a schedule"):
        PipelineArguments(schedule="auto", outputs="all")
    with pytest.raises(InputError, match="has 2 stages on each rank; pass a multiple of 2"):
        PipelineArguments(stages=3, schedule="ZBVZeroBubble").placement(2)
    with pytest.raises(InputError, match="on 4 ranks would be 2 pipelines, and 'auto' plans for one: name a schedule"):
        PipelineArguments(stages=2, schedule="auto").placement(4)
    with pytest.raises(InputError, match="4 ranks cannot be shared evenly by pipelines of 3"):
        PipelineArguments(stages=3).placement(4)


def test_a_model_that_is_cut_already_and_other_models_that_cannot_be() -> None:
    from transformers import TrainingArguments

    from pipecut.integrations.transformers import PipelineTrainer

    args = TrainingArguments("unused", use_cpu=True)
    pipe = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.ones(2, 2),), num_stages=2)
    with pytest.raises(PipeError, match="pass the uncut nn.Module. Here this model is cut already: it is a Pipe"):
        PipelineTrainer(pipe, args)  # type: ignore[arg-type]
    with pytest.raises(PipeError, match="is a stage of a model that is cut already"):
        PipelineTrainer(pipe.get_stage_module(1), args)
    with pytest.raises(InputError, match=r"pipeline= is a dict: pass PipelineArguments\(stages="):
        PipelineTrainer(nn.Linear(2, 2), args, pipeline={"stages": 2})  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(InputError, match="'weight' is on the meta device"):
        PipelineTrainer(empty, args)
    placed = nn.Linear(2, 2)
    placed.hf_device_map = {"": 0}  # type: ignore[assignment]
    with pytest.raises(InputError, match="load it without device_map"):
        PipelineTrainer(placed, args)


def test_a_dataset_without_an_index_needs_an_example(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(sentences())

    trainer = make_trainer("small", tmp_path, {}, max_steps=2)
    trainer.train_dataset = Stream()
    with pytest.raises(InputError, match=r"pass one batch, as the collator makes it, as PipelineArguments\(example="):
        trainer.train()
    trainer = make_trainer("small", tmp_path, {"example": padded(sentences()[:8])}, max_steps=2)
    trainer.train_dataset = Stream()
    assert trainer.train().global_step == 2


@pytest.mark.slow
def test_a_loss_that_does_not_call_the_model_once(tmp_path: Path) -> None:
    from transformers import Trainer

    from pipecut.integrations.transformers import PipelineTrainer

    class Twice(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return model(**inputs).loss + model(**inputs).loss

    class Never(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return torch.zeros(())

    class ByPosition(PipelineTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            return model(inputs["input_ids"]).logits.mean()

    with pytest.raises(PipeError, match="compute_loss calls the model twice, and a pipeline runs it once"):
        make_trainer("small", tmp_path, {}, trainer=(Trainer, Twice)).train()
    with pytest.raises(InputError, match="compute_loss did not call the model that it was given"):
        make_trainer("small", tmp_path, {}, trainer=(Trainer, Never)).train()
    with pytest.raises(InputError, match=r"passes 1 arguments to the model by position: pass them by name"):
        make_trainer("small", tmp_path, {}, trainer=(Trainer, ByPosition)).train()


def bad_input_on_ranks(rank: int, folder: Path) -> list[str]:
    """Return the messages of errors that every rank must get."""

    def collate(samples: Any) -> Any:
        batch = padded(samples)
        batch["labels"][0, 0] = rank
        return batch

    messages = []
    with as_torchrun():
        for pipeline_options, options in (({"stages": 3}, {}), ({}, {"data_collator": collate})):
            with pytest.raises(InputError) as raised:
                make_trainer("causal", folder, pipeline_options, **options).train()
            messages.append(str(raised.value))
    return messages


def restarts(rank: int, folder: Path) -> str:
    """Make a trainer where torchrun would start the job again, and return the warning."""
    with as_torchrun(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        with pytest.warns(PipeWarning) as caught:
            make_trainer("small", folder, {})
    return str(caught[0].message)


@pytest.mark.distributed
def test_a_job_that_could_not_be_started_again(two_ranks: Ranks, tmp_path: Path) -> None:
    for told in two_ranks.run(restarts, tmp_path):
        assert "torchrun --max-restarts=3 starts this job again" in told
        assert "call pipecut.init_process_group() first, before TrainingArguments" in told


@pytest.mark.slow
@pytest.mark.distributed
def test_errors_are_the_same_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(bad_input_on_ranks, tmp_path)
    assert first == second
    assert "3 stages need 3 ranks, and there are 2: start this script by `torchrun --nproc-per-node=3" in first[0]
    assert "the ranks of a pipeline have different batches (labels differs)" in first[1]
