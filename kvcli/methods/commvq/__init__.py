"""CommVQ (ICML 2025, arXiv 2506.18879): RoPE-commutative key codebooks and additive quantization of values."""
