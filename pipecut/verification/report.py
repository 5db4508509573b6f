"""Comparison with the uncut model: every difference, the worst first, and a table of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InputError, PipeError
from ..pipe_ir import UnsentValue, flatten
from ..text import counted, dtype_name, tensor_text

_What = Literal[
    "loss",
    "output",
    "gradient",
    "gradient norm",
    "input gradient",
    "buffer",
    "weight",  # after a step of the optimizer
    "second loss",
    "second output",
    "leak",  # of a tensor into a stage that does not hold it
]

MISSING = "missing: the uncut model has one"
_EXTRA = "extra: the uncut model has none"
_ROWS = 8  # of the table, if all is well
_WRONG_ROWS = 24  # if it is not
_HEAD = ("", "the worst first", "stage", "off by", "relative", "allowed")


class VerificationError(PipeError):
    """The stages do not compute what the model computes. `verification` has every difference."""

    def __init__(self, verification: Verification) -> None:
        super().__init__(f"the stages do not compute what the model computes.\n{verification}")
        self.verification = verification

    def __reduce__(self) -> tuple[type[VerificationError], tuple[Verification]]:
        return type(self), (self.verification,)


@dataclass(frozen=True)
class Difference:
    """Difference of one value between the stages and the uncut model.

    `off_by` is the largest difference of an element, `magnitude` the number that it is relative to, `allowed` the
    limit. `fault` is set where there is nothing to subtract: the two have different shapes, or one is missing.
    """

    what: _What
    name: str
    off_by: float = 0.0
    magnitude: float = 0.0
    allowed: float = 0.0
    stage: int | None = None
    fault: str = ""
    values: tuple[float, float] | None = None  # of a number: cut, uncut

    @property
    def ok(self) -> bool:
        """True if the difference is allowed."""
        return not self.fault and self.off_by <= self.allowed

    @property
    def relative(self) -> float:
        """Return the difference as a part of the magnitude."""
        return _ratio(self.off_by, self.magnitude)

    @property
    def badness(self) -> float:
        """Return the difference as a multiple of the allowed one."""
        return math.inf if self.fault else _ratio(self.off_by, self.allowed)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0


@dataclass(frozen=True, repr=False)
class Verification:
    """Result of `verify`. Print it for a table; `differences` has them all, the worst first."""

    title: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    tolerance: str

    @property
    def ok(self) -> bool:
        """True if everything is as in the uncut model."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[Difference, ...]:
        """Differences that are not allowed."""
        return tuple(difference for difference in self.differences if not difference.ok)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of parameters that have a gradient in the uncut model only."""
        return tuple(difference.name for difference in self.differences if difference.fault == MISSING)

    @property
    def extra(self) -> tuple[str, ...]:
        """Names of parameters that have a gradient in the stages only."""
        return tuple(difference.name for difference in self.differences if difference.fault == _EXTRA)

    def raise_if_wrong(self) -> None:
        """Raise a VerificationError with the table, unless all is well."""
        if not self.ok:
            raise VerificationError(self)

    def __str__(self) -> str:
        total, wrong = len(self.differences), self.wrong
        verdict = f"all {total} as in the uncut model" if self.ok else f"{len(wrong)} of {total} differ"
        shown = self.differences[:_ROWS] if self.ok else wrong[:_WRONG_ROWS]
        left = (total if self.ok else len(wrong)) - len(shown)
        return "\n".join(
            [
                f"{self.title}: {verdict}",
                *map(_number, sorted(filter(_is_number, self.differences), key=lambda number: number.what != "loss")),
                *_table(shown),
                *([f"  and {left} more, none of them worse"] if left else []),
                f"tolerance: {self.tolerance}",
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__


def by_badness(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Sort differences, the worst first; of equals the one that was found first."""
    return tuple(sorted(differences, key=lambda difference: -difference.badness))


def _is_number(difference: Difference) -> bool:
    return difference.values is not None


def _number(difference: Difference) -> str:
    assert difference.values is not None
    return "{}: {:.7g}, uncut {:.7g}".format(difference.what, *difference.values)


