"""In which dim of each input a trace has the batch."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from ..errors import InputError
from ..pipe_ir.spec import TensorSpec
from ..pipe_ir.traced import TracedCall

_REMEDY = "say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or Replicate()"


def batch_dims(call: TracedCall) -> dict[str, int | None] | None:
    """The batch's dim in each tensor input, None for an input without it; for `split_by_dims`.

    The batch is the one size of the inputs that is symbolic. If there are several, or if an input has it in a way that
    cannot be cut, that is an error. The whole result is None if there is none: the trace holds for one size only.

    >>> import torch
    >>> from torch import nn
    >>> from pipecut import SplitPoint, pipeline
    >>> class Net(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
    ...     def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    ...         return self.second(self.first(x) + bias)
    >>> pipe = pipeline(Net(), (torch.zeros(3, 4), torch.zeros(4)), split_spec={"second": SplitPoint.BEGINNING})
    >>> batch_dims(pipe.traced.call)
    {'x': 0, 'bias': None}
    """
    specs = {entry.path: entry.spec for entry in call.inputs if entry.spec is not None}
    symbols = sorted({symbol for spec in specs.values() for symbol in spec.symbols}, key=str)
    if not symbols:
        return None
    if len(symbols) > 1:
        raise InputError(_several(specs, symbols))
    return {path: _dim(path, spec, symbols[0]) for path, spec in specs.items()}


def _dim(path: str, spec: TensorSpec, batch: sympy.Symbol) -> int | None:
    dims = [dim for dim, size in enumerate(spec.shape) if isinstance(size, sympy.Expr) and size.has(batch)]
    if not dims:
        return None
    if len(dims) > 1 or spec.shape[dims[0]] != batch:
        raise InputError(f"{path} is {spec} in the trace, which cannot be cut along {batch}: {_REMEDY}")
    return dims[0]


def _several(specs: Mapping[str, TensorSpec], symbols: list[sympy.Symbol]) -> str:
    lines = [f"  {path} is {spec}" for path, spec in specs.items()]
    names = ", ".join(map(str, symbols))
    return "\n".join([f"the trace does not tell which of {names} is the batch, that is to be cut:", *lines, _REMEDY])
