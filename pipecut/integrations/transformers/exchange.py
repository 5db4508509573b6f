"""Values that one rank of a pipeline has, and others need: outputs, weights and optimizer state."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CheckpointError, InputError
from ...pipe_ir import Atom, map_leaves
from ...text import listed
from ...training import cannot_write
from .cut_model import CutModel, Ranks


@dataclass(frozen=True)
class _Described(Atom):
    """Shape and dtype of a tensor that comes next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast(value: Any, source: int, ranks: Ranks, device: torch.device) -> Any:
    """Return a nested value of one rank of a pipeline on all of its ranks; tensors are sent as such."""
    if len(ranks.peers) == 1:
        return value
    sends = ranks.rank == source
    tensors: list[Tensor] = []

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf.detach().to(device).contiguous())
        return _Described(tuple(leaf.shape), leaf.dtype)

    def receive(leaf: Any) -> Any:
        if not isinstance(leaf, _Described):
            return leaf
        tensor = tensors.pop(0) if sends else torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        dist.broadcast(tensor, source, group=ranks.group)
        return tensor

    box = [map_leaves(describe, value) if sends else None]
    dist.broadcast_object_list(box, source, group=ranks.group, device=device)
    return map_leaves(receive, box[0])


def collect_weights(cut: CutModel) -> None:
    """Give the model of every rank the trained values of all stages: parameters, and buffers that are saved.

    They are written into the model's own tensors, one after the other, so that no second copy of the model is made.
    """
    ranks, own = cut.ranks, cut.schedule.state_dict()
    held: list[list[str]] = [[*own]]
    if len(ranks.peers) > 1:
        held = [[] for _ in ranks.peers]
        dist.all_gather_object(held, [*own], group=ranks.group)
    holders = {name: rank for rank, names in zip(ranks.peers, held, strict=True) for name in names}
    for name, tensor in cut.model.state_dict().items():
        if name not in holders or not isinstance(tensor, Tensor):
            continue  # no stage uses it, so that nobody has changed it
        # Of a holder it is the stage's: a buffer that was moved, or assigned anew, is no longer the model's.
        value = (own[name] if ranks.rank == holders[name] else tensor).to(cut.device).contiguous()
        if len(ranks.peers) > 1:
            dist.broadcast(value, holders[name], group=ranks.group)
        if value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)


def _held_parameters(cut: CutModel) -> set[nn.Parameter]:
    """Return the parameters of the stages on this rank."""
    return set(cut.schedule.parameters())


def collect_optimizer(optimizer: Optimizer, cut: CutModel) -> dict[str, Any] | None:
    """Return the state of an optimizer over the whole model, on the first rank of the pipeline; None elsewhere.

    The optimizer of each rank has all parameters of the model, and state for those that it has trained: together they
    are the state dict that a process with the whole model has.
    """
    state: dict[str, Any] = optimizer.state_dict()
    ranks = cut.ranks
    if len(ranks.peers) == 1:
        return state
    own = {number: _on_cpu(state["state"][number]) for number in _numbers_held(optimizer, cut) & state["state"].keys()}
    gathered: list[Any] | None = [None] * len(ranks.peers) if ranks.place == 0 else None
    dist.gather_object(own, gathered, dst=ranks.peers[0], group=ranks.group)
    if gathered is None:
        return None
    merged = {number: values for part in gathered for number, values in part.items()}
    return {**state, "state": dict(sorted(merged.items()))}


def drop_state_of_others(optimizer: Optimizer, cut: CutModel) -> None:
    """Forget the optimizer state of parameters that are trained on other ranks."""
    held = _held_parameters(cut)
    for parameter in [each for each in optimizer.state if each not in held]:
        del optimizer.state[parameter]


def _numbers_held(optimizer: Optimizer, cut: CutModel) -> set[int]:
    """Return the numbers that a state dict gives to the parameters of this rank."""
    held = _held_parameters(cut)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number for number, parameter in enumerate(every) if parameter in held}


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def check_same_batch(batch: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise on every rank if the ranks of a pipeline do not have the same batch.

    The first stage gets its inputs from one rank, the loss its labels from another.
    """
    if len(ranks.peers) == 1:
        return
    every: list[dict[str, int]] = [{} for _ in ranks.peers]
    dist.all_gather_object(every, {name: _checksum(value) for name, value in batch.items()}, group=ranks.group)
    if all(each == every[0] for each in every):
        return
    names = sorted({name for each in every for name in each})
    differ = [name for name in names if len({each.get(name) for each in every}) > 1]
    raise InputError(
        f"the ranks of a pipeline have different batches ({listed(differ)} differs): the dataset or the collator gives "
        "other values from process to process. Let random numbers in them come from torch, numpy or random, which "
        "Trainer seeds on every rank alike, or from the index of a sample; and let no rank draw more of them than "
        "others"
    )


def _checksum(value: Any) -> int:
    """Return a number that follows from the bytes of a tensor, and from its shape and dtype."""
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else value
    seed = zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode())
    return zlib.crc32(raw.numpy().data, seed) if value.numel() else seed


class Writes:
    """Writes into one folder by several ranks, which go on together, or all raise.

    An error of one is kept until `agree`: others may be waiting for its next message.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: Exception | None = None
        self.all_sent = False  # True when no message comes before the next `agree`

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context whose error is kept."""
        try:
            yield
        except Exception as error:  # whatever it is, all ranks raise it
            self.keep(error)

    def keep(self, error: Exception) -> None:
        """Let `agree` raise an error, unless there is one already."""
        self._error = self._error or error

    def agree(self) -> None:
        """Raise on all ranks of the job if one has kept an error, or go on when all are here."""
        texts = ["" if self._error is None else str(cannot_write(self._folder, self._error))]
        if dist.is_initialized():
            own, texts = texts[0], [""] * dist.get_world_size()
            dist.all_gather_object(texts, own)
        failed = [f"{f'on rank {rank}: ' * (len(texts) > 1)}{text}" for rank, text in enumerate(texts) if text]
        if failed:
            raise CheckpointError("\n".join(failed)) from self._error