def _table(differences: Sequence[Difference]) -> list[str]:
    rows = [_HEAD, *map(_cells, differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row, difference in zip(rows, (None, *differences), strict=True):
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        if difference is not None and difference.fault:
            right = [right[0], difference.fault]
        lines.append("  ".join(["", *left, *right]).rstrip())
    return lines


def _cells(difference: Difference) -> tuple[str, ...]:
    stage = "" if difference.stage is None else str(difference.stage)
    if difference.fault:
        return difference.what, difference.name, stage, "", "", ""
    allowed = _ratio(difference.allowed, difference.magnitude)
    numbers = (difference.off_by, difference.relative, allowed)
    return difference.what, difference.name, stage, *(f"{number:.2g}" for number in numbers)


# Comparison of tensors and nested values with those of the uncut model, and its tolerance.


# A part of the largest element. A sum over microbatches rounds in another order than one over the batch, and kernels
# choose theirs by the sizes. What that does is some tens of the dtype's epsilon in float32 and float64, and grows with
# depth; the short dtypes, whose sums are rounded after every microbatch, get a few. A gradient that is really wrong
# (a microbatch left out, a wrong weight, a stale value) is off by percents at least.
_RELATIVE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SHORTER = 0.2  # float8 and the like
_FAST_MATMUL = 1e-2  # float32 products with fewer bits: TensorFloat-32


@dataclass(frozen=True)
class Tolerance:
    """Allowed difference: `rtol` times the largest element, plus `atol`."""

    rtol: float
    atol: float
    reason: str

    def allowed(self, magnitude: float) -> float:
        """Return the allowed difference of an element."""
        return self.rtol * magnitude + self.atol

    def __str__(self) -> str:
        return f"{self.rtol:.2g} of the largest element, {self.reason}"


def tolerance_for(dtypes: Iterable[torch.dtype], device: str, rtol: float | None, atol: float | None) -> Tolerance:
    """Return the tolerance of a model that computes with these dtypes: that of the one with the fewest bits.

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
    known, reason = parts[shortest], f"for {dtype_name(shortest)}"
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


def compare_values(what: _What, cut: Any, uncut: Any, tolerance: Tolerance) -> Iterator[Difference]:
    """Yield a difference for each leaf of a nested value."""
    (cut_leaves, cut_structure), (leaves, structure) = flatten(cut, holders=True), flatten(uncut, holders=True)
    paths = ["".join(path) for path in structure.paths()]
    if paths != ["".join(path) for path in cut_structure.paths()]:
        fault = f"has {_words(cut_structure.kind, len(cut_leaves))}, and {_words(structure.kind, len(leaves))} uncut"
        yield Difference(what, what, fault=fault)
        return
    for path, cut_leaf, leaf in zip(paths, cut_leaves, leaves, strict=True):
        name = f"{what}{path}"
        if type(cut_leaf) is UnsentValue:
            continue
        if isinstance(leaf, Tensor) and isinstance(cut_leaf, Tensor):
            yield compare_tensors(what, name, cut_leaf, leaf, tolerance)
        elif type(leaf) is not type(cut_leaf) or (isinstance(leaf, bool | int | float | str) and leaf != cut_leaf):
            yield Difference(what, name, fault=f"is {cut_leaf!r}, and {leaf!r} uncut")


def compare_gradients(
    name: str,
    cut: Tensor | None,
    uncut: Tensor | None,
    tolerance: Tolerance,
    magnitude: float,
    stage: int | None,
    what: _What = "gradient",
) -> Iterator[Difference]:
    """Yield a difference, unless neither has a gradient."""
    if cut is not None and uncut is not None:
        yield compare_tensors(what, name, cut, uncut, tolerance, magnitude, stage)
    elif cut is not uncut:
        yield Difference(what, name, stage=stage, fault=MISSING if cut is None else _EXTRA)


def compare_tensors(
    what: _What,
    name: str,
    cut: Tensor,
    uncut: Tensor,
    tolerance: Tolerance,
    magnitude: float | None = None,
    stage: int | None = None,
) -> Difference:
    """Return the largest difference of an element, with the largest element or `magnitude` as its measure."""
    if cut.shape != uncut.shape or cut.dtype != uncut.dtype:
        return Difference(what, name, stage=stage, fault=f"is {tensor_text(cut)}, and {tensor_text(uncut)} uncut")
    ours, theirs = plain(cut).to(uncut.device), plain(uncut)
    if not ours.is_floating_point():
        differing = int((ours != theirs).sum())
        fault = f"{differing} of {ours.numel()} elements differ" if differing else ""
        return Difference(what, name, stage=stage, fault=fault)
    # Infinities and NaNs in the same places are the same, and in others as different as can be.
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    measure = max(largest(uncut), magnitude or 0.0)
    off_by = float(apart.max()) if apart.numel() else 0.0
    return Difference(what, name, off_by, measure, tolerance.allowed(measure), stage)


def compare_numbers(what: _What, cut: float, uncut: float, tolerance: Tolerance) -> Difference:
    """Compare one number, such as the loss."""
    ours, theirs = (torch.tensor(number, dtype=torch.float64) for number in (cut, uncut))
    difference = compare_tensors(what, what, ours, theirs, tolerance)
    return replace(difference, values=(cut, uncut))


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor to compute with: dense, real, not of a short dtype."""
    made = tensor.detach()
    made = made.to_dense() if made.layout != torch.strided else made
    made = torch.view_as_real(made) if made.is_complex() else made
    return made.float() if made.is_floating_point() and made.dtype != torch.float64 else made


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude of a finite element; 0 if there is none."""
    values = plain(tensor).abs()
    finite = values[values.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def magnitudes_of(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest element of the gradients of each module's own parameters.

    Some gradients are zero in exact arithmetic (the bias of attention's keys, a bias in front of a normalisation): the
    computed ones are the rounding of numbers as large as the gradients beside them.
    """
    found: dict[str, float] = {}
    for name, gradient in gradients.items():
        if gradient is not None:
            module = module_of(name)
            found[module] = max(found.get(module, 0.0), largest(gradient))
    return found


def module_of(name: str) -> str:
    """Return the path of the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def _words(kind: str, leaves: int) -> str:
    return f"a {kind} of {counted(leaves, 'value')}"
