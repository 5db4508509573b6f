"""Transformers: masks that later stages use, torch's own layers, language models with a tied embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipecut import SplitPoint, pipe_split
from tests.support.equality import assert_equals_uncut
from tests.support.sampling import sampled

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class Attention(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = self.key_value(memory).view(batch, memory.shape[1], self.heads, -1).transpose(1, 2).chunk(2, -1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(batch, length, dim))


class Layer(nn.Module):
    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.attend = Attention()
        self.cross = Attention() if cross else None
        self.norm = nn.LayerNorm(8)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, see: Tensor | None = None
    ) -> Tensor:
        x = x + self.attend(x, x, mask)
        if self.cross is not None:
            x = x + self.cross(x, memory, see)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Layer(cross=False)])
        self.decoder = nn.ModuleList(Layer(cross=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        keep = ~padding[:, None, None, :]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        memory, x = source, target
        for layer in self.encoder:
            memory = layer(memory, keep)
        for layer in self.decoder:
            x = layer(x, causal, memory, keep)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("path", sampled(["decoder.1", "encoder.0.attend.out"], lambda path: path != "decoder.1"))
def test_an_encoder_decoder_uses_its_masks_in_later_stages(path: str) -> None:
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    args = (torch.randn(2, 5, 8), torch.randn(2, 4, 8), padding)
    assert_equals_uncut(EncoderDecoder(), args, split_spec={path: BEGINNING}, expect_stages=2)


@pytest.mark.slow
def test_a_transformer_of_torch_is_cut_between_encoder_and_decoder() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
    kwargs = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4), "tgt_is_causal": True}
    args = (torch.randn(2, 5, 8), torch.randn(2, 4, 8))
    assert_equals_uncut(model, args, kwargs, split_spec={"decoder": BEGINNING}, expect_stages=2)


@pytest.mark.parametrize("training", sampled([True, False], bool))
def test_an_encoder_of_torch_is_cut_inside_a_layer(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    assert_equals_uncut(model, (torch.randn(2, 3, 8),), split_spec={"layers.1.norm1": END}, expect_stages=2)


class LanguageModel(nn.Module):
    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.pos = nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList(Layer(cross=False) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False) if head else None
        if self.head is not None:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.wte(ids) + self.pos[:length]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.blocks[0](x, mask)
        pipe_split()
        x = self.blocks[1](x, mask)
        return F.linear(x, self.wte.weight) if self.head is None else self.head(x)


@pytest.mark.parametrize("head", [True, False], ids=["a tied head", "the embedding's weight itself"])
def test_a_language_model_ties_its_embedding_across_stages(head: bool) -> None:
    ids = torch.randint(0, 11, (3, 4))
    others = [((torch.randint(0, 11, (5, 4)),), {})]
    pipe = assert_equals_uncut(LanguageModel(head=head), (ids,), expect_stages=2, other_calls=others)
    (tie,) = pipe.tied_parameters
    assert set(tie.names) == ({"wte.weight", "head.weight"} if head else {"wte.weight"})
    assert (tie.stages, tie.owner) == ((0, 1), 0)
