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


def speech_batch(config: Any) -> Batch:
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 16
    frames = 2 * getattr(config, "max_source_positions", 64)
    ids = _tokens(config)
    whisper = getattr(config, "model_type", "") == "whisper"
    features = torch.randn(ROWS, mels, frames) if whisper else torch.randn(ROWS, frames, mels)
    return {"input_features": features, "labels": ids}


def pairs_batch(config: Any) -> Batch:
    ids = _tokens(config)
    images = image_batch(getattr(config, "vision_config", config))["pixel_values"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images, "return_loss": True}


KINDS = (
    Kind("causal LM", "MODEL_FOR_CAUSAL_LM_MAPPING", text_batch),
    Kind("encoder", "MODEL_FOR_MASKED_LM_MAPPING", text_batch),
    Kind("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", text_batch),
    Kind("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image_batch),
    Kind("sound", "MODEL_FOR_CTC_MAPPING", sound_batch),
    Kind("speech to text", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", speech_batch),
    Kind("text and image", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING", pairs_batch),
    Kind("multimodal, text given", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", text_batch),
)
