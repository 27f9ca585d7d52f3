"""What Triton kernels of all methods share."""
