"""SQuat (arXiv 2503.24358), post-RoPE and pre-RoPE: KIVI's format, with key errors kept out of the query subspace.

The subspace is found in PyTorch here; `kernels.py` has the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvcli.errors import ConfigError
from kvcli.kernels.launch import FP16_MAX
from kvcli.methods.base import Space, State
from kvcli.methods.config import SQuatConfig
from kvcli.methods.kivi import kivi_schedules
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport, Method
from kvcli.methods.samples import LayerSamples
from kvcli.methods.scalar.codec import PerChannelCodec, PerTokenValue, ScalarCodes
from kvcli.spec import ModelSpec

_ITERATIONS = 24
_OVERSAMPLING = 11


def query_gram(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Q^T Q of queries [batch, num_heads, time, head_dim]: float32 [batch, num_kv_heads, head_dim, head_dim].

    The query heads of a kv head are concatenated along the tokens.
    """
    rows = queries.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return rows.transpose(-1, -2) @ rows


def leading_factor(gram: Tensor, rank: int, solver: str) -> Tensor:
    """Q_hat = diag(S[:r]) Vh[:r] of the SVD of Q (section 3.2), from the Gram matrix Q^T Q.

    The right singular vectors of Q are the eigenvectors of Q^T Q, and its eigenvalues S^2. Solved in float64, because
    squaring squares the condition number.

    Args:
        gram: [..., d, d].
        rank: directions r.
        solver: `svd` for a full eigendecomposition; `power` for block power iteration with more columns than
            directions, then Rayleigh-Ritz: Q_hat^T Q_hat agrees with `svd` to 1e-6 of its norm on the spectra tested.

    Returns:
        float64 [..., min(r, d), d].
    """
    matrix = gram.double()
    width = matrix.shape[-1]
    rank = min(rank, width)
    if solver == "svd":
        values, vectors = torch.linalg.eigh(matrix)
    else:
        # random: a start that is orthogonal to a leading eigenvector would not converge to it
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(width, min(width, rank + _OVERSAMPLING), generator=generator, dtype=matrix.dtype)
        basis = start.to(matrix.device).expand(*matrix.shape[:-2], -1, -1)
        for _ in range(_ITERATIONS):
            basis = torch.linalg.qr(matrix @ basis)[0]
        values, eigvec = torch.linalg.eigh(basis.transpose(-1, -2) @ matrix @ basis)
        vectors = basis @ eigvec
    values, vectors = values[..., -rank:], vectors[..., -rank:]
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).transpose(-1, -2)


def corrections(q_hat: Tensor, block_size: int) -> Tensor:
    """Corrections of the channels after each block, per unit of the block's error, for P = I + Q_hat^T Q_hat.

    From q_hat float64 [..., r, d]; float32 [..., d, d]: rows of block b, columns of the channels r after it, hold
    (P_rr^-1 P_rb)^T; 0 elsewhere.
    """
    width = q_hat.shape[-1]
    matrix = q_hat.new_zeros(*q_hat.shape[:-2], width, width, dtype=torch.float32)
    for start in range(0, width - block_size, block_size):
        stop = start + block_size
        matrix[..., start:stop, stop:] = correction(q_hat, start, stop)
    return matrix


def correction(q_hat: Tensor, start: int, stop: int) -> Tensor:
    """(P_rr^-1 P_rb)^T for the block [start, stop) and the channels after it: float32 [..., stop - start, d - stop].

    With A = Q_hat[:, rest]^T and B = Q_hat[:, block]^T, P_rr^-1 P_rb = (I + A A^T)^-1 A B^T = A (I + A^T A)^-1 B^T: a
    system of r equations.
    """
    block, rest = q_hat[..., start:stop], q_hat[..., stop:]
    small = torch.eye(q_hat.shape[-2], dtype=q_hat.dtype, device=q_hat.device) + rest @ rest.transpose(-1, -2)
    # positive definite, so no failure to check for: solve_ex does not wait for the device
    return (block.transpose(-1, -2) @ torch.linalg.solve_ex(small, rest)[0]).float()


@dataclass(frozen=True)
class SQuatState(State):
    """The query subspace of each sequence.

    Attributes:
        matrix: float32 [batch, num_kv_heads, head_dim, head_dim]; the Gram matrix of the queries seen so far until a
            sequence's first keys are encoded, `corrections` from then on.
        count: float32 [batch], queries seen per kv head.
    """

    matrix: Tensor
    count: Tensor


