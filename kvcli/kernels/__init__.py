"""What the Triton kernels of all methods share; no storage format and no method is known here."""
