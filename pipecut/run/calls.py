"""The arguments and the target of a step, cut into those of its microbatches, and checked against the trace."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..pipe_ir import TracedCall, active_autocast, bind_inputs, flatten, sizes_of, unflatten
from ..stage import (
    BatchDims,
    Microbatches,
    Rule,
    batch_dims,
    cut_rows,
    match_specs,
    open_value,
    split_by_dims,
    split_by_specs,
)
from ..text import shape_text
from .transport import Meta


@dataclass(frozen=True)
class Calls:
    """The arguments of the microbatches of one step, on the rank of the first stage."""

    made: Microbatches
    samples: list[int]
    sizes: list[tuple[int, ...]]  # the symbolic dims, or one number that stands for all shapes
    roots: list[Mapping[int, Tensor]]  # the inputs of a traced model by their number
    untied: tuple[str, ...] = ()  # inputs that are cut with others because they are as large
    fixed: str = ""  # why a microbatch has a fixed number of samples, if it has
    form: int = 0  # the trace that the call is of

    @property
    def args(self) -> list[tuple[Any, ...]]:
        return self.made.args

    @property
    def kwargs(self) -> list[dict[str, Any]]:
        return self.made.kwargs


def cut_traced(
    call: TracedCall,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    chunks: int,
    specs: tuple[Any, Any],
    *,
    fewer: bool = False,
) -> Calls:
    """Cut the arguments of a traced model along the dim that the trace has as the batch."""
    batch = None if specs != (None, None) else batch_dims(call, args, kwargs)
    if batch is None:
        made = split_by_specs(args, kwargs, chunks, *specs, fewer=fewer)
    else:
        chunks = chunks if batch.exact is None else _count_exact(call, batch, batch.exact, chunks, fewer=fewer)
        made = split_by_dims(args, kwargs, chunks, batch.dims, call.signature, fewer=fewer)
    roots = _bind_microbatches(call, made, args, kwargs)
    symbols = sorted(map(str, call.dims))
    known = [sizes_of(call.dims, root) for root in roots]
    calls = _calls(made, [tuple(each[symbol] for symbol in symbols) for each in known], roots)
    return calls if batch is None else replace(calls, untied=batch.untied, fixed=_why_fixed(call, batch))


def _why_fixed(call: TracedCall, batch: BatchDims) -> str:
    where = f" at {batch.source}" if batch.source else ""
    return "" if batch.exact is None else f"the code of {call.model_name} fixed the batch{where}"


def _count_exact(call: TracedCall, batch: BatchDims, size: int, chunks: int, *, fewer: bool) -> int:
    """Return the number of microbatches if each has exactly one size, that the model's code fixed."""
    count, rest = divmod(batch.samples, size)
    if not rest and (count == chunks or (fewer and 0 < count < chunks)):
        return count
    fits = f"from {size} to {size * chunks} samples, a multiple of {size}" if fewer else f"{size * chunks} samples"
    other = size_for(batch.samples, chunks, fewer=fewer)
    again = f"or, if the model runs with {other}, call pipeline() with an example of {other}; " if other else ""
    again = again if rest else f"or make a schedule with {count} microbatches; "
    raise InputError(
        f"{batch.samples} samples cannot be cut into {chunks} microbatches of {size}: {_why_fixed(call, batch)}, and "
        f"the trace holds for microbatches of exactly {size}. Pass {fits}; {again}{OTHER_DIM}"
    )


def size_for(samples: int, chunks: int, *, fewer: bool) -> int:
    """Return the size of microbatches that are all equal; 0 if there is none.

    >>> size_for(8, 4, fewer=False), size_for(9, 4, fewer=True), size_for(3, 4, fewer=True)
    (2, 0, 1)
    """
    size, rest = divmod(samples, chunks)
    return 0 if rest and size else size or int(fewer)


