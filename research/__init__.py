"""Experiments behind the docs: not part of the package, run from a checkout with `python -m research`."""
