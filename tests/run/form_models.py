"""A model that is called in several forms: with labels and without, with numbers and flags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 7


class Block(nn.Module):
    """A layer that can also hand out what it has inside: then it cannot stay whole in a model that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        inside = self.linear(x).tanh()
        if seen is not None:
            seen.append(inside)
        return x + inside


class Tagger(nn.Module):
    """Tags words; returns a loss if there are labels, and what its blocks have inside if asked."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.smooth = nn.Softplus()
        self.register_buffer("offset", torch.linspace(0, 1, 6), persistent=False)
        self.head = nn.Linear(6, WORDS)
        self.extra = nn.Linear(6, 6)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        scale: float = 1.0,
        smooth: bool = False,
        inside: bool = False,
        early: bool = False,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        x = self.embed(ids) * scale
        if early:
            x = self.extra(x)
        seen: list[Tensor] | None = [] if inside else None
        for block in self.blocks:
            x = block(x, seen)
        if smooth:
            x = self.smooth(x) + self.offset
        if options is not None:
            x = x * options["factor"]
        output = {"logits": self.head(x)}
        if labels is not None:
            output["loss"] = F.cross_entropy(output["logits"].mT, labels)
        if seen is not None:
            output["inside"] = torch.stack(seen, 1)
        return output


def batch(samples: int = 6, length: int = 3) -> dict[str, Any]:
    """Words and their labels."""
    ids = torch.arange(samples * length).reshape(samples, length) % WORDS
    return {"ids": ids, "labels": (ids * 3 + 1) % WORDS}