def cut_by_hand(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], chunks: int, specs: tuple[Any, Any], *, fewer: bool = False
) -> Calls:
    """Cut the arguments of modules that were cut by hand; all shapes together get one number."""
    made = split_by_specs(args, kwargs, chunks, *specs, fewer=fewer)
    sizes = [(_number_of_shapes(part, named),) for part, named in zip(made.args, made.kwargs, strict=True)]
    return _calls(made, sizes, [])


def _calls(made: Microbatches, sizes: Sequence[tuple[int, ...]], roots: list[Mapping[int, Tensor]]) -> Calls:
    samples = [1] * len(made.args) if made.sizes is None else list(made.sizes)
    return Calls(made, samples, list(sizes), roots)


def untied_text(paths: Sequence[str], samples: Sequence[int]) -> str:
    """Return what to know where inputs are cut together and the model's code does not tie them."""
    which = paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
    return (
        f"{which} {'is' if len(paths) == 1 else 'are'} cut into microbatches together with the other inputs: there are "
        f"{sum(samples)} rows in each, and there were as many in each in the example, but nothing in the model's code "
        "says that row i of one belongs to row i of another. What the code computes over all rows (a contrastive loss) "
        "it computes over those of each microbatch. If an input should go to every microbatch whole, give its size "
        f'another name in pipeline(), dynamic={{"{paths[0]}": {{0: "rows"}}}}, or give the schedule chunk specs'
    )


