"""Attention over a compressed cache, and the session that attaches it to a model."""
