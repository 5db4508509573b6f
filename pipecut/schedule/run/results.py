"""The outputs of the microbatches, put together to that of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...pipe_ir.structure import flatten, unflatten
from ...stage.microbatch import merge_chunks
from ...stage.microbatch.merge import check_merge_spec
from .batch import Batch
from .losses import Losses


def refuse_unmergeable(result: Any, batch: Batch, microbatch: int) -> None:
    """An output that cannot be put together is refused before there are gradients."""
    check_merge_spec(result, batch.merge_spec)
    if batch.merge_spec is None and len(batch.samples) > 1:
        merge_chunks([result], None, sizes=[batch.samples[microbatch]], rows=_known_rows(batch, [microbatch]))


def _known_rows(batch: Batch, microbatches: Sequence[int]) -> list[set[int]]:
    """An output with as many rows as the target has rows or elements has some of them for each sample."""
    found = []
    for microbatch in microbatches:
        leaves, _ = flatten(None if batch.targets is None else batch.targets[microbatch])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        found.append({number for tensor in tensors for number in (tensor.shape[0], tensor.numel())})
    return found


def merged(batch: Batch, losses: Losses, *, scaled: bool) -> Any:
    """The output of the batch; the loss in it is that of the batch."""
    results = [batch.results[number] for number in sorted(batch.results)]
    if len(results) == 1 and batch.merge_spec is None:
        return results[0]  # whatever it is
    rows = _known_rows(batch, sorted(batch.results))
    output = merge_chunks(results, batch.merge_spec, sizes=batch.samples, weights=batch.loss_weights, rows=rows)
    if scaled or batch.loss_place is None or batch.merge_spec is not None:
        return output
    leaves, structure = flatten(output)
    first = losses.in_order()[0]
    leaves[batch.loss_place] = torch.full_like(first, losses.total(scaled=False))
    return unflatten(structure, leaves)
