"""Without a GPU, kernels run in Triton's interpreter; Triton reads this once, so import this module first."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
