"""What is tried: kinds of models, their classes in transformers, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto import modeling_auto

ROWS, TOKENS, VOCABULARY = 4, 12, 60
Batch = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of model: which classes belong to it, and what a batch for one looks like."""

    name: str
    mapping: str
    batch: Callable[[Any], Batch]

    def classes(self) -> dict[type[Any], type[Any]]:
        """Model classes by configuration class."""
        mapping = getattr(modeling_auto, self.mapping)
        return {config: _first(mapping[config]) for config in mapping}


def _first(found: Any) -> type[Any]:
    return found[0] if isinstance(found, list | tuple) else found


def _tokens(config: Any) -> torch.Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = min(VOCABULARY, getattr(text, "vocab_size", None) or VOCABULARY)
    return torch.randint(3, size, (ROWS, TOKENS))


def text_batch(config: Any) -> Batch:
    ids = _tokens(config)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def image_batch(config: Any) -> Batch:
    size = getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(ROWS, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": images, "labels": torch.arange(ROWS) % 2}


def sound_batch(config: Any) -> Batch:
    return {"input_values": torch.randn(ROWS, 4000), "labels": torch.randint(3, 30, (ROWS, 4))}


KINDS = (
    Kind("causal LM", "MODEL_FOR_CAUSAL_LM_MAPPING", text_batch),
    Kind("encoder", "MODEL_FOR_MASKED_LM_MAPPING", text_batch),
    Kind("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", text_batch),
    Kind("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image_batch),
    Kind("sound", "MODEL_FOR_CTC_MAPPING", sound_batch),
)
