"""The tensors of an output without the structure around them, as torch.distributed.pipelining hands them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .structure import flatten
from .traced import Ref, Template


@dataclass(frozen=True)
class FlatOutput:
    """Which leaves of an output are handed over: every tensor once, in their order."""

    places: tuple[int, ...]

    @classmethod
    def of(cls, output: Template) -> FlatOutput:
        """The places of the values in the output of a traced model.

        A value that is there twice is told by the trace. At run time two tensors may be one only in some mode, such as
        what goes into a dropout and what comes out of it.
        """
        first = {leaf.index: place for place, leaf in reversed(list(enumerate(output.leaves))) if isinstance(leaf, Ref)}
        return cls(tuple(sorted(first.values())))

    def select(self, result: Any) -> Any:
        """The tensors of a result: one alone as itself, several as a tuple.

        >>> FlatOutput((0, 2)).select({"logits": 1.5, "cache": (None, 2.5)}), FlatOutput((0,)).select((1.5, "text"))
        ((1.5, 2.5), 1.5)
        """
        leaves, _ = flatten(result, holders=True)
        kept = tuple(leaves[place] for place in self.places)
        return kept[0] if len(kept) == 1 else kept
