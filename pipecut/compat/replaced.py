"""Names of the peer that have no meaning here: they can be imported, and say what to use instead when they are used."""

from __future__ import annotations

from typing import Any

from ..errors import PipeError


class ReplacedError(PipeError, NotImplementedError):
    """A name of torch.distributed.pipelining that pipecut replaces by something else."""


def replaced(name: str, instead: str) -> Any:
    """A stand-in for a function or class.

    >>> replaced("annotate_split_points", "pass split_spec= to pipeline()")(None)
    Traceback (most recent call last):
    pipecut.compat.replaced.ReplacedError: annotate_split_points is not part of pipecut: pass split_spec= to pipeline()
    """

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise ReplacedError(f"{name} is not part of pipecut: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not part of pipecut: {instead}."})
