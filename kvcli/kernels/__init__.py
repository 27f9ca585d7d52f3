"""What the Triton kernels of several methods share: packed words, splits, PDL, launch sizes. It knows no method."""
