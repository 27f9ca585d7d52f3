"""Packages that compress the KV cache, measured by one protocol, each in an environment of its own."""
