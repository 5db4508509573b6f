"""Accelerate's Accelerator where a process is a rank of a pipeline, and callbacks that decide the same on all ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import CallbackHandler, TrainerControl

from ...errors import PipeError
from .cut_model import Ranks


class PipelineAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose processes share a batch and a model if they are ranks of one pipeline.

    Trainer makes its Accelerator itself: `adopt` turns that one into this class.
    """

    ranks: Ranks

    @classmethod
    def adopt(cls, accelerator: Accelerator, ranks: Ranks) -> PipelineAccelerator:
        """Turn an accelerator into one for these ranks; it stays the same object."""
        accelerator.__class__ = cls
        accelerator.ranks = ranks
        assert isinstance(accelerator, cls)
        return accelerator

    @property
    def num_processes(self) -> int:
        """The number of batches that are trained at the same time: one for each pipeline."""
        return self.ranks.replicas

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the model as it is: its stages are on devices, copied and run under autocast by the pipeline."""
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Return a loader that gives all ranks of a pipeline the same batches, and each pipeline its own."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        _seed_workers_alike(data_loader, self.ranks)
        prepared: DataLoader[Any] = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.ranks.replicas,
            process_index=self.ranks.replica,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all pipelines; of each, those of one rank, as all ranks of it have the same."""
        if self.ranks.replicas == 1:
            return tensor
        per = self.ranks.placement.ranks
        gathered = super().gather(tensor)
        return recursively_apply(lambda each: torch.cat(each.chunk(self.ranks.world)[::per]), gathered)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest of all pipelines."""
        if self.ranks.replicas == 1:
            return tensor
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)


def _seed_workers_alike(data_loader: DataLoader[Any], ranks: Ranks) -> None:
    """Let the workers of all ranks of a pipeline draw the same random numbers: Trainer seeds them by rank."""
    init = data_loader.worker_init_fn
    if isinstance(init, functools.partial) and "rank" in init.keywords:
        data_loader.worker_init_fn = functools.partial(
            init.func, *init.args, **{**init.keywords, "rank": ranks.replica}
        )


_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Not on_log: a compute_loss of the user's own may log, and runs on the rank of the last stage alone.
_DECIDING = "on_train_begin on_epoch_begin on_step_end on_substep_end on_epoch_end on_evaluate on_save".split()


class AgreeingCallbacks(CallbackHandler):
    """Callbacks after which all ranks go the same way: what one decides, such as to stop, all do.

    A callback may look at a clock, a signal, or something that only one rank has. An error in one is an error on all.
    """

    @classmethod
    def adopt(cls, handler: CallbackHandler) -> None:
        """Turn a handler into this class; it stays the same object."""
        handler.__class__ = cls

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        error: Exception | None = None
        try:
            control = super().call_event(event, args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as raised:  # raised again, once all ranks know of it
            error = raised
        if event not in _DECIDING or not dist.is_initialized():
            if error is not None:
                raise error
            return control
        flags = [getattr(control, name) for name in _DECISIONS]
        decided = torch.tensor([error is not None, *flags], dtype=torch.int32, device=args.device)
        dist.all_reduce(decided, dist.ReduceOp.MAX)
        failed, *agreed = decided.tolist()
        if error is not None:
            raise error
        if failed:
            raise PipeError(f"a callback raised an error in {event} on another rank; its traceback is there")
        for name, flag in zip(_DECISIONS, agreed, strict=True):
            setattr(control, name, bool(flag))
        return control
