"""Which of the given specs holds for which part of a nested value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, did_you_mean
from ...pipe_ir.structure import Path, Structure, flatten
from .chunk_spec import CustomReducer, Replicate, TensorChunkSpec

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
    for step, child in zip(_keys(structure.steps), structure.children, strict=True):
        yield from _places(child, (*above, step))
