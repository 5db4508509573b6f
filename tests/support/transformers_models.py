"""Published models at a tiny size, with a batch for each, for the tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS = 6, 10


@dataclass(frozen=True)
class Published:
    """One architecture: how to make a tiny model, and what it is called with."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def _text(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (rows, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS) % 2}


def _of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers  # takes seconds, which tests of other things need not wait for

        transformers.logging.set_verbosity_error()
        return getattr(transformers, model)(getattr(transformers, config)(**options)).train()

    return make


DECODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
ENCODER = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BOTH = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

PUBLISHED = {
    "gpt2": Published(
        _of("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=16, n_layer=4, n_head=2, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), _text),
    "llama": Published(_of("LlamaForCausalLM", "LlamaConfig", **DECODER), _text),
    "mistral": Published(_of("MistralForCausalLM", "MistralConfig", sliding_window=4, **DECODER), _text),
    "mixtral": Published(_of("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **DECODER), _text),
    "gpt_neox": Published(
        _of("GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=64, hidden_size=16, intermediate_size=24,
            num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=32), _text),
    "bert": Published(_of("BertForMaskedLM", "BertConfig", **ENCODER), _text),
    "t5": Published(
        _of("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2,
            num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0), _text),
    "bart": Published(_of("BartForConditionalGeneration", "BartConfig", **BOTH), _text),
    "vit": Published(
        _of("ViTForImageClassification", "ViTConfig", hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
            intermediate_size=24, image_size=32, patch_size=8, hidden_dropout_prob=0.0), _images),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and its batch, the same at every call."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PUBLISHED[name].make(), PUBLISHED[name].inputs()