class SQuatKey(PerChannelCodec[SQuatState]):
    """SQuat's keys (arXiv 2503.24358): quantized per channel, block of channels by block.

    Eq. 1 and Lemma 2 with P = I + lambda Q_hat^T Q_hat: after a block of channels is quantized with error d, the
    channels r after it move by -P_rr^-1 P_rb d, the exact minimiser of delta^T P delta given that error. With
    lambda = 0 nothing moves, and the codes are KIVI's.

    Deviation: the paper shares the first sequence's subspace in a batch; here each sequence has its own unless
    `share_batch` is set.

    Buffers:
        gram: float32 [num_kv_heads, head_dim, head_dim], Gram matrix of calibration queries; only with
            `subspace_source` calibration.
        gram_count: float32 [1], their number per kv head; only with `subspace_source` calibration.
    """

    def __init__(self, spec: ModelSpec, config: SQuatConfig, space: Space) -> None:
        super().__init__(spec, config.k_bits, config.group_size)
        self.config, self.space = config, space
        self.query_space = space if config.query_space == "auto" else config.query_space
        self.block_size = config.block_size or spec.head_dim // 2
        self._fitted = False
        if config.subspace_source == "calibration":
            self.gram: Tensor = nn.Buffer(torch.zeros(spec.num_kv_heads, spec.head_dim, spec.head_dim))
            self.gram_count: Tensor = nn.Buffer(torch.zeros(1))

    def new_state(self, batch: int, device: torch.device) -> SQuatState:
        spec = self.spec
        matrix = torch.zeros(batch, spec.num_kv_heads, spec.head_dim, spec.head_dim, device=device)
        return SQuatState(matrix, torch.zeros(batch, device=device))

    def observe(self, state: SQuatState, queries: Tensor, keys: Tensor, counts: Tensor) -> None:
        if self.config.subspace_source == "calibration":
            return
        if self.config.share_batch:
            open_rows = (counts > 0).view(-1, 1, 1, 1)
            queries, counts = queries[:1] * open_rows, torch.where(counts > 0, counts[:1], 0)
        gram = query_gram
        if self.fused:
            from kvcli.methods.squat import kernels

            gram = kernels.query_gram if kernels.supports_gram(queries) else gram
        state.matrix.add_(gram(queries, self.spec.num_kv_heads))
        state.count.add_(counts * self.spec.num_kv_groups)

    def finalize_state(self, state: SQuatState, rows: list[int]) -> None:
        # indexing with a list copies it to the device
        index = slice(None) if rows == list(range(len(state.count))) else rows
        if self.config.subspace_source == "calibration":
            # a positive result is kept, because the check waits for the device
            self._fitted = self._fitted or bool(self.gram_count.any())
            if not self._fitted:
                raise ConfigError("a subspace from calibration needs an artifact with a fitted subspace")
            gram, count = self.gram.expand(len(rows), -1, -1, -1), self.gram_count.expand(len(rows))
        else:
            gram, count = state.matrix[index], state.count[index]
        weight = torch.full_like(count, self.config.squat_lambda)
        if self.config.lambda_scaling == "per_token":
            weight = weight / count.clamp_min(1)
        rank = self.config.subspace_dim
        if self.fused:
            from kvcli.methods.squat import kernels

            # they solve in float32, whatever `subspace_solver` says
            if kernels.subspace_note(self.spec.head_dim, rank) is None:
                factor = kernels.leading_factor(gram, rank)
                state.matrix[index] = kernels.corrections(factor, weight, self.block_size)
                return
        q_hat = leading_factor(gram, rank, self.config.subspace_solver) * weight.double().sqrt().view(-1, 1, 1, 1)
        state.matrix[index] = corrections(q_hat, self.block_size)

    def kernel_note(self, device: torch.device) -> str | None:
        from kvcli.methods.squat.kernels import subspace_note

        return subspace_note(self.spec.head_dim, self.config.subspace_dim)

    def encode(self, x: Tensor, state: SQuatState) -> ScalarCodes:  # type: ignore[override]  # never without a state
        # corrections change only later blocks, so all channels are quantized at the end
        keys = x.float()
        for start in range(0, self.spec.head_dim - self.block_size, self.block_size):
            stop = start + self.block_size
            rest = keys[..., stop:] - self._error(keys[..., start:stop]) @ state.matrix[..., start:stop, stop:]
            keys = torch.cat((keys[..., :stop], rest), dim=-1)
        return super().encode(keys, state)

    def _error(self, block: Tensor) -> Tensor:
        """decode(encode(block)) - block for some channels of all tokens, float32."""
        if self.fused:
            from kvcli.methods.squat.kernels import per_channel_error

            return per_channel_error(block, self.n_bits, self.tokens_per_group)
        return self.dequantize(*self.quantize_channels(block)) - block.clamp(-FP16_MAX, FP16_MAX)


def fit_subspace(
    codec: LayerCodec[SQuatKey, PerTokenValue],
    train: LayerSamples,
    heldout: LayerSamples,
    config: SQuatConfig,
    generator: torch.Generator,
) -> FitReport:
    """Keeps the Gram matrix of the recorded queries, in the space that the codec asks for.

    Returns:
        `subspace_energy`: for each kv head, the share of the queries' squared norm that the leading `subspace_dim`
        directions hold (sum of the leading squared singular values / sum of all).

    ConfigError: settings whose subspace comes from the prompt.
    """
    if config.subspace_source != "calibration":
        raise ConfigError("only a subspace from calibration can be fitted; set subspace_source=calibration")
    key = codec.key
    queries = train.q if key.query_space == "pre_rope" else train.rotated_queries()
    gram = query_gram(queries.unsqueeze(0), key.spec.num_kv_heads)[0]
    key.gram.copy_(gram)
    key.gram_count.fill_(queries.shape[1] * key.spec.num_kv_groups)
    q_hat = leading_factor(gram, config.subspace_dim, config.subspace_solver)
    energy = q_hat.square().sum((-2, -1)) / gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
    return FitReport({"subspace_energy": [float(x) for x in energy]})


def _method(name: str, summary: str, space: Space) -> Method:
    return Method(
        name=name,
        summary=summary,
        bits="1, 2, 4, 8",
        paper="SQuat, 2025",
        arxiv="2503.24358",
        config_cls=SQuatConfig,
        build=lambda spec, config, layer_idx: LayerCodec(
            SQuatKey(spec, config, space), PerTokenValue(spec, config.v_bits, config.group_size)
        ),
        paper_settings={f"{name}-2": {"sink_length": 0, "residual_length": 32}},
        schedules=kivi_schedules,
        fit=fit_subspace,
        fit_metrics={"subspace_energy": "share of the queries' energy in the subspace"},
        attend_kernels="kvcli.methods.scalar.attend_kernels",
        example_settings={"residual_length": 8, "group_size": 4},
        bench=(f"{name}-2",),
    )


METHOD = _method("squat", "KIVI's format, key errors orthogonal to the query subspace", "post_rope")
METHOD_PRE = _method("squat-pre", "SQuat before RoPE, which is applied after dequantization", "pre_rope")