def _number_of_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    leaves, _ = flatten((args, dict(kwargs)))
    shapes = [str(Meta.of(leaf)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
    # Under autocast the stages give other dtypes.
    return zlib.crc32(repr((shapes, active_autocast())).encode())


OTHER_DIM = (
    "or, if the samples are in another dim, make the schedule with args_chunk_spec or kwargs_chunk_spec: "
    "TensorChunkSpec(dim), or Replicate()"
)


def _bind_microbatches(
    call: TracedCall, made: Microbatches, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Mapping[int, Tensor]]:
    """Return the inputs of the model in each microbatch, and raise on those that do not fit the trace."""
    bound: list[Mapping[int, Tensor]] = []
    for nth, (part, named) in enumerate(zip(made.args, made.kwargs, strict=True)):
        try:
            bound.append(bind_inputs(call, part, named))
        except InputError as error:
            if made.sizes is None or len(made.sizes) == 1:
                raise
            if call.dims:  # many sizes fit: if the whole call does not, its own error says more
                bind_inputs(call, args, kwargs)
            raise InputError(_misfit(error, made.sizes, made.dims, nth)) from error
    return bound


def _misfit(error: InputError, sizes: Sequence[int], dims: Sequence[int | None], nth: int) -> str:
    cut_dims = sorted({dim for dim in dims if dim is not None})
    along = f"dim {cut_dims[0]}" if len(cut_dims) == 1 else "their dims"
    return (
        f"microbatch {nth} does not fit, with {sizes[nth]} of the {sum(sizes)} samples that the call has along "
        f"{along}, in {len(sizes)} microbatches: {error}\nPass another number of samples, or make a schedule with "
        f"another number of microbatches; {OTHER_DIM}"
    )


# Calls seen before.

_HASHED_BY_VALUE = (bool, int, float, str, type(None))


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what the checks and the cut of a call depend on; None for calls that are looked at every time.

    Those are calls with nested values, with one tensor twice, and with objects of other classes.
    """
    kinds: list[Any] = [len(args), active_autocast(), *kwargs]
    tensors = set()
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor and not value.is_nested and id(value) not in tensors:
            tensors.add(id(value))
            kinds.append((value.shape, value.dtype, value.layout))
        elif type(value) in _HASHED_BY_VALUE:
            kinds.append((type(value), value))
        else:
            return None
    return tuple(kinds)


@dataclass(frozen=True)
class Recipe:
    """The way to cut calls of one kind: along the dims of their arguments, which are not nested."""

    made: Microbatches  # without the arguments
    samples: list[int]
    sizes: list[tuple[int, ...]]
    places: Mapping[int, int]  # from the number of a model input to the place of the argument that it is
    form: int
    fixed: str

    @classmethod
    def of(cls, calls: Calls, kwargs: Mapping[str, Any]) -> Recipe:
        """Take the recipe from a call that was checked and cut."""
        parts = [*calls.args[0], *(calls.kwargs[0][name] for name in kwargs)]
        place_of = {id(part): place for place, part in enumerate(parts)}
        places = {number: place_of[id(part)] for number, part in calls.roots[0].items()} if calls.roots else {}
        return cls(replace(calls.made, args=[], kwargs=[]), calls.samples, calls.sizes, places, calls.form, calls.fixed)

    def calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Calls:
        """Cut another call of the kind."""
        chunks, sizes = len(self.samples), self.made.sizes
        columns = [
            [value] * chunks if dim is None or sizes is None else cut_rows(value, dim, sizes)
            for value, dim in zip((*args, *kwargs.values()), self.made.dims, strict=True)
        ]
        rows = list(zip(*columns, strict=True))
        made = Microbatches(
            [row[: len(args)] for row in rows],
            [dict(zip(kwargs, row[len(args) :], strict=True)) for row in rows],
            sizes,
            self.made.dims,
            self.made.in_order,
        )
        roots: list[Mapping[int, Tensor]] = [
            {number: row[place] for number, place in self.places.items()} for row in rows if self.places
        ]
        return Calls(made, self.samples, self.sizes, roots, fixed=self.fixed, form=self.form)


# The target of a batch.

_SPEC = "target_chunk_spec"
_REMEDY = (
    "make the schedule with target_chunk_spec=TensorChunkSpec(dim); Replicate() is for a target that goes to every "
    "microbatch whole"
)


def cut_target(
    target: Any, samples: Sequence[int], spec: Any = None, *, samples_first: bool = True, in_order: bool = True
) -> list[Any]:
    """Cut a target into the rows that belong to the samples of each microbatch, also if there are several to a sample.

    The spec is TensorChunkSpec(dim), Replicate(), another ChunkSpec, or a nested value of these; by default the samples
    are in dim 0. That raises an error if not all inputs have their samples there (`samples_first`), unless the target
    is one value for each sample; and if several rows to a sample are possible and parts of the target differ in their
    number. `in_order` says that the microbatches hold consecutive samples, as those of the target must then.

    >>> import torch
    >>> from pipecut import TensorChunkSpec
    >>> [part.tolist() for part in cut_target(torch.arange(6).reshape(2, 3), [2, 1], TensorChunkSpec(1))]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """
    is_plain = type(target) is Tensor and not target.is_nested and target.dim() > 0
    if is_plain and spec is None and samples_first and in_order and target.shape[0] == sum(samples):
        return cut_rows(target, 0, samples)
    leaves, structure = open_value(target)
    rules = match_specs(spec, structure, _SPEC, "cut")
    names = ["target" + "".join(path) for path in structure.paths()]
    parts = [
        _leaf(name, value, rule, sum(samples), samples_first or not in_order)
        for name, value, rule in zip(names, leaves, rules, strict=True)
    ]
    counted = [part for part in parts if part.rows is not None]
    _check_order(counted, in_order)
    _check_rows(counted, samples)
    columns = [part.cut(samples) for part in parts]
    return [unflatten(structure, [column[nth] for column in columns]) for nth in range(len(samples))]


@dataclass(frozen=True, eq=False)
class _Leaf:
    """One leaf of a target, and the spec that cuts it."""

    name: str
    value: Any
    rule: Rule
    rows: int | None  # None if it goes to every microbatch whole
    dim: int | None = None  # in which it has its rows, if it is cut along a dim

    @property
    def by_default(self) -> bool:
        return not self.rule.given

    def has_elsewhere(self, samples: int) -> bool:
        """Return True if another dim than the first has as many entries as there are samples."""
        return samples in self.value.shape[1:]

    def cut(self, samples: Sequence[int]) -> Sequence[Any]:
        """Return the parts of the microbatches."""
        if self.by_default and self.rows is None:
            return [self.value] * len(samples)
        each = 1 if self.rows is None else self.rows // sum(samples)
        return self.rule.spec.cut(self.value, [each * size for size in samples], self.name)


def _leaf(name: str, value: Any, rule: Rule, total: int, samples_first: bool) -> _Leaf:
    if rule.given:
        return _Leaf(name, value, rule, rule.spec.samples(value, name), rule.spec.cut_dim(value, name))
    if not isinstance(value, Tensor) or value.dim() == 0:
        return _Leaf(name, value, rule, None)
    if not samples_first and tuple(value.shape) != (total,):
        raise InputError(
            f"{name} has the shape {shape_text(value.shape)}, and it is not known in which dim its {total} samples "
            f"are, for inputs have theirs in another dim than 0: {_REMEDY}"
        )
    return _Leaf(name, value, rule, value.shape[0], 0)


def _check_order(parts: Sequence[_Leaf], in_order: bool) -> None:
    """Raise if inputs and target would be cut into different samples."""
    for part in parts:
        if part.rule.spec.keeps_order != in_order:
            inputs, target = ("", "not ") if in_order else ("not ", "")
            raise InputError(
                f"the inputs are {inputs}cut into consecutive samples, and {part.name} is {target}cut so by "
                f"{part.rule.spec!r}: make the schedule with a target_chunk_spec= that cuts it like the inputs"
            )


def _check_rows(parts: Sequence[_Leaf], samples: Sequence[int]) -> None:
    """Raise unless every tensor has a row per sample, or several without anything that speaks against it."""
    total = sum(samples)
    for part in parts:
        if part.rows is not None and part.rows % total:
            where = "rows" if part.dim in (None, 0) else f"entries along dim {part.dim}"
            raise InputError(
                f"the {part.name} has {part.rows} {where}, and the batch {total} samples: give that of the whole "
                "batch, with the same number of rows for each sample; if its samples are in another dim, or it has "
                f"none, {_REMEDY}"
            )
    # What has a row for each sample is not in doubt.
    guessed = [part for part in parts if part.by_default and part.rows != total]
    if len(samples) > 1 and guessed:
        _check_rows_agree(guessed[0], parts, total)
        if all(part.by_default and part.has_elsewhere(total) for part in parts):
            _raise_samples_elsewhere(guessed[0], total)


def _check_rows_agree(part: _Leaf, parts: Sequence[_Leaf], total: int) -> None:
    """Raise on several rows per sample beside another number: it may be a table that belongs to all samples."""
    other = next((one for one in parts if one.rows != part.rows), None)
    if other is None or part.rows is None:
        return
    each = part.rows // total
    raise InputError(
        f"{part.name} has {part.rows} rows, {other.name} has {other.rows}, and the batch {total} samples: it is not "
        f"known whether {part.name} has {each} rows for each sample, or belongs to all of them. "
        f"Make the schedule with target_chunk_spec=, in which {part.name} has TensorChunkSpec(0) if it is to be cut, "
        "and Replicate() if it goes to every microbatch whole"
    )


def _raise_samples_elsewhere(part: _Leaf, total: int) -> None:
    """Raise on several rows per sample if the samples may be in another dim, as where a model returns them there."""
    dim = list(part.value.shape).index(total, 1)
    raise InputError(
        f"{part.name} has the shape {shape_text(part.value.shape)}, and the batch {total} samples: it is not known "
        f"whether they are in dim 0, with {len(part.value) // total} rows each, or in dim {dim}. Make the schedule "
        f"with target_chunk_spec=TensorChunkSpec(0), or TensorChunkSpec({dim})"
    )
