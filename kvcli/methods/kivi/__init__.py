"""KIVI (ICML 2024): keys quantized per channel, values per token, a full-precision residual."""
