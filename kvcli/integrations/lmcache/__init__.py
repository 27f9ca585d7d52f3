"""LMCache's chunks of keys and values as codes: a serde for its server, under the name `kvcli`.

plugin.py   the module that a server's adapter names; it alone imports LMCache
served.py   settings of the adapter's JSON; shapes, RoPE and codecs of the served model, without weights
chunk.py    a chunk as bytes and back, and at which position of its context it starts
format.py   which part of a chunk's tensor is which layer's keys and values, and the header before the codes
"""
