"""Chunks of an engine's 16-bit cache as codes, for LMCache's server and the tiers of vLLM and SGLang.

A chunk is a run of tokens of one context, in all layers that share pages. Engines name it by a hash of all tokens up to
its end. Each engine's module knows where keys and values lie in its memory.
"""
