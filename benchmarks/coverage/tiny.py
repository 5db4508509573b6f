"""Configurations of published models, shrunk until a laptop can train them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Small values for the names that configurations use; a name that a configuration does not have is left out.
WIDTHS: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "emb_dim", "word_embed_proj_dim",
     "decoder_hidden_size", "mamba_d_model", "attention_hidden_size", "projection_dim", "hidden_dim"), 32,
)  # fmt: skip
INNER: dict[str, Any] = dict.fromkeys(
    ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "ffn_hidden_size",
     "mlp_hidden_size", "d_inner", "shared_expert_intermediate_size", "block_ff_dim", "feed_forward_hidden_size"), 48,
)  # fmt: skip
LAYERS: dict[str, Any] = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
     "num_decoder_layers", "num_encoder_layers"), 2,
)  # fmt: skip
HEADS: dict[str, Any] = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4,
)  # fmt: skip
OTHERS: dict[str, Any] = {
    "vocab_size": 64, "num_key_value_heads": 2, "multi_query_group_num": 2, "head_dim": 8, "d_kv": 8, "kv_channels": 8,
    "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "seq_length": 64, "max_target_positions": 64,
    "max_source_positions": 64, "rotary_dim": 4, "state_size": 8, "time_step_rank": 4, "mamba_d_state": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_chunk_size": 8,
    "chunk_size": 8, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "qk_head_dim": 8, "attention_types": [[["global", "local"], 1]], "window_size": 8,
    "sliding_window": 8, "attention_window": 4, "lru_width": 32, "num_buckets": 8, "hidden_groups": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "image_size": 32,
    "patch_size": 8, "num_channels": 3, "num_mel_bins": 16, "type_vocab_size": 2,
}  # fmt: skip
SMALL = WIDTHS | INNER | LAYERS | HEADS | OTHERS

# What some architectures cannot do without: tried one after the other until the uncut model trains.
RECIPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"head_dim": None, "num_key_value_heads": 4},
    {"rotary_dim": None, "state_size": None, "time_step_rank": None},
    {"sliding_window": None, "attention_window": None},
    {"vocab_size": None},
    dict.fromkeys(LAYERS, 4) | {"attention_types": [[["global", "local"], 2]]},
    {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    dict.fromkeys(OTHERS) | {"vocab_size": 64},
)


def tiny_configs(config_class: type[Any]) -> Iterator[Any]:
    """Configurations of a class to be tried in this order; a recipe that it does not take is passed over."""
    problems = []
    built = 0
    for recipe in RECIPES:
        try:
            config = _shrunk(config_class, recipe)
        except Exception as error:  # noqa: BLE001 - whatever a configuration has against these values
            problems.append(error)
            continue
        built += 1
        yield config
    if not built:
        raise problems[0]


def _shrunk(config_class: type[Any], recipe: dict[str, Any]) -> Any:
    full = config_class()
    values = {
        name: value
        for name, value in (SMALL | recipe).items()
        if value is not None and hasattr(full, name) and not _is_list_instead(getattr(full, name), value)
    }
    values |= {name: [1] * len(full.depths) for name in ("depths",) if isinstance(getattr(full, name, None), list)}
    values |= {name: 0.0 for name, value in vars(full).items() if "drop" in name and isinstance(value, float)}
    for name in getattr(config_class, "sub_configs", {}):
        part: Any = type(getattr(full, name, None))  # what is declared may be any configuration
        if hasattr(part, "model_type"):
            values[name] = _shrunk(part, recipe).to_dict()
    if "kv_lora_rank" in values:  # keys and values are made for every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    config = config_class(**values)
    if getattr(config, "is_encoder_decoder", False):
        for token in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    return config


def _is_list_instead(full: Any, small: Any) -> bool:
    return isinstance(full, list | tuple) and not isinstance(small, list | tuple)
