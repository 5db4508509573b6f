"""Match the specs that a user gives with the leaves of a nested value, and write specs as the user would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ...errors import InputError
from ...pipe_ir import Path, Structure, flatten
from ...text import did_you_mean
from .spec import BUILT_IN, DEFAULT, ChunkSpec, Replicate

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
    ways = ", ".join(kind.usage for kind in BUILT_IN if _defines(kind, use))
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
