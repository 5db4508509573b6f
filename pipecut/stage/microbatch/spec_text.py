"""Specs as the text that a user would write for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...pipe_ir.structure import Structure
from .spec_match import Spec

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
    entries = zip(structure.steps, parts, strict=True)
    return "{" + ", ".join(f"{_key(step)}: {part}" for step, part in entries if part is not None) + "}"


def _key(step: str) -> str:
    """`['ids']` and `.ids` as the key of a dict: `'ids'`."""
    return repr(step[1:]) if step.startswith(".") else step[1:-1]
