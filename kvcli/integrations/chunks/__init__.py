"""Chunks of an engine's 16-bit cache as codes, for LMCache's server and the tiers of vLLM and SGLang.

served.py   settings; shapes, RoPE and codecs of the served model, without weights
codec.py    keys and values of chunks as bytes and back, and where in its context a chunk begins
stored.py   chunks to a store and back
format.py   shapes of a chunk, and the header before the codes

A chunk is a run of tokens of one context, in all layers that share pages. Engines name it by a hash of all tokens up to
its end. Each engine's module knows where keys and values lie in its memory.
"""
