"""The families that the project's own tests run with every method."""

from __future__ import annotations

FULL = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "olmo", "olmo2", "granite", "granitemoe",
    "phi", "phi3", "starcoder2", "stablelm", "smollm3", "glm", "glm4", "cohere", "nemotron", "gemma", "helium",
    "ernie4_5", "seed_oss", "hunyuan_v1_dense", "nanochat", "gpt2",
)  # fmt: skip
"""`model_type` of families in which every layer attends to the whole context."""

HYBRID = (
    "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "olmo3", "olmo_hybrid", "cohere2", "exaone4", "lfm2", "jamba",
    "bamba", "granitemoehybrid", "nemotron_h", "ministral", "llama4_text", "qwen3_5_text",
)  # fmt: skip
"""Of families in which other layers do not."""
