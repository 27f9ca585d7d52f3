"""LMCache's chunks of keys and values as codes: a serde for its server, under the name `kvcli`."""
