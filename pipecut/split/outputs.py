"""Outputs that training steps send to the last stage although it does not use them: those that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..errors import InputError
from ..pipe_ir import Ref, TracedModel
from ..text import listed
from .dataflow import named_leaves

Outputs: TypeAlias = str | Sequence[str | int]

ALL, USED = "all", "used"


@dataclass(frozen=True)
class RequestedOutputs:
    """Names of the outputs that are sent in any case; None for all of them."""

    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, outputs: Outputs) -> RequestedOutputs:
        """Read the `outputs` option of pipeline().

        >>> RequestedOutputs.of("used"), RequestedOutputs.of(["hidden_states", 1])
        (RequestedOutputs(names=()), RequestedOutputs(names=('hidden_states', '[1]')))
        """
        if isinstance(outputs, str):
            return cls({ALL: None, USED: ()}.get(outputs, (outputs,)))
        is_list = isinstance(outputs, list | tuple | set | frozenset)
        if not is_list or not all(type(name) in (str, int) for name in outputs):
            raise InputError(
                f'outputs must be "used", "all", or a list of names of outputs (numbers, for a tuple), got {outputs!r}'
            )
        return cls(tuple(f"[{name}]" if isinstance(name, int) else name for name in outputs))

    def check(self, traced: TracedModel) -> None:
        """Raise on a name that the model's output does not have."""
        known = [name for _, name in named_leaves(traced.output)]
        for name in self.names or ():
            if not any(_is_part(each, name) for each in known):
                tops = dict.fromkeys(each.partition(".")[0] for each in known)
                raise InputError(
                    f"outputs has {name!r}, and the output of {type(traced.model).__name__} has "
                    f"{listed(filter(None, tops)) or 'no names: it is one value'}"
                )

    def marked(self, traced: TracedModel) -> TracedModel:
        """Return a trace that knows the outputs which need not be sent. One number is always: it may be a loss."""
        if self.names is None:
            return traced
        leaves = [(leaf.index, name) for leaf, name in named_leaves(traced.output) if isinstance(leaf, Ref)]
        asked = {index for index, name in leaves if any(_is_part(name, each) for each in self.names)}
        return replace(traced, optional_outputs=frozenset(i for i, _ in leaves if _has_dims(traced, i)) - asked)


def _is_part(name: str, whole: str) -> bool:
    """Return True if an output is the one with a name, or inside of it."""
    return name == whole or name.startswith((f"{whole}.", f"{whole}["))


def _has_dims(traced: TracedModel, index: int) -> bool:
    spec = traced.operations[index].spec
    return spec is not None and len(spec.shape) > 0
