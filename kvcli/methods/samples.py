"""Recorded queries, keys and values of one attention layer; this module does not know about files."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvcli.methods.token_blocks import TokenBlocks
from kvcli.rope import Rotation


@dataclass(frozen=True)
class LayerFisher:
    """Fisher information and covariance of one layer's keys and values; see `calibrate.fisher`.

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


class LayerSamples:
    """Queries, keys and values of one attention layer, before RoPE.

    Keys and values may be more than memory holds. `keys` and `values` are read block by block; `k` and `v` read all of
    them into memory.

    Args:
        q: [num_heads, query_tokens, head_dim], the first query_tokens tokens of the recording.
        k: [num_kv_heads, tokens, head_dim], with the bias.
        v: [num_kv_heads, tokens, head_dim], in the same blocks.
        positions: [tokens] int64, position of each token in its sequence.
        query_rotation: rotation of the recorded queries, [1, 1, query_tokens, rotary_dim/2].
        key_bias: [num_kv_heads, head_dim], bias of the model's key projection; None where it has none.
        fisher: Fisher information; None if it was not recorded.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor | TokenBlocks,
        v: Tensor | TokenBlocks,
        positions: Tensor,
        query_rotation: Rotation | None = None,
        key_bias: Tensor | None = None,
        fisher: LayerFisher | None = None,
    ) -> None:
        self.q, self.positions, self.query_rotation = q, positions, query_rotation
        self.key_bias, self.fisher = key_bias, fisher
        self.keys = TokenBlocks.of(k) if isinstance(k, Tensor) else k
        self.values = TokenBlocks.of(v) if isinstance(v, Tensor) else v

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values were recorded."""
        return self.keys.num_tokens

    @property
    def k(self) -> Tensor:
        """All keys in memory, [num_kv_heads, tokens, head_dim]."""
        return self.keys.whole()

    @property
    def v(self) -> Tensor:
        """All values in memory, [num_kv_heads, tokens, head_dim]."""
        return self.values.whole()

    def select(self, tokens: Tensor) -> LayerSamples:
        """Keys and values of some tokens, [count] indices, in memory; queries stay."""
        at = tokens.cpu()
        return LayerSamples(
            self.q,
            self.keys.at(at),
            self.values.at(at),
            self.positions[tokens],
            self.query_rotation,
            self.key_bias,
            self.fisher,
        )

    def rotated_queries(self) -> Tensor:
        """The queries after RoPE, [num_heads, query_tokens, head_dim]."""
        assert self.query_rotation is not None
        return self.query_rotation.apply(self.q.unsqueeze(0))[0]
