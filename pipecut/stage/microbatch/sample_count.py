"""How many samples a call has, which all arguments that are cut must agree on."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from .block_mask import is_block_mask
from .call_leaves import Call
from .chunk_spec import Replicate, TensorChunkSpec
from .spec_match import Rule, Spec
from .spec_text import written_call
from .tensor_cut import even_sizes, samples_of


class TooFewSamplesError(InputError, AssertionError):
    """Fewer samples than microbatches. It is an AssertionError too, as with the peer."""


def agreed_sizes(
    call: Call,
    chunks: int,
    dims: Sequence[int | None],
    rules: Sequence[Rule],
    knows_batch: bool,
    fewer: bool = False,
) -> tuple[int, ...] | None:
    """The sizes of the microbatches; None if no leaf is cut. `dims` and `rules` are those of the leaves.

    With `fewer`, too few samples make fewer microbatches, of one sample each.
    """
    samples = {
        index: samples_of(leaf, dim)
        for index, (leaf, dim) in enumerate(zip(call.leaves, dims, strict=True))
        if dim is not None
    }
    if not samples:
        return None
    if len(set(samples.values())) > 1:
        remedy = _same_batch() if knows_batch else _other_specs(call, dims, rules, samples)
        raise InputError("\n".join([*_disagreement(call, chunks, dims, samples), *remedy]))
    first, total = next(iter(samples.items()))
    if fewer and 0 < total < chunks:
        return even_sizes(total, total)
    if total < chunks:
        place = f"{call.names[first]} has shape {list(call.leaves[first].shape)}, cut along dim {dims[first]}"
        most = f", or ask for fewer microbatches, at most {total}" if total else ""
        raise TooFewSamplesError(
            f"{total} {'sample' if total == 1 else 'samples'} cannot be cut into {chunks} microbatches ({place}): "
            f"pass at least {chunks}{most}"
        )
    return even_sizes(total, chunks)


def _disagreement(call: Call, chunks: int, dims: Sequence[int | None], samples: Mapping[int, int]) -> list[str]:
    return [
        f"the arguments to be cut into {chunks} microbatches do not have the same number of samples:",
        *(
            f"  {call.names[index]} of shape {list(call.leaves[index].shape)} has {count} along dim {dims[index]}"
            for index, count in samples.items()
        ),
    ]


def _same_batch() -> list[str]:
    return ["for the model they are the samples of one batch: pass as many in each"]


def _other_specs(
    call: Call, dims: Sequence[int | None], rules: Sequence[Rule], samples: Mapping[int, int]
) -> list[str]:
    """What to write if the arguments that differ from most of the others are not of the batch."""
    ((batch, _),) = collections.Counter(samples.values()).most_common(1)
    odd = [index for index, count in samples.items() if count != batch]
    specs = [
        _wished(leaf, None if index in odd else dim, rule, index in odd)
        for index, (leaf, dim, rule) in enumerate(zip(call.leaves, dims, rules, strict=True))
    ]
    return [
        f"if {' and '.join(call.names[index] for index in odd)} should go to every microbatch whole, write",
        f"  {written_call(call.args, call.kwargs, specs)}",
        "and if the samples lie along another dim, TensorChunkSpec(dim) there",
    ]


def _wished(leaf: Any, dim: int | None, rule: Rule, odd: bool) -> Spec | None:
    if dim is not None:
        return TensorChunkSpec(dim)
    # What nobody cuts, such as a number, needs no spec: it stays whole inside anything that is cut.
    return Replicate() if odd or rule.spec is not None or is_block_mask(leaf) else None
