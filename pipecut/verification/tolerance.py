"""How much a number may differ from the same number computed in another order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import InputError

# A part of the largest element. A sum over microbatches rounds in another order than one over the batch, and kernels
# choose theirs by the sizes. What that does is some tens of the dtype's epsilon in float32 and float64, and grows with
# depth; the short dtypes, whose sums are rounded after every microbatch, get a few. A gradient that is really wrong
# (a microbatch left out, a wrong weight, a stale value) is off by percents at least.
_RELATIVE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SHORTER = 0.2  # float8 and the like
_FAST_MATMUL = 1e-2  # float32 products with fewer bits: TensorFloat-32


@dataclass(frozen=True)
class Tolerance:
    """Allowed is `rtol` times the largest element, plus `atol`."""

    rtol: float
    atol: float
    reason: str

    def allowed(self, magnitude: float) -> float:
        """How far off an element may be."""
        return self.rtol * magnitude + self.atol

    def __str__(self) -> str:
        return f"{self.rtol:.2g} of the largest element, {self.reason}"


def tolerance_for(dtypes: Iterable[torch.dtype], device: str, rtol: float | None, atol: float | None) -> Tolerance:
    """The tolerance of a model that computes with these dtypes: that of the one with the fewest bits.

    >>> print(tolerance_for([torch.float32, torch.int64], "cpu", None, None))
    1e-05 of the largest element, for float32
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise InputError(f"{name} must be a number of at least 0, or None, got {value!r}")
    used = {dtype for dtype in dtypes if dtype.is_floating_point} or {torch.get_default_dtype()}
    if torch.is_autocast_enabled(device):
        used.add(torch.get_autocast_dtype(device))
    parts = {dtype: _RELATIVE.get(dtype, _SHORTER) for dtype in used}
    shortest = max(parts, key=lambda dtype: parts[dtype])
    known, reason = parts[shortest], f"for {str(shortest).removeprefix('torch.')}"
    if shortest == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        known, reason = _FAST_MATMUL, f"for float32 with '{torch.get_float32_matmul_precision()}' matmul precision"
    limits = torch.finfo(shortest)
    # Below the smallest normal number the distance between two numbers no longer shrinks.
    smallest = 16 * limits.smallest_normal * limits.eps
    return Tolerance(
        known if rtol is None else float(rtol),
        smallest if atol is None else float(atol),
        reason if rtol is None else "as asked for",
    )
