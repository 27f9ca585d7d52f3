"""Tiny random causal language models of every type that transformers has."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
"""Tokens that a layer of a sliding window sees."""

_SIZES = {
    name: size
    for size, names in (
        (0, "pad_token_id"),
        (1, "n_group topk_group n_shared_experts bos_token_id"),
        (2, "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k linear_num_key_heads eos_token_id"),
        (4, "num_hidden_layers n_layer num_layers n_layers decoder_layers num_attention_heads n_head n_heads"),
        (4, "num_heads decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts"),
        (4, "linear_num_value_heads"),
        (8, "mamba_n_heads n_mamba_heads mamba_num_heads"),
        (WINDOW, "sliding_window attention_window_size attention_chunk_size"),
        (16, "head_dim kv_channels attention_head_dim qk_rope_head_dim v_head_dim"),
        (16, "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input mamba_d_state ssm_state_size"),
        (16, "mamba_d_head mamba_head_dim mamba_chunk_size chunk_size"),
        (24, "q_lora_rank qk_nope_head_dim"),
        (32, "kv_lora_rank moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (64, "hidden_size n_embd d_model word_embed_proj_dim embedding_size lru_width"),
        (96, "intermediate_size ffn_dim ffn_hidden_size n_inner"),
        (97, "vocab_size"),
        (300, "vocab_size_per_layer_input encoder_hash_byte_group_vocab"),
        (512, "max_position_embeddings n_positions n_ctx max_seq_len"),
    )
    for name in names.split()
}
"""Fields of configs by their names in all types."""

_HYBRID = ["linear_attention", "full_attention"] * 2
_LATENT: dict[str, Any] = {"num_key_value_heads": 4}
_ALTERNATE: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GLOBAL: dict[str, Any] = {"global_head_dim": 16, **_ALTERNATE}
_LATENT_HYBRID: dict[str, Any] = {**_LATENT, "layer_types": _HYBRID}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
_NO_WINDOW: dict[str, Any] = {"sliding_window": None}
_ROTARY: dict[str, Any] = {"rotary_dim": 8}
_INDEXER = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")]
_SPARSE = {"index_block_size": 4, "index_topk_blocks": 2, "index_head_dim": 16, "index_n_heads": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "v_head_dim": 16}
_WINDOWED = {f"swa_{name}": size for name, size in {**_HEADS, "head_dim": 40, "qk_nope_head_dim": 24}.items()}
_TOWER = {"hidden_size": 64, "num_attention_heads": 4, "pyramid_num_routed": [-1, -1, -1, 4]}
_TOWER |= dict.fromkeys(("adapter_in_dim", "adapter_input_size", "adapter_out_dim"), 64)

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "ministral3", "mixtral", "starcoder2", "phi3", "phimoe"), _NO_WINDOW),
    **dict.fromkeys(("ministral", "gemma3_text", "kolibri1", "laguna", "mellum"), _ALTERNATE),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3", "youtu", "hy_v4", "longcat_flash"), _LATENT),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _LATENT_HYBRID),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONV),
    **dict.fromkeys(("codegen", "gptj"), _ROTARY),
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2, **_SPARSE},
    "gemma2": {"attn_logit_softcapping": 0.5},  # small scores are capped, too
    "minimax": {"layer_types": _HYBRID, **_NO_WINDOW},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": _HYBRID},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GLOBAL),
    "gemma3n_text": {"num_kv_shared_layers": 0, **_ALTERNATE},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "hrm_text": {"num_layers_per_stack": 2, "L_cycles": 1, "H_cycles": 1, "num_hidden_layers": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "dots3_note": {"text_config": {"hidden_size": 64}, "vision_config": _TOWER, "audio_config": _TOWER},
    "dots3_note_text": {**_LATENT, "use_dsa": False, **_WINDOWED},
    "qwen4_exp_text": dict(zip(_INDEXER, (2, 1, 16, 8, 4), strict=True)),
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 64), "axial_pos_embds_dim": (16, 48)},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 16, "mamba_ngroups": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single types need besides: fields that fit each other, and layers of full attention."""

_ATTENTION = ("q_proj", "k_proj", "qkv", "query_key_value", "Wqkv", "c_attn", "q_b_proj", "kv_b_proj", "query", "key")


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of a type; hybrids have a layer of full attention. Changes are of its text model."""
    return _tiny(CONFIG_MAPPING[model_type], changes)


def _tiny(config_class: Any, changes: dict[str, Any]) -> Any:
    own = CHANGES.get(config_class.model_type, {})
    parts = {name: value for name, value in own.items() if name in config_class.sub_configs}
    usual = vars(config_class(**parts))
    values = {name: value for name, value in _SIZES.items() if name in {*usual, *config_class.attribute_map}}
    if "layer_types" in usual:
        values["layer_types"] = None
    for name, kind in config_class.sub_configs.items():
        if name == "text_config" or usual.get(name) is not None:
            part = type(usual[name]) if kind is AutoConfig else kind
            parts[name] = _tiny(part, {**(changes if name == "text_config" else {}), **parts.get(name, {})})
    return config_class(**{**values, **own, **({} if "text_config" in parts else changes), **parts})


def make(model_type: str, **changes: Any) -> Any:
    """A random causal language model, its weights such that every error of attention shows."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = None
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and any(part in _ATTENTION for part in name.split(".")):
            weight.data *= 4
        elif weight.dim() == 1 and any(part in name for part in ("norm", "bias")):
            weight.data += 0.2 * torch.randn_like(weight)
        elif name.endswith("sinks"):
            weight.data.normal_()
    return model
