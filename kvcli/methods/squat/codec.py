"""SQuat's key codec: KIVI's storage, with residuals steered away from the query subspace."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcli.errors import ConfigError
from kvcli.methods.base import Space, State
from kvcli.methods.scalar.per_channel import PerChannelCodec, PerChannelCodes
from kvcli.methods.squat.config import SQuatConfig
from kvcli.spec import ModelSpec

_POWER_ITERATIONS = 20


@dataclass(frozen=True)
class SQuatState(State):
    """Attributes:
    matrix: float32 [batch, num_kv_heads, head_dim, head_dim]; the Gram matrix of the queries seen so far until a
        sequence's first keys are encoded, `corrections` from then on.
    count: float32 [batch], queries seen a head.
    """

    matrix: Tensor
    count: Tensor


class SQuatKey(PerChannelCodec[SQuatState]):
    """Keys per channel, block of channels by block, each block's error made up for in the channels that follow.

    SQuat Eq. 1 and Lemma 2 with P = I + lambda Q_hat^T Q_hat: after a block of channels is quantized with error d, the
    remaining channels move by -P_rr^-1 P_rb d, the exact minimiser of delta^T P delta given that error. With lambda = 0
    nothing moves, and the codes are KIVI's.

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
        self._fitted = False
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
        state.matrix.add_(self._query_gram(queries))
        state.count.add_(counts * self.spec.num_kv_groups)

    def _query_gram(self, queries: Tensor) -> Tensor:
        if self.fused:
            from kvcli.methods.squat import kernels

            if kernels.can_square(queries):
                return kernels.query_gram(queries, self.spec.num_kv_heads)
        return query_gram(queries, self.spec.num_kv_heads)

    def finalize_state(self, state: State, rows: list[int]) -> None:
        assert isinstance(state, SQuatState)
        # a list becomes a tensor that the device has to be sent
        index = slice(None) if rows == list(range(len(state.count))) else rows
        if self.config.subspace_source == "calibration":
            self._check_fitted()
            gram, count = self.gram.expand(len(rows), -1, -1, -1), self.gram_count.expand(len(rows))
        else:
            gram, count = state.matrix[index], state.count[index]
        weight = torch.full_like(count, self.config.squat_lambda)
        if self.config.lambda_scaling == "per_token":
            weight = weight / count.clamp_min(1)
        state.matrix[index] = self._corrections(gram, weight)

    def _check_fitted(self) -> None:
        """Asks the device only until the answer is yes: it has to be waited for."""
        self._fitted = self._fitted or bool(self.gram_count.any())
        if not self._fitted:
            raise ConfigError("a subspace from calibration needs an artifact; make one with 'kvcli fit-subspace'")

    def _corrections(self, gram: Tensor, weight: Tensor) -> Tensor:
        """Of P = I + weight Q_hat^T Q_hat; kernels find the same subspace for every solver, in float32."""
        rank = self.config.subspace_dim
        if self.fused:
            from kvcli.methods.squat import kernels

            if kernels.can_lead(self.spec.head_dim, rank):
                return kernels.corrections(kernels.leading_factor(gram, rank), weight, self.block_size)
        q_hat = leading_factor(gram, rank, self.config.subspace_solver)
        return corrections(q_hat * weight.double().sqrt().view(-1, 1, 1, 1), self.block_size)

    def encode(self, x: Tensor, state: State | None = None) -> PerChannelCodes:
        assert isinstance(state, SQuatState)
        if self.fused:
            return self._encode_fused(x, state)
        keys, parts = x.float(), []
        for start in range(0, self.spec.head_dim, self.block_size):
            stop = min(start + self.block_size, self.spec.head_dim)
            block = keys[..., start:stop]
            part = self.quantize_channels(block)
            parts.append(part)
            if stop < self.spec.head_dim:
                keys = self._move_rest(keys, self.dequantize_channels(*part) - block.clamp(-65504, 65504), state, stop)
        codes, scale, zero = (torch.cat(tensors, dim=-1) for tensors in zip(*parts, strict=True))
        return self.pack(codes, scale, zero)

    def _encode_fused(self, x: Tensor, state: SQuatState) -> PerChannelCodes:
        """Moves all channels first; a block does not move after its turn, so it can be quantized again at the end."""
        from kvcli.methods.scalar.encode_kernels import quantize_per_channel
        from kvcli.methods.squat.encode_kernels import per_channel_error

        keys = x.float()
        for start in range(0, self.spec.head_dim - self.block_size, self.block_size):
            stop = start + self.block_size
            error = per_channel_error(keys[..., start:stop], self.n_bits, self.tokens_per_group)
            keys = self._move_rest(keys, error, state, stop)
        return PerChannelCodes(*quantize_per_channel(keys, self.n_bits, self.tokens_per_group))

    def _move_rest(self, keys: Tensor, error: Tensor, state: SQuatState, stop: int) -> Tensor:
        """Moves the channels from `stop` on, given the error of the block before."""
        correction = state.matrix[..., stop - error.shape[-1] : stop, stop:]
        return torch.cat((keys[..., :stop], keys[..., stop:] - error @ correction), dim=-1)


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


