"""The loss of a microbatch, made by Trainer's own compute_loss, and the share of a batch's items that it is made with.

`Trainer.compute_loss(model, inputs)` calls the model, and makes a loss of its output. Here it is called twice: once
with a stand-in that only notes the arguments, which are those of the pipeline; and for each microbatch with a stand-in
that returns the output of the last stage. So label smoothing, `compute_loss_func` and a `compute_loss` of the user's
own run as they are.

Trainer passes the number of labels in all accumulated batches, `num_items_in_batch`, by which models divide the sum of
their losses; some models ignore it, and return a mean. Each microbatch gets its share of that number, and weighs that
share: either way the sum over microbatches is the loss that the whole batch has.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...pipe_ir import UnsentValue, map_leaves
from ...stage import ChunkSpec, TensorChunkSpec

ITEMS = "num_items_in_batch"
_IGNORED = -100
_LOW_PRECISION = (torch.float16, torch.bfloat16)


class StandIn:
    """Takes the model's place in a call of compute_loss: it answers one call, and has the attributes of the model."""

    def __init__(self, model: nn.Module, answer: Callable[[dict[str, Any]], Any]) -> None:
        self._model, self._answer, self._called = model, answer, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise InputError(
                f"compute_loss passes {len(args)} arguments to the model by position: pass them by name, as in "
                "model(**inputs)"
            )
        if self._called:
            raise InputError(
                "compute_loss calls the model twice, and a pipeline runs it once for each batch: let one call do it, "
                "for instance with both inputs in one batch"
            )
        self._called = True
        return self._answer(kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_name(self) -> str:
        """Return the class of the model below its adapters, by which Trainer knows that labels are shifted."""
        base = getattr(self._model, "get_base_model", None)
        return type(self._model if base is None else base()).__name__


class _CallNoted(Exception):  # noqa: N818 - it is no error
    """Ends a call of compute_loss where it would run the model."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        super().__init__("compute_loss called the model")
        self.kwargs = kwargs


def arguments_of_model(trainer: Any, inputs: Mapping[str, Any], items: Any) -> dict[str, Any]:
    """Return the arguments with which compute_loss calls the model."""

    def end(kwargs: dict[str, Any]) -> Any:
        raise _CallNoted(kwargs)

    try:
        trainer.compute_loss(StandIn(trainer.model, end), dict(inputs), num_items_in_batch=items)
    except _CallNoted as call:
        given = call.kwargs
        if isinstance(given.get(ITEMS), Tensor):
            given[ITEMS] = given[ITEMS].to(precision_of(trainer.model))  # a share of it is no integer
        return given
    raise InputError(
        "compute_loss did not call the model that it was given: let it call model(**inputs), and make the loss of "
        "what that returns"
    )


class TrainerLoss:
    """`loss_fn` of a schedule: Trainer's compute_loss on the output of the last stage.

    It refers to the trainer weakly, but to `compute_loss_func` as it is: what a loss of the user's own leads to is
    watched for parameters of other stages.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self.compute_loss_func = trainer.compute_loss_func

    def __call__(self, output: Any, target: Mapping[str, Any], *, parts: int = 1) -> Tensor:
        trainer = self._trainer()
        assert trainer is not None  # it runs the step
        inputs = dict(target)
        items = inputs.pop(ITEMS, None)
        answer = in_full_precision(trainer, _with_own_loss(output))
        stand_in = StandIn(trainer.model, lambda kwargs: answer)
        # Autocast is for the model alone, as with Trainer.
        with torch.autocast(trainer.args.device.type, enabled=False):
            loss: Tensor = trainer.compute_loss(stand_in, inputs, num_items_in_batch=items)
        return loss if parts == 1 else loss / parts


def in_full_precision(trainer: Any, output: Any) -> Any:
    """Return the output of a model as Accelerate gives it: under mixed precision, in float32.

    Outputs that were not sent stay as they are, which Accelerate's own function would read.
    """

    def convert(leaf: Any) -> Any:
        is_low = type(leaf) is not UnsentValue and isinstance(leaf, Tensor) and leaf.dtype in _LOW_PRECISION
        return leaf.float() if is_low else leaf

    return map_leaves(convert, output) if trainer.accelerator.native_amp else output


def precision_of(model: nn.Module) -> torch.dtype:
    """Return the dtype for shares of numbers of items: float32, or float64 if the model computes in it."""
    return torch.float64 if any(each.dtype is torch.float64 for each in model.parameters()) else torch.float32


def _with_own_loss(output: Any) -> Any:
    """Return an output whose loss may be changed in place, as Trainer does, while the original stays."""
    if not isinstance(output, dict) or output.get("loss") is None:
        return output
    changed = copy.copy(output)
    changed["loss"] = output["loss"].clone()
    return changed


def count_items(inputs: Mapping[str, Any], *, shifts: bool) -> Tensor | None:
    """Return how many labels count in each sample, by Trainer's rule; None if there are none that can be counted.

    >>> import torch
    >>> labels = torch.tensor([[5, 6, 7], [5, -100, -100]])
    >>> count_items({"labels": labels}, shifts=False), count_items({"labels": labels}, shifts=True)
    (tensor([3, 1]), tensor([2, 0]))
    """
    shifted, labels = inputs.get("shift_labels"), inputs.get("labels")
    if isinstance(shifted, Tensor):
        labels, shifts = shifted, False
    if not isinstance(labels, Tensor) or not labels.dim():
        return None
    labels = labels[..., 1:] if shifts else labels
    return labels.ne(_IGNORED).reshape(labels.shape[0], -1).sum(1)


class ItemWeight:
    """`loss_weight` of a schedule: the labels that count in a microbatch; its samples, if there are none to count."""

    def __init__(self, *, shifts: bool) -> None:
        self._shifts = shifts

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        counts = count_items(inputs, shifts=self._shifts)
        if counts is not None:
            return counts.sum()
        return next(value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.dim())


class BatchChunks(ChunkSpec):
    """Cuts a batch of Trainer into microbatches: tensors along dim 0, the number of items by the items in each.

    >>> import torch
    >>> chunks = BatchChunks()
    >>> chunks.counts = torch.tensor([3, 1, 2, 2])
    >>> chunks.cut(torch.tensor(16), (2, 2), "num_items_in_batch")
    [tensor(8.), tensor(8.)]
    >>> chunks.cut(torch.arange(4), (3, 1), "input_ids")
    [tensor([0, 1, 2]), tensor([3])]
    """

    keeps_order = True

    def __init__(self, precision: torch.dtype = torch.float32) -> None:
        self.counts: Tensor | None = None  # the items of each sample in the batch that comes next
        self._precision = precision
        self._rows = TensorChunkSpec(0).inside()

    def samples(self, value: Any, name: str) -> int | None:
        return self._rows.samples(value, name)

    def cut_dim(self, value: Any, name: str) -> int | None:
        return self._rows.cut_dim(value, name)

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> Sequence[Any]:
        if ITEMS in name and isinstance(value, int | float):
            value = torch.tensor(value)
        if ITEMS not in name or self.counts is None or not isinstance(value, Tensor):
            return self._rows.cut(value, sizes, name)
        items = self.counts.to(value.device)
        counts, whole = [part.sum() for part in torch.split(items, list(sizes))], items.sum()
        # In double precision, so that a share of the batch itself is the very number of its items.
        return [(value.double() * count / whole).to(self._precision) for count in counts]

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        return self._rows.merge(values, weights, name)

    def __repr__(self) -> str:
        return "BatchChunks()"
