"""Fits CommVQ's value encoder and codebook (arXiv 2506.18879, section 4.1): a fast trainer and the paper's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from kvcli.methods.commvq.allocate import square_root
from kvcli.methods.commvq.tables import in_metric
from kvcli.methods.commvq.values import CommVQValueCodec, sweep
from kvcli.methods.samples import StoredBlocks, TokenBlocks

_RIDGE = 1e-4
_LEAST_COST = 0.01
_SHRINKAGE = 1e-4
_BLOCK_TOKENS = 16384
_SAMPLE_ROWS = 8192
_PATIENCE = 2
_PAPER_BATCH = 2048
_PAPER_LEARNING_RATE = 1e-3


def set_metric(codec: CommVQValueCodec, values: TokenBlocks, fisher: Tensor | None) -> None:
    """Sets the codec's metric of errors, in units in which values [num_kv_heads, tokens, head_dim] have mean square 1.

    `fisher` is Fisher information [num_kv_heads, head_dim, head_dim]; without it, errors of each channel count in units
    of its mean magnitude.
    """
    if fisher is None:
        scale = values.mean(lambda block: block.abs().mean(1))
        root = torch.diag_embed(1 / torch.where(scale > 0, scale, 1.0))
    else:
        # directions that cost nothing keep a small share of the cost: what is stored there must stay finite
        covariance, inverse = regular_covariance(values)
        mean_cost = torch.einsum("hde,hed->", fisher.double(), covariance) / fisher.shape[:2].numel()
        root = square_root(fisher.double() + _LEAST_COST * mean_cost.clamp_min(1e-30) * inverse)
    size = values.mean(lambda x: torch.einsum("htd,hde->hte", x.to(root.dtype), root).square().mean()).sqrt()
    codec.metric_root.copy_(root / torch.where(size > 0, size, 1.0))


def regular_covariance(values: TokenBlocks) -> tuple[Tensor, Tensor]:
    """Covariance of values [heads, tokens, d] and its inverse, float64 [heads, d, d]; correlations are shrunk."""
    mean = values.mean(lambda block: block.double().mean(1, keepdim=True))
    deviation = values.mean(lambda block: (block.double() - mean).square().mean(1)).sqrt()
    deviation = torch.where(deviation > 0, deviation, 1.0)

    def products(block: Tensor) -> Tensor:
        unit = (block.double() - mean) / deviation.unsqueeze(1)
        return unit.mT @ unit / unit.shape[1]

    correlation = values.mean(products)
    correlation = correlation + _SHRINKAGE * torch.eye(correlation.shape[-1], dtype=torch.float64, device=mean.device)
    outer = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    return correlation * outer, torch.linalg.inv(correlation) / outer


def fit_values_fast(codec: CommVQValueCodec, values: TokenBlocks, iterations: int) -> None:
    """Alternates coordinate descent on the bits with least squares for codebook and linear encoder, and keeps the best.

    Encoding begins with the encoder's bits instead of those of the round before, and finds worse bits than the descent
    does over many rounds. Codebooks are therefore judged by encoding, once as solved for the bits of the descent and
    once for those that encoding finds, and rounds end when two in a row are worse than the best.

    The codec is fitted in place, with its metric, to values [num_kv_heads, tokens, head_dim].
    """
    rows = _unit_rows(codec, values)
    count = min(rows.num_tokens, _SAMPLE_ROWS)
    places = torch.arange(count) * rows.num_tokens // count
    sample = rows.at(places)
    _, _, bits = principal_bits(rows, codec.config.value_code_bits)
    best, best_error, worse = codec.state_dict(), float("inf"), 0
    for round_number in range(1, iterations + 1):
        codebook, offset = least_squares_codebook(zip(bits, rows, strict=True))
        _store(codec, codebook, offset)
        # the encoder predicts the signs 2s - 1 of the bits; its bias absorbs the -1
        encoder = 2 * _ridge_solve(zip(rows, bits, strict=True))
        codec.get_buffer("encoder_weight_0").copy_(encoder[:-1].T)
        codec.get_buffer("encoder_bias_0").copy_(encoder[-1] - 1)
        encoded = rows.map(
            lambda block: torch.cat([codec.assign(part).to(torch.uint8) for part in block.split(_BLOCK_TOKENS)])
        ).stored()
        worse += 1
        for sample_bits in (encoded.at(places), None):
            if sample_bits is None:
                _store(codec, *least_squares_codebook(zip(encoded, rows, strict=True)))
            if (error := codec.unit_error(sample, sample_bits)) < best_error:
                best, best_error, worse = {name: x.clone() for name, x in codec.state_dict().items()}, error, 0
        if worse == _PATIENCE or round_number == iterations:
            break
        bits.update(partial(_swept, codebook=codebook, offset=offset), rows)
    codec.load_state_dict(best)


def _unit_rows(codec: CommVQValueCodec, values: TokenBlocks) -> StoredBlocks:
    """Values [num_kv_heads, tokens, head_dim] as the codec normalises them: [tokens, D]."""
    return values.map(lambda block: codec.normalise(block.unsqueeze(0))[0], axis=0).stored()


def _swept(bits: Tensor, rows: Tensor, codebook: Tensor, offset: Tensor) -> Tensor:
    """uint8 bits [T, N_c] of rows [T, D] after one sweep, in place."""
    for part, part_bits in zip(rows.split(_BLOCK_TOKENS), bits.split(_BLOCK_TOKENS), strict=True):
        current = part_bits.to(rows.dtype)
        sweep(part - offset, codebook, current)
        part_bits.copy_(current)
    return bits


def principal_bits(rows: TokenBlocks, num_bits: int) -> tuple[Tensor, Tensor, StoredBlocks]:
    """Initial binary codebook: principal components, quantized uniformly, each bit given where most variance remains.

    Component i with b_i bits and step t_i is the sum of b_i binary rows t_i * 2^j * (its direction), plus an offset.

    Returns codebook [N_c, D], offset [D] and bits uint8 [T, N_c] of rows [T, D] and N_c = `num_bits`, grouped so that a
    sweep chooses neighbouring components.
    """
    mean = rows.mean(lambda block: block.mean(0))
    # that within blocks and that of the blocks' means
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64, device=mean.device)
    freedom = max(1, rows.num_tokens - 1)
    for block in rows:
        apart = (block.mean(0) - mean).double()
        covariance += apart.outer(apart) * (len(block) / freedom)
        if len(block) > 1:
            covariance += torch.cov(block.T).double() * ((len(block) - 1) / freedom)
    variance, directions = torch.linalg.eigh(covariance)
    variance, directions = variance.float().clamp_min(1e-12), directions.float()
    remaining, allotted = variance.tolist(), [0] * len(variance)
    for _ in range(num_bits):
        best = max(range(len(remaining)), key=remaining.__getitem__)
        allotted[best] += 1
        remaining[best] /= 3.5  # about what one more bit reduces a Gaussian's variance by
    book, offset, ranges = [], mean.clone(), []
    for component, count in enumerate(allotted):
        if not count:
            continue
        levels = 2**count
        step = variance[component].sqrt() * 2 * (1.6 + 0.45 * (count - 1)) / levels
        low = -step * (levels - 1) / 2
        offset += low * directions[:, component]
        book += [step * 2**bit * directions[:, component] for bit in range(count)]
        ranges.append((component, count, low, step))

    def bits_of(block: Tensor) -> Tensor:
        scores, bits = (block - mean) @ directions, []
        for component, count, low, step in ranges:
            index = ((scores[:, component] - low) / step).round().clamp(0, 2**count - 1).long()
            bits += [(index >> bit & 1).to(torch.uint8) for bit in range(count)]
        return torch.stack(bits, dim=1)

    return torch.stack(book), offset, rows.map(bits_of).stored()


def least_squares_codebook(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Codebook [N_c, D] and offset [D] that minimise |rows - bits C - offset|^2, with a small ridge.

    `pairs` are bits [t, N_c] and rows [t, D], block by block.
    """
    solution = _ridge_solve(pairs)
    return solution[:-1], solution[-1]


