"""What is tried: kinds of models, their classes in transformers, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

ROWS, TOKENS, VOCABULARY = 4, 12, 60
SAMPLES, FRAMES, CHOICES = 4000, 64, 2
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


def _tokens(config: Any) -> Tensor:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = min(VOCABULARY, getattr(text, "vocab_size", None) or VOCABULARY)
    return torch.randint(3, size, (ROWS, TOKENS))


def _text(model: Any) -> Batch:
    ids = _tokens(model.config)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(config: Any, *, frames: int | None = None) -> Tensor:
    size = getattr(config, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    several = () if frames is None else (frames,)
    return torch.randn(ROWS, *several, getattr(config, "num_channels", None) or 3, height, width)


def _sound(model: Any) -> Batch:
    """Return samples, or frames of features, by the name of the model's own first input."""
    config, name = model.config, model.main_input_name
    part = getattr(config, "encoder_config", None) or config
    sizes = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")
    mels = next((size for key in sizes if (size := getattr(part, key, None))), 16)
    if name == "input_values" and hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram
        return {name: torch.randn(ROWS, config.max_length, mels)}
    if name == "input_values":
        return {name: torch.randn(ROWS, SAMPLES)}
    frames = 2 * getattr(config, "max_source_positions", FRAMES)
    whisper = getattr(config, "model_type", "") == "whisper"
    return {name: torch.randn(ROWS, mels, frames) if whisper else torch.randn(ROWS, frames, mels)}


def text_batch(model: Any) -> Batch:
    batch = _text(model)
    return batch | {"labels": batch["input_ids"].clone()}


def sentences_batch(model: Any) -> Batch:
    return _text(model) | {"labels": torch.arange(ROWS) % 2}


def words_batch(model: Any) -> Batch:
    return _text(model) | {"labels": torch.randint(0, 2, (ROWS, TOKENS))}


def answers_batch(model: Any) -> Batch:
    return _text(model) | {"start_positions": torch.arange(ROWS), "end_positions": torch.arange(ROWS) + 1}


def choices_batch(model: Any) -> Batch:
    batch = {name: torch.stack([value] * CHOICES, 1) for name, value in _text(model).items()}
    return batch | {"labels": torch.arange(ROWS) % CHOICES}


def image_batch(model: Any) -> Batch:
    return {"pixel_values": _images(model.config), "labels": torch.arange(ROWS) % 2}


def segments_batch(model: Any) -> Batch:
    images = _images(model.config)
    return {"pixel_values": images, "labels": torch.randint(0, 2, (ROWS, *images.shape[-2:]))}


def patches_batch(model: Any) -> Batch:
    images = _images(model.config)
    hidden = torch.arange((images.shape[-1] // model.config.patch_size) ** 2) % 3 == 0
    return {"pixel_values": images, "bool_masked_pos": hidden.repeat(ROWS, 1)}


def video_batch(model: Any) -> Batch:
    config = model.config
    frames = next((count for name in ("num_frames", "frames_per_clip") if (count := getattr(config, name, None))), 4)
    return {model.main_input_name: _images(config, frames=frames), "labels": torch.arange(ROWS) % 2}


def sound_batch(model: Any) -> Batch:
    return _sound(model) | {"labels": torch.randint(3, 30, (ROWS, 4))}


def sound_classes_batch(model: Any) -> Batch:
    return _sound(model) | {"labels": torch.arange(ROWS) % 2}


def sound_frames_batch(model: Any) -> Batch:
    batch = _sound(model)
    frames = int(model._get_feat_extract_output_lengths(torch.tensor(batch[model.main_input_name].shape[1])))
    chosen = torch.randint(0, 2, (ROWS, frames))
    return batch | {"labels": torch.nn.functional.one_hot(chosen, model.config.num_labels)}


def speech_batch(model: Any) -> Batch:
    return _sound(model) | {"labels": _tokens(model.config)}


def pairs_batch(model: Any) -> Batch:
    return _text(model) | {
        "pixel_values": _images(getattr(model.config, "vision_config", model.config)),
        "return_loss": True,
    }


def images_in_text_batch(model: Any) -> Batch:
    """One image per text: its place holders begin the text, as many as the model makes features of an image."""
    config = model.config
    images = _images(getattr(config, "vision_config", config))
    batch = _text(model)
    holder = next(token for name in ("image_token_id", "image_token_index") if (token := getattr(config, name, None)))
    with torch.no_grad():
        owner = model if hasattr(model, "get_image_features") else model.model
        found = owner.get_image_features(pixel_values=images[:1])
    features = getattr(found, "pooler_output", found)
    features = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    count = features.reshape(-1, features.shape[-1]).shape[0]
    ids = torch.cat([torch.full((ROWS, count), holder), batch["input_ids"]], 1)
    labels = torch.where(ids == holder, -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images, "labels": labels}


KINDS = (
    Kind("causal LM", "MODEL_FOR_CAUSAL_LM_MAPPING", text_batch),
    Kind("encoder", "MODEL_FOR_MASKED_LM_MAPPING", text_batch),
    Kind("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", text_batch),
    Kind("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image_batch),
    Kind("image, segments", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", segments_batch),
    Kind("image, patches", "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING", patches_batch),
    Kind("video", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING", video_batch),
    Kind("sound", "MODEL_FOR_CTC_MAPPING", sound_batch),
    Kind("sound, classes", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", sound_classes_batch),
    Kind("sound, speakers", "MODEL_FOR_AUDIO_XVECTOR_MAPPING", sound_classes_batch),
    Kind("sound, frames", "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING", sound_frames_batch),
    Kind("speech to text", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", speech_batch),
    Kind("text and image", "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING", pairs_batch),
    Kind("multimodal, images given", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", images_in_text_batch),
    Kind("multimodal, text given", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", text_batch),
    Kind("text, multiple choice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING", choices_batch),
    Kind("text, classes", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", sentences_batch),
    Kind("text, words", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", words_batch),
    Kind("text, answers", "MODEL_FOR_QUESTION_ANSWERING_MAPPING", answers_batch),
)
