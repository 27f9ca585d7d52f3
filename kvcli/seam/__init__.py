"""Everything that touches transformers' modelling code: the patch, identity RoPE factors, SDPA."""
