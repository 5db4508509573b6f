"""Whether the microbatches of a call fit the trace; if not, in the words of the whole call where that tells more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import InputError
from ...pipe_ir.inputs import bind_inputs
from ...pipe_ir.traced import TracedCall
from ...stage.microbatch import Microbatches

_REMEDY = (
    "The trace holds for microbatches of the example's size: pass so large a batch; or, if the samples are in another "
    "dim, make the schedule with args_chunk_spec or kwargs_chunk_spec: TensorChunkSpec(dim), or Replicate()"
)


def bind_microbatches(
    call: TracedCall, made: Microbatches, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mapping[int, Tensor]]:
    """The inputs of the model in each microbatch of a call."""
    bound: list[Mapping[int, Tensor]] = []
    for nth, (part, named) in enumerate(zip(made.args, made.kwargs, strict=True)):
        try:
            bound.append(bind_inputs(call, part, named))
        except InputError as error:
            if made.sizes is None or len(made.sizes) == 1:
                raise
            if call.dims:  # the trace holds for many sizes: what it does not take may not have to do with the cut
                bind_inputs(call, args, kwargs)
            raise InputError(_told(error, made, nth)) from error
    return bound


def _told(error: InputError, made: Microbatches, nth: int) -> str:
    assert made.sizes is not None
    dims = sorted({dim for dim in made.dims if dim is not None})
    along = f"dim {dims[0]}" if len(dims) == 1 else "their dims"
    return (
        f"microbatch {nth} does not fit, with {made.sizes[nth]} of the {sum(made.sizes)} samples that the call has "
        f"along {along}, in {len(made.sizes)} microbatches: {error}\n{_REMEDY}"
    )
