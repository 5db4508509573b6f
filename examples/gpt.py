"""A small GPT, written the way people write one: nothing in it knows that it will be cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT."""

    vocabulary: int = 512
    context: int = 64
    layers: int = 8
    heads: int = 4
    width: int = 64
    dropout: float = 0.0
    tied_embeddings: bool = False


class CausalAttention(nn.Module):
    """Every position looks at itself and at those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        query, key, value = (
            part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(B, T, D)))


class FeedForward(nn.Module):
    """Each position for itself: wider, GELU, back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    """Attention, then the feed-forward part, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, the logits of each next token out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def random_tokens(config: GPTConfig, batch: int, length: int | None = None, seed: int = 0) -> Tensor:
    """A batch of made-up text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (batch, length or config.context), generator=generator)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """How badly each position predicts the token after it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
