"""PipelineTrainer: Hugging Face's Trainer, whose model runs as stages on the ranks of torchrun."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, rotate_checkpoints

from ...errors import CheckpointError, InputError
from ...stage import derive_seed
from ...training import GradScaler, clip_grad_norm_, get_total_norm, replace_directory, warn_of_restarts
from .accelerator import AgreeingCallbacks, PipelineAccelerator
from .arguments import PipelineArguments, check_arguments, check_model
from .cut_model import CutModel, Ranks
from .exchange import (
    Writes,
    broadcast,
    check_same_batch,
    collect_optimizer,
    collect_weights,
    drop_state_of_others,
)
from .loss import ITEMS, ItemWeight, StandIn, TrainerLoss, arguments_of_model, in_full_precision


class PipelineTrainer(Trainer):
    """`transformers.Trainer` with one more argument, `pipeline`: the model is cut, and each rank trains its stage.

    Start the script by torchrun, with a process for each stage. Everything else is as with `Trainer`: arguments,
    datasets, collators, callbacks, metrics, checkpoints. `per_device_train_batch_size` is the batch of a pipeline,
    which is cut into microbatches. Losses, gradient norms and weights are those of `Trainer` on one process with the
    same arguments, and checkpoints of either can be resumed by the other, with any number of stages.

    Every rank loads the whole model into main memory, and puts its own stage on its device. After `train()` the model
    of every rank has the trained weights of all stages. A checkpoint is complete, or not there.

    With dropout, losses are not those of `Trainer`: it draws the numbers of a whole batch at once, and a pipeline those
    of one microbatch after the other. They follow from `seed`, the step and the microbatch, so that they are the same
    for any number of stages and after a resume.

    ```python
    trainer = PipelineTrainer(
        model=model,
        args=TrainingArguments("output", per_device_train_batch_size=8),
        train_dataset=dataset,
        pipeline=PipelineArguments(stages=2, schedule="1F1B", microbatches=4),
    )
    trainer.train()
    ```
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        pipeline: PipelineArguments | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments("tmp_trainer") if args is None else args
        given: Any = PipelineArguments() if pipeline is None else pipeline
        if not isinstance(given, PipelineArguments):
            got = type(given).__name__
            raise InputError(f"pipeline= is a {got}: pass PipelineArguments(stages=..., microbatches=...)")
        self.pipeline = given
        check_arguments(args)
        warn_of_restarts()
        if model is not None:
            check_model(model)
        self._ranks = Ranks.of(self.pipeline.placement(args.world_size))
        self._cuts: dict[bool, CutModel] = {}  # by mode; often one for both
        self._trained: CutModel | None = None
        self._loaded_folder = ""
        self._batches = (-1, 0)  # the step that is accumulated, and its batches so far
        self._unfinished: Path | None = None  # where a checkpoint is written, while it is
        self._writes = Writes(Path())  # of the checkpoint that is saved last
        self._has_all_weights = True  # False once the stages of other ranks were trained, until they are collected
        super().__init__(model, args, *positional, **options)
        AgreeingCallbacks.adopt(self.callback_handler)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which knows that the ranks of a pipeline share a batch."""
        super().create_accelerator_and_postprocess()
        PipelineAccelerator.adopt(self.accelerator, self._ranks)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an optimizer step, over all pipelines."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._ranks.replicas)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return this rank's part of the operations of a step: Trainer adds up those of all ranks."""
        return int(super().floating_point_ops(inputs) // self._ranks.placement.ranks)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank moves its stages only, when they are built."""

    # The model, cut.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._trained = self._cut_model(self._prepare_inputs(dict(self._example())), training=True)
        scaler = self.accelerator.scaler
        if scaler is not None and self._trained.schedule.loss_scaler is not scaler:
            self.accelerator.scaler = GradScaler(
                self._trained.schedule,
                scaler.get_scale(),
                scaler.get_growth_factor(),
                scaler.get_backoff_factor(),
                scaler.get_growth_interval(),
                scaler.is_enabled(),
            )
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[no-untyped-call]

    def _example(self) -> Mapping[str, Any]:
        """Return a batch to trace the model with; random numbers go on as if it had not been made."""
        if self.pipeline.example is not None:
            return self.pipeline.example
        dataset = self.train_dataset
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise InputError(
                "the model is traced with a batch, and train_dataset can only be read once: pass one batch, as the "
                "collator makes it, as PipelineArguments(example=...)"
            )
        count = min(len(dataset), self.args.train_batch_size)
        collate = self._get_collator_with_removed_columns(self.data_collator, description="example")
        with _random_numbers_unchanged():
            batch: Mapping[str, Any] = collate([dataset[index] for index in range(count)])
        return batch

    def _cut_model(self, batch: Mapping[str, Any], *, training: bool) -> CutModel:
        """Return the model cut for this rank, in a mode; it is cut when it is first needed, with this batch as example.

        One cut serves both modes, unless the model does other operations in evaluation. Then it is cut once more, maybe
        at other places: all ranks need all weights.
        """
        if self._cuts and next(iter(self._cuts.values())).model is not self.model:
            self._cuts, self._trained, self._has_all_weights = {}, None, True
        cut = self._cuts.get(training)
        if cut is None:
            other = self._cuts.get(not training)
            cut = self._cuts[training] = self._new_cut(batch, training) if other is None or other.has_mode else other
        if cut is not self._trained:
            self._collect_weights()
        cut.train(training)
        return cut

    def _new_cut(self, batch: Mapping[str, Any], training: bool) -> CutModel:
        example = arguments_of_model(self, batch, self._get_num_items_in_batch([batch], self.args.device))
        self.model.train(training)
        weight = ItemWeight(shifts=self._loss_shifts_labels)
        options = (TrainerLoss(self), weight, self.accelerator.autocast)
        return CutModel(self.model, example, self.pipeline, self._ranks, self.args.device, *options)

    # Steps.

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of a batch on all stages, and return its loss, on every rank."""
        batch = self._prepare_inputs(inputs)
        check_same_batch(batch, self._ranks)
        cut = self._cut_model(batch, training=True)
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        with self.compute_loss_context_manager():
            arguments = arguments_of_model(self, batch, num_items_in_batch)
            target = dict(batch) if num_items_in_batch is None else {**batch, ITEMS: num_items_in_batch}
            parts = 1 if self._is_loss_scaled(num_items_in_batch) else self.current_gradient_accumulation_steps
            shifts, seed = self._loss_shifts_labels, self._next_seed()
            loss = cut.step(arguments, target, parts=parts, shifts=shifts, seed=seed)
        self._has_all_weights = False
        return torch.tensor(loss, device=self.args.device)

    def _next_seed(self) -> int:
        """Return the seed of a batch, which follows from its place in the training: a resume has it too."""
        step, batches = self._batches
        self._batches = (step, batches + 1) if step == self.state.global_step else (self.state.global_step, 1)
        return derive_seed(self.args.seed, self._ranks.replica, *self._batches)

    def _is_loss_scaled(self, items: object) -> bool:
        """Return True if a loss is divided by the items of all accumulated batches, by Trainer's rule."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch on all stages; outputs come from the last one to every rank."""
        batch = self._prepare_inputs(inputs)
        check_same_batch(batch, self._ranks)
        cut = self._cut_model(batch, training=False)
        has_loss = self._has_loss(batch)
        items = self._get_num_items_in_batch([batch], self.args.device) if has_loss else None
        target = None if not has_loss else dict(batch) if items is None else {**batch, ITEMS: items}
        shifts = self._loss_shifts_labels
        if prediction_loss_only and has_loss:
            cut.eval(arguments_of_model(self, batch, items), target, shifts=shifts, outputs=False)
            return torch.tensor(cut.schedule.mean_loss(), device=self.args.device), None, None
        ignored = self._ignored_outputs() if ignore_keys is None else ignore_keys

        def answer(arguments: dict[str, Any]) -> Any:
            output = cut.eval(arguments, target, shifts=shifts, outputs=True)
            wanted = in_full_precision(self, _wanted(output, ignored))
            return broadcast(wanted, self._ranks.last, self._ranks, self.args.device)

        stand_in: Any = StandIn(self.model, answer)
        return super().prediction_step(stand_in, inputs, prediction_loss_only, ignore_keys)

    def _has_loss(self, inputs: Mapping[str, Any]) -> bool:
        """Return True if a batch has labels, or the model a loss without any."""
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        asked = inputs.get("return_loss")
        return bool(self.can_return_loss if asked is None else asked)

    def _ignored_outputs(self) -> list[str]:
        config = getattr(self.model, "config", None)
        return list(getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]))

    def evaluation_loop(self, *args: Any, **options: Any) -> EvalLoopOutput:
        """Evaluate, and give all ranks the metrics of the first one, so that all decide the same by them."""
        output: EvalLoopOutput = super().evaluation_loop(*args, **options)
        metrics = [output.metrics]
        if dist.is_initialized():
            dist.broadcast_object_list(metrics, 0, device=self.args.device)
        return output._replace(metrics=metrics[0])

    # Weights and state.

    def _collect_weights(self) -> None:
        """Give the model of every rank the weights of all stages, if they were trained since; all ranks call it."""
        if not self._has_all_weights and self._trained is not None:
            collect_weights(self._trained)
            self._has_all_weights = True

    def _finalize_training(self, *args: Any) -> Any:
        self._collect_weights()
        return super()._finalize_training(*args)  # type: ignore[no-untyped-call]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, for `from_pretrained()`. All ranks call it; after training the first alone may."""
        self._collect_weights()
        with contextlib.nullcontext() if self._unfinished is None else self._writes.kept():
            super().save_model(output_dir, _internal_call)
        self._writes.all_sent = self.args.save_only_model

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._loaded_folder = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._loaded_folder = self.state.best_model_checkpoint or ""
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Load a checkpoint by from_pretrained where its names are not those of the model.

        `save_pretrained` writes some models, such as ViT, under other names. Trainer looks for the model's own, leaves
        the others out with a warning, and goes on with the weights that were there before.
        """
        if not load_result.unexpected_keys or not hasattr(self.model, "from_pretrained"):
            super()._issue_warnings_after_load(load_result)
            return
        dtype = next(self.model.parameters()).dtype
        loaded = type(self.model).from_pretrained(self._loaded_folder, config=self.model.config, dtype=dtype)
        self.model.load_state_dict(loaded.state_dict())

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save what Trainer saves, into a directory that gets its name when all files are on the disk.

        If a rank cannot write, all raise, and the checkpoints before it are whole.
        """
        folder, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = folder / f".{name}.unfinished"
        self._writes = Writes(folder)
        try:
            with self._writes.kept():
                if self.args.should_save:
                    shutil.rmtree(unfinished, ignore_errors=True)  # of a job that was killed
                    unfinished.mkdir(parents=True)
            self._writes.agree()
            self._write_into(unfinished, model, trial)
            if self.state.best_global_step == self.state.global_step:
                self.state.best_model_checkpoint = str(folder / name)
            self._writes.agree()  # all ranks have written their files
            with self._writes.kept():
                if self.args.should_save:
                    self._complete(unfinished / name, folder / name)
            self._writes.agree()  # it is complete before any rank reads it, or goes on
        except CheckpointError:
            if self.args.should_save:
                shutil.rmtree(unfinished, ignore_errors=True)  # of a full disk it is the larger part
            raise
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder / name))

    def _write_into(self, unfinished: Path, model: nn.Module, trial: Any) -> None:
        self._unfinished = unfinished
        try:
            super()._save_checkpoint(model, trial)
        except OSError as error:
            if not self._writes.all_sent:
                raise  # of an override that others may be waiting for
            self._writes.keep(error)  # of the last file, which Trainer writes by itself
        finally:
            self._unfinished = None

    def _complete(self, written: Path, path: Path) -> None:
        """Give a checkpoint its place, and remove older ones beyond the limit."""
        self.state.save_to_json(str(written / TRAINER_STATE_NAME))  # with where it will be
        replace_directory(written, path)
        written.parent.rmdir()
        best = self.state.best_model_checkpoint
        rotate_checkpoints(str(path.parent), self.args.save_total_limit, best, use_mtime=True)

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._unfinished is None else self._unfinished)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished is None:  # otherwise it is pushed when it is complete
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state that Trainer on one process would save, whatever the number of stages."""
        assert self._trained is not None  # it has trained
        state = collect_optimizer(self.optimizer, self._trained)
        with self._writes.kept():
            if self.args.should_save:
                torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_scaler(self, output_dir: str) -> None:
        with self._writes.kept():
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._writes.kept():
            super()._save_rng_state(output_dir)
        self._writes.all_sent = True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._trained is not None:
            drop_state_of_others(self.optimizer, self._trained)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random numbers of this rank; those of the first, if the job had another number of ranks."""
        if checkpoint is None:
            return
        own = "rng_state.pth" if self.args.world_size <= 1 else f"rng_state_{self.args.process_index}.pth"
        names = ("rng_state.pth", "rng_state_0.pth")
        found = next((name for name in (own, *names) if (Path(checkpoint) / name).is_file()), own)
        if found == own:
            super()._load_rng_state(checkpoint)
            return
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(Path(checkpoint) / found, Path(folder) / own)
            super()._load_rng_state(folder)

    # Norms.

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        assert self._trained is not None  # there are gradients
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self._trained.schedule, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        assert self._trained is not None
        if grad_norm is None:
            self.accelerator.unscale_gradients()
            return get_total_norm(self._trained.schedule)
        return grad_norm


def _wanted(output: Any, ignored: list[str]) -> Any:
    """Return an output without what nobody asks for."""
    if isinstance(output, Mapping):
        kept = {name: value for name, value in output.items() if name not in ignored}
        output = type(output)(**kept)
    return output


@contextlib.contextmanager
def _random_numbers_unchanged() -> Iterator[None]:
    """Put the random numbers of torch, numpy and Python back where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)
