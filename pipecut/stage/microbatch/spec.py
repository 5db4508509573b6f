"""How a value is cut into microbatches and put together again, as the user says it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...pipe_ir import Atom, Path, Structure, flatten, map_leaves
from ...text import did_you_mean


@dataclass(frozen=True, repr=False)
class TensorChunkSpec(Atom):
    """A tensor whose samples lie along `split_dim`. Given for a nested argument, it holds for all tensors inside.

    >>> TensorChunkSpec(1)
    TensorChunkSpec(1)
    >>> TensorChunkSpec.from_tuple((0, 1)), TensorChunkSpec.from_dict({"y": 0})
    ((TensorChunkSpec(0), TensorChunkSpec(1)), {'y': TensorChunkSpec(0)})
    """

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
        """Specs for positional arguments, from the dims; a None stays, for the default."""
        specs: tuple[Any, ...] = map_leaves(_spec_of_dim, chunk_dims)
        return specs

    @staticmethod
    def from_dict(chunk_dims: dict[str, Any]) -> dict[str, Any]:
        """Specs for keyword arguments, from the dims; a None stays, for the default."""
        specs: dict[str, Any] = map_leaves(_spec_of_dim, chunk_dims)
        return specs


def _spec_of_dim(dim: int | None) -> TensorChunkSpec | None:
    return None if dim is None else TensorChunkSpec(dim)


@dataclass(frozen=True)
class Replicate(Atom):
    """A value that every microbatch gets as it is; of a result, the first microbatch's. The class itself will do too.

    >>> Replicate()
    Replicate()
    """


@dataclass(frozen=True, eq=False)
class CustomReducer(Atom):
    """A result that is folded: `reduce_fn(so_far, value)` over the microbatches in order, from `init_value`.

    >>> from pipecut.stage.microbatch import merge_chunks
    >>> merge_chunks([{"tokens": 3}, {"tokens": 4}], {"tokens": CustomReducer(0, operator.add)})
    {'tokens': 7}
    """

    init_value: Any
    reduce_fn: Callable[[Any, Any], Any]


@dataclass(frozen=True, eq=False)
class LossReducer(CustomReducer):
    """A CustomReducer for a loss."""


sum_reducer = LossReducer(0, operator.add)

# The names that torch.distributed.pipelining has for these.
_Replicate = Replicate
_CustomReducer = CustomReducer
_LossReducer = LossReducer


# MERGED: Which of the given specs holds for which part of a nested value.


Spec = TensorChunkSpec | Replicate | CustomReducer


@dataclass(frozen=True)
class Rule:
    """The spec of one leaf, None for the default; `exact` if it was given for this leaf, not for a value around it."""

    spec: Spec | None
    exact: bool


_DEFAULT = Rule(None, exact=False)
_WAYS = {
    TensorChunkSpec: "TensorChunkSpec(dim)",
    Replicate: "Replicate()",
    CustomReducer: "CustomReducer(init_value, reduce_fn)",
}


def match_specs(specs: Any, structure: Structure, called: str, kinds: tuple[type[Spec], ...]) -> list[Rule]:
    """One rule for each leaf of a value with this structure.

    A spec holds for all that is inside its place; what no spec reaches has the default. Only keys and positions
    count, not the type of the containers: a dict with the names of its fields serves for a dataclass.

    >>> _, structure = flatten(({"ids": 1, "table": 2}, 3))
    >>> rules = match_specs(({"table": Replicate()}, TensorChunkSpec(1)), structure, "specs", tuple(_WAYS))
    >>> [rule.spec for rule in rules]
    [None, Replicate(), TensorChunkSpec(1)]
    """
    leaves, spec_structure = flatten(specs)
    given = {
        _keys(path): _checked(spec, called + "".join(path), kinds)
        for path, spec in zip(spec_structure.paths(), leaves, strict=True)
    }
    _refuse_unknown(given, structure, called)
    return [_rule(_keys(path), given) for path in structure.paths()]


def _rule(keys: Path, given: dict[Path, Spec | None]) -> Rule:
    for length in range(len(keys), -1, -1):
        if keys[:length] in given:
            spec = given[keys[:length]]
            return Rule(spec, exact=spec is not None and length == len(keys))
    return _DEFAULT


def _keys(path: Path) -> Path:
    """A path in which attributes and keys look the same."""
    return tuple(f"[{step[1:]!r}]" if step.startswith(".") else step for step in path)


def _checked(spec: Any, place: str, kinds: tuple[type[Spec], ...]) -> Spec | None:
    made: Any = Replicate() if spec is Replicate else spec
    if made is None or isinstance(made, kinds):
        return made
    ways = ", ".join(_WAYS[kind] for kind in kinds)
    meant = f"write TensorChunkSpec({spec})" if type(spec) is int else f"write {ways} of pipecut, or None"
    raise InputError(f"{place} is {spec!r} ({type(spec).__module__}.{type(spec).__qualname__}), not a spec: {meant}")


def _refuse_unknown(given: dict[Path, Spec | None], structure: Structure, called: str) -> None:
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
    """The keys to every value in a nested one, containers included."""
    yield above
    for step, child in zip(_keys(structure.keys), structure.children, strict=True):
        yield from _places(child, (*above, step))


# MERGED: Specs as the text that a user would write for them.


_BRACKETS = {"tuple": "()", "list": "[]"}


def written_call(args: Structure, kwargs: Structure, specs: Sequence[Spec | None]) -> str:
    """The two keyword arguments that give the leaves of a call these specs.

    >>> from pipecut.pipe_ir.structure import flatten
    >>> from pipecut.stage.microbatch import Replicate, TensorChunkSpec
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


def _written(structure: Structure, specs: Iterator[Spec | None]) -> Spec | str | None:
    """The text for one value; the spec itself if it is one for all that is inside, None where the default will do."""
    if structure.rebuild is None:
        return next(specs)
    parts = [_written(child, specs) for child in structure.children]
    ways = set(parts) - {None}
    if len(ways) == 1 and not any(isinstance(way, str) for way in ways):
        return ways.pop()
    return _inside(structure, parts)


def _inside(structure: Structure, parts: Sequence[Spec | str | None]) -> str | None:
    if all(part is None for part in parts):
        return None
    brackets = _BRACKETS.get(structure.kind)
    if brackets is not None:
        comma = "," if structure.kind == "tuple" and len(parts) == 1 else ""
        return f"{brackets[0]}{', '.join(map(str, parts))}{comma}{brackets[1]}"
    entries = zip(structure.keys, parts, strict=True)
    return "{" + ", ".join(f"{_key(step)}: {part}" for step, part in entries if part is not None) + "}"


def _key(step: str) -> str:
    """`['ids']` and `.ids` as the key of a dict: `'ids'`."""
    return repr(step[1:]) if step.startswith(".") else step[1:-1]
