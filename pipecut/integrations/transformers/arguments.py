"""Arguments of a pipelined training, and the arguments of Trainer that do not go with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainingArguments

from ...errors import InputError, PipeError
from ...pipe import check_is_uncut_model
from ...pipe_ir import Dynamic
from ...schedule import Placement, plan_for
from ...split import Outputs
from ...text import counted

_AUTO = "auto"


@dataclass(frozen=True)
class PipelineArguments:
    """Says how a `PipelineTrainer` cuts the model and runs its stages.

    - `stages`: into how many stages the model is cut. By default, one for each rank; with a schedule that has several
      on each rank, that many times the ranks. With fewer stages than ranks there are several pipelines, each with
      batches of its own, whose gradients are averaged.
    - `schedule`: the name of a schedule, such as "1F1B", "GPipe", "Interleaved1F1B" or "ZB-H1"; "auto" searches cut
      and schedule together by `pipecut.plan`.
    - `microbatches`: into how many microbatches a batch of `per_device_train_batch_size` samples is cut.
    - `dynamic`: sizes that change from batch to batch, as `pipecut.pipeline` takes it. By default all that the model's
      code leaves free, as collators pad to the longest of a batch; None fixes all but the number of samples.
    - `example`: a batch, as the collator makes it, to trace the model with. By default it is made of the first samples
      of `train_dataset`; a dataset without an index needs it.
    - `outputs`: outputs of the model that training steps send to the last stage in any case, as `pipecut.pipeline`
      takes it, for a loss that reads more of them than later stages do.
    - `timeout`: seconds to wait for another rank in a step.

    >>> PipelineArguments(stages=2, microbatches=8)
    PipelineArguments(stages=2, schedule='1F1B', microbatches=8, dynamic='auto', example=None, outputs='used', \
timeout=600.0)
    """

    stages: int | None = None
    schedule: str = "1F1B"
    microbatches: int = 4
    dynamic: Dynamic | None = "auto"
    example: Mapping[str, Any] | None = None
    outputs: Outputs = "used"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            value = getattr(self, name)
            if value is None and name == "stages":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"PipelineArguments({name}={value!r}): it must be an integer of at least 1")
        if not math.isfinite(self.timeout) or self.timeout <= 0:
            raise InputError(f"PipelineArguments(timeout={self.timeout!r}): it must be a number of seconds above 0")
        if self.searches and self.outputs != "used":
            raise InputError(
                f"PipelineArguments(schedule='auto', outputs={self.outputs!r}): 'auto' plans for outputs that stages "
                "use; name a schedule, such as '1F1B'"
            )
        if not self.searches:
            plan = plan_for(self.schedule, ranks=1, microbatches=1)  # raises on a name that is not known
            if not plan.training:
                raise InputError(f"{self.schedule} trains nothing: choose another schedule, such as '1F1B'")

    @property
    def searches(self) -> bool:
        """True if the schedule is to be found."""
        return self.schedule == _AUTO

    def placement(self, world: int) -> Placement:
        """Return the stages of each rank of one pipeline, in a job of so many ranks.

        >>> PipelineArguments(schedule="Interleaved1F1B").placement(2).stages_of
        ((0, 2), (1, 3))
        """
        chunks = 1 if self.searches else plan_for(self.schedule, ranks=1, microbatches=1).stages
        stages = world * chunks if self.stages is None else self.stages
        if stages % chunks:
            raise InputError(
                f"PipelineArguments(stages={stages}): {self.schedule} has {chunks} stages on each rank; pass a "
                f"multiple of {chunks}"
            )
        ranks = stages // chunks
        if ranks > world:
            each = "" if chunks == 1 else f", {chunks} on each rank"
            raise InputError(
                f"{counted(stages, 'stage')}{each} need {ranks} ranks, and there {_are(world)}: start this script by "
                f"`torchrun --nproc-per-node={ranks} ...`, or pass PipelineArguments(stages={world * chunks})"
            )
        if world % ranks:
            raise InputError(
                f"{counted(world, 'rank')} cannot be shared evenly by pipelines of {ranks}: start a multiple of "
                f"{ranks} ranks, or pass PipelineArguments(stages={world * chunks})"
            )
        if self.searches and ranks < world:
            raise InputError(
                f"PipelineArguments(stages={stages}, schedule='auto') on {world} ranks would be {world // ranks} "
                "pipelines, and 'auto' plans for one: name a schedule, or leave out stages"
            )
        if self.searches:
            return Placement.loop(ranks)
        return plan_for(self.schedule, ranks=ranks, microbatches=1).placement


def _are(world: int) -> str:
    return "is 1" if world == 1 else f"are {world}"


@dataclass(frozen=True)
class _Conflict:
    """An argument of Trainer that a pipeline cannot serve: whether it is set, its text, and the remedy."""

    is_set: Callable[[TrainingArguments], Any]
    text: str
    remedy: str


_CONFLICTS = (
    _Conflict(
        lambda args: args.deepspeed,
        "deepspeed",
        "the stages are trained by pipecut; leave it out, and use more stages or microbatches to save memory",
    ),
    _Conflict(
        lambda args: args.fsdp,
        "fsdp",
        "a stage is the shard of a rank; leave it out, and use more stages to save memory",
    ),
    _Conflict(
        lambda args: args.parallelism_config,
        "parallelism_config",
        "leave it out: PipelineArguments says which rank does what",
    ),
    _Conflict(
        lambda args: getattr(args, "predict_with_generate", False),
        "predict_with_generate",
        "generate() needs the whole model: leave it out, and call trainer.model.generate() after training, when every "
        "rank has all weights",
    ),
    _Conflict(
        lambda args: args.torch_compile,
        "torch_compile",
        "leave it out; compile the blocks of the model before (`block.compile()`), or use `torch.compile` on the model "
        "without a pipeline",
    ),
    _Conflict(
        lambda args: args.auto_find_batch_size,
        "auto_find_batch_size",
        "one rank that is out of memory would leave the others waiting: set per_device_train_batch_size",
    ),
    _Conflict(
        lambda args: args.use_cache,
        "use_cache",
        "a key/value cache cannot cross a cut: leave it out, or use_cache=False",
    ),
    _Conflict(
        lambda args: args.bf16_full_eval or args.fp16_full_eval,
        "bf16_full_eval or fp16_full_eval",
        "they convert the model, whose stages share its parameters: pass bf16=True or fp16=True",
    ),
    _Conflict(
        lambda args: "lomo" in str(args.optim) or "layerwise" in str(args.optim),
        "an optimizer that steps during the backward (lomo, layerwise)",
        "use another one, such as optim='adamw_torch'",
    ),
    _Conflict(
        lambda args: any(getattr(args.accelerator_config, name, 0) for name in ("dispatch_batches", "split_batches")),
        "dispatch_batches or split_batches",
        "every rank reads the batches of its pipeline: leave them out of accelerator_config",
    ),
    _Conflict(
        lambda args: getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "train_sampling_strategy='batch_rebalance'",
        "it gives each rank another batch, and the ranks of a pipeline share one: use 'random' or 'group_by_length'",
    ),
)


def check_arguments(args: TrainingArguments) -> None:
    """Raise on arguments of Trainer that a pipeline cannot serve, before anything is done."""
    for conflict in _CONFLICTS:
        if conflict.is_set(args):
            raise InputError(f"PipelineTrainer does not take {conflict.text}: {conflict.remedy}")


def check_model(model: object) -> None:
    """Raise on a model that is cut already, or that has no values."""
    try:
        check_is_uncut_model(model)
    except PipeError as error:
        raise InputError(f"PipelineTrainer cuts the model itself: pass the uncut nn.Module. Here {error}") from error
    assert isinstance(model, nn.Module)  # as was checked
    if getattr(model, "hf_device_map", None):
        raise InputError(
            "the model was put on devices by device_map=, and PipelineTrainer gives each rank its own stage: load it "
            "without device_map"
        )
    empty = next((name for name, each in model.named_parameters() if each.is_meta), None)
    if empty is not None:
        raise InputError(
            f"{empty!r} is on the meta device, and has no values: load the model with its values; each rank puts only "
            "its own stage on its device"
        )
