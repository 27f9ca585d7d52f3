"""SQuat's key codec: KIVI's storage, with residuals steered away from the query subspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.errors import ConfigError
from kvcli.methods.base import Space, State
from kvcli.methods.kivi.codec import PerChannelCodes, PerChannelKey
from kvcli.methods.squat.config import SQuatConfig
from kvcli.spec import ModelSpec

_POWER_ITERATIONS = 20


@dataclass(frozen=True)
class SQuatState(State):
    """Attributes:
    matrix: float32 [batch, num_kv_heads, head_dim, head_dim]; the Gram matrix of the queries seen so far until a
        sequence's first keys are encoded, P = I + lambda * Q_hat^T Q_hat from then on.
    count: float32 [batch], queries seen a head.
    """

    matrix: Tensor
    count: Tensor


class SQuatKey(PerChannelKey):
    """Keys per channel, block of channels by block, each block's error made up for in the channels that follow.

    SQuat Eq. 1 and Lemma 2: after a block of channels is quantized with error d, the remaining channels move by
    -P_rr^-1 P_rb d, the exact minimiser of delta^T P delta given that error. With lambda = 0 nothing moves, and the
    codes are KIVI's.

    Buffers:
        gram: float32 [num_kv_heads, head_dim, head_dim], Gram matrix of calibration queries; used if the subspace comes
            from calibration.
        gram_count: float32 [1], their number a head.

    Args:
        spec: the model's shapes.
        config: settings.
        space: `post_rope` for SQuat, `pre_rope` for SQuat_pre.
    """

    def __init__(self, spec: ModelSpec, config: SQuatConfig, space: Space) -> None:
        super().__init__(spec, config.k_bits, config.group_size)
        self.config, self.space = config, space
        self.query_space = space if config.query_space == "auto" else config.query_space
        self.block_size = config.block_size or spec.head_dim // 2
        self.gram: Tensor
        self.gram_count: Tensor
        if config.subspace_source == "calibration":
            self.register_buffer("gram", torch.zeros(spec.num_kv_heads, spec.head_dim, spec.head_dim))
            self.register_buffer("gram_count", torch.zeros(1))

    def new_state(self, batch: int, device: torch.device) -> SQuatState:
        spec = self.spec
        matrix = torch.zeros(batch, spec.num_kv_heads, spec.head_dim, spec.head_dim, device=device)
        return SQuatState(matrix, torch.zeros(batch, device=device))

    def observe(self, state: State, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        assert isinstance(state, SQuatState)
        if self.config.subspace_source == "calibration":
            return
        if self.config.share_batch:
            open_rows = (counts > 0).view(-1, 1, 1, 1)
            queries, counts = queries[:1] * open_rows, torch.where(counts > 0, counts[:1], 0)
        state.matrix.add_(query_gram(queries, self.spec.num_kv_heads))
        state.count.add_(counts * self.spec.num_kv_groups)

    def settle(self, state: State, rows: list[int]) -> None:
        assert isinstance(state, SQuatState)
        if self.config.subspace_source == "calibration":
            if not self.gram_count.any():
                raise ConfigError("a subspace from calibration needs an artifact; make one with 'kvcli fit-subspace'")
            gram, count = self.gram.expand(len(rows), -1, -1, -1), self.gram_count.expand(len(rows))
        else:
            gram, count = state.matrix[rows], state.count[rows]
        weight = torch.full_like(count, self.config.squat_lambda)
        if self.config.lambda_scaling == "per_token":
            weight = weight / count.clamp_min(1)
        subspace = leading_gram(gram, self.config.subspace_dim, self.config.subspace_solver)
        state.matrix[rows] = torch.eye(self.spec.head_dim, device=gram.device) + weight.view(-1, 1, 1, 1) * subspace

    def encode(self, x: Tensor, state: State | None = None) -> PerChannelCodes:
        assert isinstance(state, SQuatState)
        keys, parts = x.float(), []
        for start in range(0, self.spec.head_dim, self.block_size):
            stop = min(start + self.block_size, self.spec.head_dim)
            block = keys[..., start:stop]
            part = self.quantize_channels(block)
            parts.append(part)
            if stop < self.spec.head_dim:
                error = self.dequantize_channels(*part) - block.clamp(-65504, 65504)
                rest = keys[..., stop:] - error @ correction(state.matrix, start, stop)
                keys = torch.cat((keys[..., :stop], rest), dim=-1)
        codes, scale, zero = (torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True))
        return self.pack(codes, scale, zero)


def query_gram(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Q^T Q for each kv head, its query heads concatenated along the tokens.

    Args:
        queries: [batch, num_heads, time, head_dim].
        num_kv_heads: kv heads.

    Returns:
        float32 [batch, num_kv_heads, head_dim, head_dim].
    """
    rows = queries.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return rows.transpose(-1, -2) @ rows


def leading_gram(gram: Tensor, rank: int, solver: str) -> Tensor:
    """Q_hat^T Q_hat with Q_hat = diag(S[:r]) Vh[:r] of the SVD of Q, from the Gram matrix Q^T Q [..., d, d].

    The right singular vectors of Q are the eigenvectors of Q^T Q, and its eigenvalues S^2. Solved in float64, because
    squaring squares the condition number.
    """
    matrix = gram.double()
    rank = min(rank, matrix.shape[-1])
    if solver == "svd":
        values, vectors = torch.linalg.eigh(matrix)
        values, vectors = values[..., -rank:].clamp_min(0), vectors[..., -rank:]
    else:
        basis = torch.eye(matrix.shape[-1], rank, dtype=matrix.dtype, device=matrix.device)
        vectors = basis.expand(*matrix.shape[:-2], -1, -1)
        for _ in range(_POWER_ITERATIONS):
            vectors = torch.linalg.qr(matrix @ vectors + 1e-12 * basis)[0]
        values, turn = torch.linalg.eigh(vectors.transpose(-1, -2) @ matrix @ vectors)
        vectors = vectors @ turn
    return ((vectors * values.unsqueeze(-2)) @ vectors.transpose(-1, -2)).float()


def correction(matrix: Tensor, start: int, stop: int) -> Tensor:
    """(P_rr^-1 P_rb)^T for the block [start, stop) and the rest: [batch, heads, stop - start, head_dim - stop]."""
    p = matrix.double()
    solved = torch.linalg.solve(p[..., stop:, stop:], p[..., stop:, start:stop])
    return solved.transpose(-1, -2).float()