def fit_values_paper(codec: CommVQValueCodec, values: TokenBlocks, steps: int, generator: torch.Generator) -> None:
    """The paper's recipe: encoder and codebook by gradient descent on the squared error, through Gumbel-softmax.

    Two classes per bit, so the difference of two Gumbel variables is one logistic variable; straight-through, tau = 1;
    AdamW with learning rate 1e-3. The loss is the squared error of section 4.1; the released code adds the error of the
    attention output.

    The codec is fitted in place, with its metric, to values [num_kv_heads, tokens, head_dim]; a step takes 2048 tokens.
    The generator is on the CPU.
    """
    rows = _unit_rows(codec, values)
    config, width, device = codec.config, codec.spec.kv_dim, codec.codebook.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    with torch.enable_grad():
        sizes = [(config.value_hidden, width), (config.value_code_bits, config.value_hidden)]
        weights = [nn.Parameter(normal(*size) * size[1] ** -0.5) for size in sizes]
        biases = [nn.Parameter(torch.zeros(size[0], device=device)) for size in sizes]
        codebook = nn.Parameter(normal(config.value_code_bits, width) * config.value_code_bits**-0.5)
        offset = nn.Parameter(torch.zeros(width, device=device))
        optimiser = torch.optim.AdamW([*weights, *biases, codebook, offset], lr=_PAPER_LEARNING_RATE)
        for _ in range(steps):
            batch = rows.at(torch.randint(rows.num_tokens, (_PAPER_BATCH,), generator=generator))
            hidden = nn.functional.gelu(nn.functional.linear(batch, weights[0], biases[0]))
            logits = nn.functional.linear(hidden, weights[1], biases[1])
            uniform = torch.rand(logits.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(device)
            soft = torch.sigmoid(logits + uniform.log() - (-uniform).log1p())
            bits = (soft > 0.5).float() + soft - soft.detach()
            decoded = bits @ codebook + offset
            loss = (decoded - batch).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        _store(codec, codebook, offset)
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            codec.get_buffer(f"encoder_weight_{layer}").copy_(weight)
            codec.get_buffer(f"encoder_bias_{layer}").copy_(bias)


def _store(codec: CommVQValueCodec, codebook: Tensor, offset: Tensor) -> None:
    """Keeps codebook [N_c, D] and offset [D], which are in the coordinates of the metric, in those of values."""
    inverse = torch.linalg.inv(codec.metric_root.double()).float()
    codec.codebook.copy_(in_metric(codebook, inverse))
    codec.offset.copy_(in_metric(offset.unsqueeze(0), inverse).squeeze(0))


def _ridge_solve(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Least squares of targets [T, M] on inputs [T, K] and a constant: [K + 1, M], the constant's row last.

    `pairs` are added to the normal equations part by part, so that neither side is converted to float32 as a whole.
    """
    total: Tensor | None = None
    for inputs, targets in pairs:
        for part, target in zip(inputs.split(_BLOCK_TOKENS), targets.split(_BLOCK_TOKENS), strict=True):
            design = nn.functional.pad(part.float(), (0, 1), value=1.0)
            products = torch.cat((design.T @ design, design.T @ target.float()), dim=1).double()
            total = products if total is None else total.add_(products)
    assert total is not None
    gram, cross = total[:, : len(total)], total[:, len(total) :]
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, cross).float()
