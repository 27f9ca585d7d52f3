"""Attention to codes in pages of bytes, with rings of recent tokens; knows no engine."""
