"""Reads what one stage needs from a checkpoint that has the names of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, did_you_mean
from .checkpoint import Checkpoint, Entry, short_name
from .stage_tensors import StageTensor, has_values, named_tensors

_SHOWN = 20


@dataclass(frozen=True)
class Wanted:
    """What a stage takes from a checkpoint."""

    found: Mapping[str, StageTensor]  # by the name in the checkpoint; of a tie that was saved twice, the first
    again: Mapping[str, str]  # the other names of ties that were saved more than once -> the first
    missing: Sequence[StageTensor]


def find_in(
    checkpoint: Checkpoint, tensors: Sequence[StageTensor], rename: Callable[[str], str] | None = None
) -> Wanted:
    """Look for each tensor under all names that it has in the model."""
    known = checkpoint.names
    found: dict[str, StageTensor] = {}
    again: dict[str, str] = {}
    missing = []
    for tensor in tensors:
        candidates = dict.fromkeys(name if rename is None else rename(name) for name in tensor.names)
        present = [name for name in candidates if name in known]
        if present:
            found[present[0]] = tensor
            again |= dict.fromkeys(present[1:], present[0])
        elif tensor.persistent:
            missing.append(tensor)
    return Wanted(found, again, missing)


def check_names(
    checkpoint: Checkpoint, wanted: Wanted, model: nn.Module, rename: Callable[[str], str] | None = None
) -> None:
    """Everything that the stage needs is there, and nothing that the model does not know."""
    # A buffer that is not saved now may have been saved once.
    expected = {*model.state_dict(), *(name for name, _ in named_tensors(model))}
    if rename is not None:
        expected = {rename(name) for name in expected}
    unexpected = sorted(set(checkpoint.names) - expected)
    missing = [tensor.name if rename is None else rename(tensor.name) for tensor in wanted.missing]
    faults = []
    if missing:
        lines = [f"{name}.{did_you_mean(name, unexpected or checkpoint.names)}" for name in missing]
        faults.append(f"it does not have, and this stage needs:{_lines(lines)}")
    if unexpected:
        lines = [f"{name}.{did_you_mean(name, missing or expected)}" for name in unexpected]
        faults.append(f"it has, and the model does not:{_lines(lines)}")
    if faults:
        raise CheckpointError(
            f"{checkpoint.where} does not fit the model.\n" + "\n".join(faults) + "\nPass rename=, a function from the "
            "model's names to those of the checkpoint, if they only differ; or strict=False, to read what fits and "
            "leave the rest to init=, or to the values that the model has"
        )


def _lines(names: Sequence[str]) -> str:
    more = f"\n  and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "".join(f"\n  {name}" for name in names[:_SHOWN]) + more


def check_forms(checkpoint: Checkpoint, wanted: Wanted, dtype: torch.dtype | None) -> None:
    """Shapes are the model's, and dtypes are, or are to be converted."""
    shapes, dtypes, kept = [], [], set()
    for name, tensor in wanted.found.items():
        entry = checkpoint.entry(name)
        if entry is None:
            raise CheckpointError(f"{name} in {checkpoint.where} is not a tensor, and is a parameter of the model")
        if entry.shape != tuple(tensor.new.shape):
            shapes.append(f"{name} is {entry} there, and {_form_of(tensor.new)} in the model")
        elif entry.dtype != tensor.new.dtype and not _converted(entry.dtype, tensor.new.dtype, dtype):
            dtypes.append(f"{name} is {entry} there, and {_form_of(tensor.new)} in the model")
            kept.add(short_name(tensor.new.dtype))
    if shapes:
        raise CheckpointError(f"{checkpoint.where} is of a model of other sizes:{_lines(shapes)}")
    if dtypes:
        raise CheckpointError(
            f"{checkpoint.where} has other dtypes than the model:{_lines(dtypes)}\nPass dtype=torch."
            f"{' or dtype=torch.'.join(sorted(kept))} to convert what is read, or make the model with the dtype of the "
            "checkpoint before it is cut"
        )


def _form_of(tensor: Tensor) -> Entry:
    return Entry(tuple(tensor.shape), tensor.dtype)


def _converted(saved: torch.dtype, wanted: torch.dtype, dtype: torch.dtype | None) -> bool:
    return wanted == dtype and saved.is_floating_point and wanted.is_floating_point


def check_dtype(tensors: Sequence[StageTensor], dtype: torch.dtype) -> None:
    """A stage runs with the dtypes that the model had when it was traced."""
    floating = {tensor.old.dtype for tensor in tensors if tensor.old.dtype.is_floating_point}
    if floating and dtype not in floating:
        of_model = " and ".join(sorted(map(short_name, floating)))
        raise CheckpointError(
            f"dtype={dtype}, and the model was cut with {of_model}, for which its stages are made: convert "
            f"the model (`model.to({dtype})`) before pipeline(). dtype says to what a checkpoint of another dtype is "
            "converted"
        )


@torch.no_grad()
def read(checkpoint: Checkpoint, wanted: Wanted) -> None:
    """Fill the tensors; a tie that was saved under several names must have been saved with the same values."""
    checkpoint.read({name: tensor.new for name, tensor in wanted.found.items()})
    for name, first in wanted.again.items():
        value = wanted.found[first].new
        other = torch.empty_like(value)
        entry = checkpoint.entry(name)
        if entry is None or entry.shape != tuple(value.shape):
            same = False
        else:
            checkpoint.read({name: other})
            same = torch.equal(value, other)
        if not same:
            raise CheckpointError(
                f"{first} and {name} differ in {checkpoint.where}, and are one parameter in the model: "
                "untie them in the model, or remove the one that does not count from the checkpoint"
            )


def check_all_filled(tensors: Sequence[StageTensor], filled: Collection[str], index: int) -> None:
    """Nothing is left in memory that nobody has written to."""
    unfilled = [tensor for tensor in tensors if not has_values(tensor.old) and tensor.name not in filled]
    if unfilled:
        raise CheckpointError(
            f"stage {index} has parts that the checkpoint does not hold and that are on the meta device: "
            f"{', '.join(map(str, unfilled))}. Make the model under `with pipecut.empty_weights():` instead of "
            'torch.device("meta"), so that buffers have the values of their constructor; or pass strict=False and '
            "init=, a function that fills what the checkpoint does not hold"
        )
