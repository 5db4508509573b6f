"""Two models that share parameters over many stages: an embedding of three users, and one block for all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipecut import Pipe, SplitPoint, pipeline

WORDS, WIDTH, LENGTH = 7, 6, 3


class SharedEmbedding(nn.Module):
    """An encoder and a decoder, which read words by the embedding that the head writes them with."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleDict({"words": self.shared, "first": nn.Linear(WIDTH, WIDTH)})
        self.encoder["second"] = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.ModuleDict({"words": self.shared, "first": nn.Linear(WIDTH, WIDTH)})
        self.decoder["second"] = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.encoder["first"](self.encoder["words"](ids)))
        memory = torch.tanh(self.encoder["second"](x)).mean(1, keepdim=True)
        y = torch.tanh(self.decoder["first"](self.decoder["words"](labels.roll(1, 1)))) + memory
        logits = self.head(torch.tanh(self.decoder["second"](y)) + memory)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class SharedBlock(nn.Module):
    """One block, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.layers = nn.ModuleList(self.block for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = x + torch.sigmoid(gate(x)) * layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


CUTS = {
    SharedEmbedding: ("encoder.second", "decoder.first", "decoder.second"),
    SharedBlock: ("gates.1", "gates.2", "gates.3"),
}


def batch_of(seed: int, samples: int = 6) -> dict[str, Tensor]:
    """Words and labels."""
    numbers = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(WORDS, (samples, LENGTH), generator=numbers) for _ in range(2))
    return {"ids": ids, "labels": labels}


def shared_pipe(kind: type[nn.Module]) -> Pipe:
    """A model, cut into four stages; the same at every call."""
    torch.manual_seed(0)
    model = kind().double()
    spec = dict.fromkeys(CUTS[kind], SplitPoint.BEGINNING)
    pipe = pipeline(model, (), batch_of(0), split_spec=spec)
    assert pipe.num_stages == 4
    return pipe
