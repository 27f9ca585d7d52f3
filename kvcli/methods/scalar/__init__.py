"""Asymmetric scalar quantization with 16-bit scale and zero: the format of KIVI, SQuat and RTN, and of QJL's values."""