def leading_factor(gram: Tensor, rank: int, solver: str) -> Tensor:
    """Q_hat = diag(S[:r]) Vh[:r] of the SVD of Q, from the Gram matrix Q^T Q [..., d, d]: float64 [..., r, d].

    The right singular vectors of Q are the eigenvectors of Q^T Q, and its eigenvalues S^2. Solved in float64, because
    squaring squares the condition number.
    """
    matrix = gram.double()
    rank = min(rank, matrix.shape[-1])
    if solver == "svd":
        values, vectors = torch.linalg.eigh(matrix)
        values, vectors = values[..., -rank:], vectors[..., -rank:]
    else:
        basis = torch.eye(matrix.shape[-1], rank, dtype=matrix.dtype, device=matrix.device)
        vectors = basis.expand(*matrix.shape[:-2], -1, -1)
        for _ in range(_POWER_ITERATIONS):
            vectors = torch.linalg.qr(matrix @ vectors + 1e-12 * basis)[0]
        values, turn = torch.linalg.eigh(vectors.transpose(-1, -2) @ matrix @ vectors)
        vectors = vectors @ turn
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).transpose(-1, -2)


def corrections(q_hat: Tensor, block_size: int) -> Tensor:
    """What a block's error moves the channels after it by, for every block of P = I + Q_hat^T Q_hat.

    Args:
        q_hat: float64 [..., r, d].
        block_size: channels a block.

    Returns:
        float32 [..., d, d]; rows of block b, columns of the channels r after it: (P_rr^-1 P_rb)^T; 0 elsewhere.
    """
    width = q_hat.shape[-1]
    found = q_hat.new_zeros(*q_hat.shape[:-2], width, width, dtype=torch.float32)
    for start in range(0, width - block_size, block_size):
        stop = start + block_size
        found[..., start:stop, stop:] = correction(q_hat, start, stop)
    return found


def correction(q_hat: Tensor, start: int, stop: int) -> Tensor:
    """(P_rr^-1 P_rb)^T for the block [start, stop) and the rest: float32 [..., stop - start, d - stop].

    With A = Q_hat[:, rest]^T and B = Q_hat[:, block]^T, P_rr^-1 P_rb = (I + A A^T)^-1 A B^T = A (I + A^T A)^-1 B^T: a
    system of r equations.
    """
    block, rest = q_hat[..., start:stop], q_hat[..., stop:]
    small = torch.eye(q_hat.shape[-2], dtype=q_hat.dtype, device=q_hat.device) + rest @ rest.transpose(-1, -2)
    # positive definite, so that there is no failure to wait for
    return (block.transpose(-1, -2) @ torch.linalg.solve_ex(small, rest)[0]).float()
