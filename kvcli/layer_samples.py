"""What was recorded of one attention layer; this module does not know about files."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvcli.rope import Rotation


@dataclass(frozen=True)
class LayerFisher:
    """What errors of one layer's keys and values cost, and how these are spread; see `calibrate.fisher`.

    All are float32 [num_kv_heads, head_dim, head_dim], pre-RoPE. An error d of one head of every key costs about
    E[d^T key d] / 2 nats per token.

    Attributes:
        key: Fisher information of keys.
        key_covariance: their covariance.
        value: Fisher information of values.
        value_covariance: their covariance.
    """

    key: Tensor
    key_covariance: Tensor
    value: Tensor
    value_covariance: Tensor


@dataclass(frozen=True)
class LayerSamples:
    """What one attention layer saw, pre-RoPE.

    Attributes:
        q: [num_heads, query_tokens, head_dim], the first query_tokens tokens of the recording.
        k: [num_kv_heads, tokens, head_dim], with the bias.
        v: [num_kv_heads, tokens, head_dim].
        positions: [tokens] int64, position of each token in its sequence.
        query_rotation: rotation of the recorded queries, [1, 1, query_tokens, rotary_dim/2].
        key_bias: [num_kv_heads, head_dim], bias of the model's key projection; None where it has none.
        fisher: what errors cost; None if it was not recorded.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    query_rotation: Rotation | None = None
    key_bias: Tensor | None = None
    fisher: LayerFisher | None = None

    def select(self, tokens: Tensor) -> LayerSamples:
        """Keys and values of some tokens, [count] indices; queries stay."""
        return replace(self, k=self.k[:, tokens], v=self.v[:, tokens], positions=self.positions[tokens])

    def rotated_queries(self) -> Tensor:
        """The queries after RoPE, [num_heads, query_tokens, head_dim]."""
        assert self.query_rotation is not None
        return self.query_rotation.apply(self.q.unsqueeze(0))[0]
