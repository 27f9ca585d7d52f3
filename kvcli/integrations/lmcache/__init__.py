"""LMCache's chunks of keys and values as codes: a serde for its server, under the name `kvcli`.

plugin.py   the module that a server's adapter names; it alone imports LMCache
layout.py   which part of a chunk's tensor is which layer's keys and values
"""
