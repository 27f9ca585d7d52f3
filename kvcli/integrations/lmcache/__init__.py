"""LMCache's chunks of keys and values as codes: a serde for its server, under the name `kvcli`.

    plugin.py     the module that a server's adapter names: it registers the serde
    serde.py      LMCache's serializer and deserializer around a `ChunkCodec`
    settings.py   what the adapter's JSON says: model, method, artifact
    served.py     shapes, RoPE and codecs of the served model, from its config and an artifact, without weights
    layout.py     which part of a chunk's tensor is which layer's keys and values
    chunk.py      a chunk as bytes and back
    header.py     the fixed record before the codes: what they are, and their checksum
    start.py      at which position of its context a chunk starts

Only plugin and serde import LMCache; the rest works on tensors.
"""
