"""In which dim of each input a trace has the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from ...errors import InputError
from ...pipe_ir.spec import TensorSpec
from ...pipe_ir.traced import TracedCall

_REMEDY = "say where the samples are with args_chunk_spec and kwargs_chunk_spec: TensorChunkSpec(dim) or Replicate()"


def batch_dims(call: TracedCall) -> dict[str, int | None] | None:
    """The batch's dim in each tensor input, None for an input without it; for `split_by_dims`.

    The batch is the size that the user calls so, or else the symbolic size of dim 0 of inputs. If there are several, or
    if an input has it in a way that cannot be cut, that is an error. The whole result is None if there is none: the
    trace holds for one size only.

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
    candidates = _candidates(specs, call.named_dims)
    if not candidates:
        return None
    if len(candidates) > 1:
        raise InputError(_several(specs, candidates))
    return {path: _dim(path, spec, candidates[0]) for path, spec in specs.items()}


def _candidates(specs: Mapping[str, TensorSpec], named: Sequence[str]) -> list[sympy.Symbol]:
    """The sizes that may be the batch: a name for another size says that it is not, unless it is the only one."""
    symbols = sorted({symbol for spec in specs.values() for symbol in spec.symbols}, key=str)
    firsts = [symbol for symbol in symbols if any(symbol in spec.shape[:1] for spec in specs.values())]
    by_name = [symbol for symbol in symbols if str(symbol) == "batch" and "batch" in named]
    unnamed = [symbol for symbol in firsts if str(symbol) not in named]
    return by_name + unnamed or firsts


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
    places = [
        next((path, spec.shape.index(symbol)) for path, spec in specs.items() if symbol in spec.shape)
        for symbol in symbols
    ]
    wishes = [
        f'"{path}": {{{dim}: "{"batch" if nth == 0 else f"rows{nth}"}"}}' for nth, (path, dim) in enumerate(places)
    ]
    named = f"name them in pipeline(), such as dynamic={{{', '.join(wishes)}}}: the one called batch is cut"
    first = f"the trace does not tell which of {names} is the batch, that is to be cut:"
    return "\n".join([first, *lines, f"{named}; or {_REMEDY}"])
