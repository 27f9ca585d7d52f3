"""The attention function that keeps pre-RoPE queries, keys and values of some layers while a model runs.

This module does not know where they are written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcli.errors import SamplesError
from kvcli.seam.layer import AttentionCall

_KINDS = {"q": "queries", "k": "keys", "v": "values"}


class WindowDone(Exception):
    """Ends a forward pass once the last layer of the window is recorded."""


class SampleRecorder:
    """Runs SDPA in full precision and records q, k and v of the window's layers."""

    def __init__(self, dtype: torch.dtype, key_biases: Sequence[Tensor | None]) -> None:
        self.dtype, self.key_biases = dtype, key_biases
        self.start, self.stop, self.query_sequences = 0, 0, 0
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        layer_idx, query, key, value = call.layer.layer_idx, call.query, call.key, call.value
        if layer_idx >= self.start:
            bias = self.key_biases[layer_idx]
            if bias is None:
                self._keep(layer_idx, "k", key)
            else:
                self._keep(layer_idx, "k", key.float() - bias.to(key.device).unsqueeze(1))
                self.tensors[f"layers.{layer_idx}.key_bias"] = bias.cpu()
            self._keep(layer_idx, "v", value)
            if self.query_sequences:
                self._keep(layer_idx, "q", query[: self.query_sequences])
        if layer_idx == self.stop - 1:
            raise WindowDone
        return call.exact()

    def _keep(self, layer_idx: int, kind: str, x: Tensor) -> None:
        """Stores x [batch, heads, time, head_dim] as [heads, batch * time, head_dim].

        Raises:
            SamplesError: values that are not finite, or not in the recording's dtype.
        """
        samples = x.transpose(0, 1).flatten(1, 2).to("cpu", self.dtype).contiguous()
        if not bool(samples.isfinite().all()):
            where = f"the {_KINDS[kind]} of layer {layer_idx}"
            if not bool(x.isfinite().all()):
                raise SamplesError(
                    f"{where} are not finite; the model's weights may be damaged, or its dtype too narrow"
                )
            raise SamplesError(
                f"{where} reach {float(x.abs().max()):.3g}, more than {self.dtype} holds; use --dtype bfloat16"
            )
        self.tensors[f"layers.{layer_idx}.{kind}"] = samples
