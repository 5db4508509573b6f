"""Models with blocks that torch.export cannot trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Branching(nn.Module):
    """Goes one of two ways, by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return torch.relu(self.high(x))
        return torch.tanh(self.low(x))


class ThroughNumpy(nn.Module):
    """Leaves torch and comes back with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().cpu().numpy().std())
        return torch.tanh(self.inner(x) * (1 + scale))


class Counting(nn.Module):
    """Keeps a diary in a list, a number and a buffer, and decides by it."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.diary: list[float] = []
        self.calls = 0
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.diary.append(x.mean().item())
        self.calls += 1
        self.rows += x.shape[0]
        return self.inner(x) if self.diary[-1] > 0 else torch.tanh(self.inner(x))


class Experts(nn.Module):
    """Sends each sample to one of several experts; some get none."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if rows.numel() > 0:
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return out


BLOCKS: dict[str, type[nn.Module]] = {
    "branch": Branching,
    "numpy": ThroughNumpy,
    "count": Counting,
    "experts": Experts,
}


def sequential(block: type[nn.Module]) -> nn.Sequential:
    """Eight layers in a row, of which the third and the sixth cannot be traced."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    layers[2], layers[5] = block(), block()
    return nn.Sequential(*layers).double()


class Tangled(nn.Module):
    """Skips past the next stage, keyword arguments, tied weights, nested results, and one block that is opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.opaque = _Gate()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.0)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, scale: Tensor, shift: float = 0.5) -> dict[str, Tensor]:
        h = self.embed(ids)
        skip = torch.tanh(self.first(h))
        gated = self.opaque(skip, scale=scale, options={"shift": shift})
        h = self.last(self.drop(self.norm(gated["h"]) + skip))
        h = nn.functional.dropout(h, 0.0, self.training)
        return {"logits": self.head(h + skip * gated["weight"]), "weight": gated["weight"]}


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor, options: dict[str, float]) -> dict[str, Tensor]:
        weight = scale[:, None] if scale.max().item() > 0 else -scale[:, None]
        return {"h": torch.tanh(self.inner(x)) * weight + options["shift"], "weight": weight}


class DecidesBetweenBlocks(nn.Module):
    """The forward of the model itself branches: there is no block to keep as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = h * 2
        return self.second(h)  # type: ignore[no-any-return]
