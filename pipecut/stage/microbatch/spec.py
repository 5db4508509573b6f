"""Chunk specs: classes that cut one value into microbatches and merge their results, and their match with arguments."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ...errors import InputError
from ...pipe_ir import Atom, Path, Structure, flatten, map_leaves
from ...text import did_you_mean, shape_text
from .tensors import (
    check_can_be_cut,
    check_holds_no_tensors,
    common_value,
    cut_rows,
    is_block_mask,
    join,
    mask_batch,
    mean,
    rows_along,
)


class ChunkSpec(Atom):
    """Base class of all chunk specs.

    A subclass that defines `cut` serves as `args_chunk_spec`, `kwargs_chunk_spec` and `target_chunk_spec`; one that
    defines `merge` serves as `output_merge_spec`. A spec gets one leaf of a nested value at a time. Its `__repr__` and
    the `name` of the leaf are what error messages show.

    >>> class EveryNth(ChunkSpec):
    ...     def samples(self, value, name):
    ...         return len(value)
    ...     def cut(self, value, sizes, name):
    ...         return [value[nth :: len(sizes)] for nth in range(len(sizes))]
    ...     def __repr__(self):
    ...         return "EveryNth()"
    >>> from pipecut.stage.microbatch import split_args_kwargs_into_chunks
    >>> split_args_kwargs_into_chunks(("abcde",), None, 2, (EveryNth(),))[0]
    [('ace',), ('bd',)]
    """

    usage: ClassVar[str] = ""  # as messages propose it
    keeps_order: ClassVar[bool] = False  # True if each microbatch gets consecutive samples, in the order of the batch

    def samples(self, value: Any, name: str) -> int | None:
        """Return the number of samples in a value, on which all arguments must agree; None if it has none."""
        return None

    def cut_dim(self, value: Any, name: str) -> int | None:
        """Return the dim along which a tensor is cut into consecutive rows; None if it is not."""
        return None

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> Sequence[Any]:
        """Return the part of a value for each microbatch, given their numbers of samples."""
        raise NotImplementedError

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        """Return the value of the batch from those of the microbatches; `weights` are for averages."""
        raise NotImplementedError

    def inside(self) -> ChunkSpec:
        """Return the spec of the leaves inside a container that this one was given for."""
        return self


@dataclass(frozen=True, repr=False)
class TensorChunkSpec(ChunkSpec):
    """A tensor whose samples lie along `split_dim`. Given for a nested argument, it holds for all tensors inside.

    Outputs are concatenated along it. Values that are not tensors go to every microbatch, and must be the same in the
    outputs of all.

    >>> TensorChunkSpec(1)
    TensorChunkSpec(1)
    >>> TensorChunkSpec.from_tuple((0, 1)), TensorChunkSpec.from_dict({"y": 0})
    ((TensorChunkSpec(0), TensorChunkSpec(1)), {'y': TensorChunkSpec(0)})
    """

    usage = "TensorChunkSpec(dim)"
    keeps_order = True
    split_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.split_dim, int) or isinstance(self.split_dim, bool):
            raise InputError(
                f"TensorChunkSpec takes the number of a dim, such as TensorChunkSpec(0); got {self.split_dim!r}"
            )

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return specs for positional arguments, from their dims; None stands for the default."""
        specs: tuple[Any, ...] = map_leaves(_spec_of_dim, chunk_dims)
        return specs

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Return specs for keyword arguments, from their dims; None stands for the default."""
        specs: dict[str, Any] = map_leaves(_spec_of_dim, chunk_dims)
        return specs

    def samples(self, value: Any, name: str) -> int | None:
        dim = self.cut_dim(value, name)
        return None if dim is None else rows_along(value, dim)

    def cut_dim(self, value: Any, name: str) -> int | None:
        if isinstance(value, Tensor):
            check_can_be_cut(name, value)
            return self._dim_of(value, name)
        if is_block_mask(value):
            if self.split_dim != 0:
                raise InputError(
                    f"{name} is a BlockMask, whose samples are along dim 0: write TensorChunkSpec(0), not {self!r}"
                )
            return 0 if mask_batch(value) > 1 else None
        check_holds_no_tensors(name, value)
        return None

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> Sequence[Any]:
        dim = self.cut_dim(value, name)
        return [value] * len(sizes) if dim is None else cut_rows(value, dim, sizes)

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        if not any(isinstance(value, Tensor) for value in values):
            return common_value(values, name)
        return join(values, self.split_dim, name)

    def inside(self) -> ChunkSpec:
        return _TensorsInside(self.split_dim)

    def _dim_of(self, tensor: Tensor, name: str) -> int | None:
        dim = self.split_dim
        if not -tensor.dim() <= dim < tensor.dim():
            dims = f"dims 0 to {tensor.dim() - 1}" if tensor.dim() else "no dim"
            raise InputError(
                f"{name} cannot be cut along dim {dim}: its shape is {shape_text(tensor.shape)}, with {dims}; "
                "correct the spec, or write Replicate()"
            )
        return dim % tensor.dim()


class _TensorsInside(TensorChunkSpec):
    """A TensorChunkSpec for all tensors of a nested value: those without dims are not cut, and their mean is merged."""

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        if all(isinstance(value, Tensor) and value.dim() == 0 for value in values):
            return mean(values, weights, name)
        return super().merge(values, weights, name)

    def _dim_of(self, tensor: Tensor, name: str) -> int | None:
        return super()._dim_of(tensor, name) if tensor.dim() else None


def _spec_of_dim(dim: int | None) -> TensorChunkSpec | None:
    return None if dim is None else TensorChunkSpec(dim)


@dataclass(frozen=True)
class Replicate(ChunkSpec):
    """A value that every microbatch gets as it is; of a result, the first microbatch's. The class itself will do too.

    >>> Replicate()
    Replicate()
    """

    usage = "Replicate()"
    keeps_order = True

    def cut(self, value: Any, sizes: Sequence[int], name: str) -> Sequence[Any]:
        return [value] * len(sizes)

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        return values[0]


@dataclass(frozen=True, eq=False)
class CustomReducer(ChunkSpec):
    """A result that is folded: `reduce_fn(so_far, value)` over the microbatches in order, from `init_value`.

    >>> from pipecut.stage.microbatch import merge_chunks
    >>> merge_chunks([{"tokens": 3}, {"tokens": 4}], {"tokens": CustomReducer(0, operator.add)})
    {'tokens': 7}
    """

    usage = "CustomReducer(init_value, reduce_fn)"
    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]

    def merge(self, values: Sequence[Any], weights: Sequence[float] | None, name: str) -> Any:
        return functools.reduce(self.reduce_fn, values, self.init_value)


@dataclass(frozen=True, eq=False)
class LossReducer(CustomReducer):
    """A CustomReducer for a loss."""


sum_reducer = LossReducer(0, operator.add)
DEFAULT = TensorChunkSpec(0).inside()  # of values for which no spec was given
_BUILT_IN: tuple[type[ChunkSpec], ...] = (TensorChunkSpec, Replicate, CustomReducer)


# Match the specs that a user gives with the leaves of a nested value, and write specs as the user would.


_Use = Literal["cut", "merge"]
_BRACKETS = {"tuple": "()", "list": "[]"}


class Rule(NamedTuple):
    """The spec of one leaf; `given` is False if no spec was given for it, and the default holds."""

    spec: ChunkSpec
    given: bool = True


def match_specs(specs: Any, structure: Structure, called: str, use: _Use) -> list[Rule]:
    """Return one rule for each leaf of a value with this structure.

    A spec holds for all that is inside its place; what no spec reaches has the default. Only keys and positions
    count, not the type of the containers: a dict with the names of its fields serves for a dataclass.

    >>> from pipecut.stage.microbatch import TensorChunkSpec
    >>> _, structure = flatten(({"ids": 1, "table": 2}, 3))
    >>> rules = match_specs(({"table": Replicate()}, TensorChunkSpec(1)), structure, "specs", "cut")
    >>> [(rule.spec, rule.given) for rule in rules]
    [(TensorChunkSpec(0), False), (Replicate(), True), (TensorChunkSpec(1), True)]
    """
    leaves, spec_structure = flatten(specs)
    given = {
        _keys(path): _checked(spec, called + "".join(path), use)
        for path, spec in zip(spec_structure.paths(), leaves, strict=True)
    }
    _check_known(given, structure, called)
    return [_rule(_keys(path), given) for path in structure.paths()]


def _rule(keys: Path, given: dict[Path, ChunkSpec | None]) -> Rule:
    for length in range(len(keys), -1, -1):
        if keys[:length] in given:
            spec = given[keys[:length]]
            if spec is None:
                break
            return Rule(spec if length == len(keys) else spec.inside())
    return Rule(DEFAULT, given=False)


def _keys(path: Path) -> Path:
    """Return a path in which attributes and keys look the same."""
    return tuple(f"[{step[1:]!r}]" if step.startswith(".") else step for step in path)


def _checked(spec: Any, place: str, use: _Use) -> ChunkSpec | None:
    made: Any = Replicate() if spec is Replicate else spec
    if made is None or (isinstance(made, ChunkSpec) and _defines(type(made), use)):
        return made
    ways = ", ".join(kind.usage for kind in _BUILT_IN if _defines(kind, use))
    meant = f"write TensorChunkSpec({spec})" if type(spec) is int else f"write {ways} of pipecut, or None"
    missing = f", which has no method {use}()" if isinstance(made, ChunkSpec) else ", not a spec"
    kind = f"{type(spec).__module__}.{type(spec).__qualname__}"
    raise InputError(f"{place} is {spec!r} ({kind}){missing}: {meant}")


def _defines(kind: type[ChunkSpec], use: _Use) -> bool:
    return getattr(kind, use) is not getattr(ChunkSpec, use)


def _check_known(given: dict[Path, ChunkSpec | None], structure: Structure, called: str) -> None:
    known = set(_places(structure, ()))
    for keys in given:
        if keys not in known:
            written = ["".join(each) for each in sorted(known) if each]
            near = did_you_mean("".join(keys), written)
            if not written:
                near = f" The value is not nested: give the spec itself as {called}, without a container"
            raise InputError(
                f"{called}{''.join(keys)} says how to treat a value that is not there "
                f"(there is {', '.join(written) or 'none'}).{near}"
            )


def _places(structure: Structure, above: Path) -> Iterator[Path]:
    """Yield the keys to every value in a nested one, containers included."""
    yield above
    for step, child in zip(_keys(structure.keys), structure.children, strict=True):
        yield from _places(child, (*above, step))


def written_call(args: Structure, kwargs: Structure, specs: Sequence[ChunkSpec | None]) -> str:
    """Return the text of the keyword arguments that give the leaves of a call these specs.

    >>> from pipecut.stage.microbatch import TensorChunkSpec
    >>> args, kwargs = flatten(({"ids": 1, "table": 2}, 3))[1], flatten({"mask": (4, 5)})[1]
    >>> print(written_call(args, kwargs, [TensorChunkSpec(0), Replicate(), None, Replicate(), Replicate()]))
    args_chunk_spec=({'ids': TensorChunkSpec(0), 'table': Replicate()}, None), kwargs_chunk_spec={'mask': Replicate()}
    """
    remaining = iter(specs)
    texts = {
        "args_chunk_spec": _inside(args, [_written(child, remaining) for child in args.children]),
        "kwargs_chunk_spec": _inside(kwargs, [_written(child, remaining) for child in kwargs.children]),
    }
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text is not None)


def _written(structure: Structure, specs: Iterator[ChunkSpec | None]) -> ChunkSpec | str | None:
    """Return the text for one value: one spec if it serves for all inside, None where the default will do."""
    if structure.rebuild is None:
        return next(specs)
    parts = [_written(child, specs) for child in structure.children]
    different = set(parts) - {None}
    if len(different) == 1 and not any(isinstance(part, str) for part in different):
        return different.pop()
    return _inside(structure, parts)


def _inside(structure: Structure, parts: Sequence[ChunkSpec | str | None]) -> str | None:
    if all(part is None for part in parts):
        return None
    brackets = _BRACKETS.get(structure.kind)
    if brackets is not None:
        comma = "," if structure.kind == "tuple" and len(parts) == 1 else ""
        return f"{brackets[0]}{', '.join(map(str, parts))}{comma}{brackets[1]}"
    entries = zip(structure.keys, parts, strict=True)
    return "{" + ", ".join(f"{_key(step)}: {part}" for step, part in entries if part is not None) + "}"


def _key(step: str) -> str:
    """Return `['ids']` and `.ids` as the key of a dict: `'ids'`."""
    return repr(step[1:]) if step.startswith(".") else step[1:-1]
