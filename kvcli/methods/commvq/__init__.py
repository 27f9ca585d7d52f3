"""CommVQ (ICML 2025): RoPE-commutative key codebooks and additive-quantized values, at 1 and 2 bits."""
