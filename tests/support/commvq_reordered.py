"""CommVQ's re-ordered attention: codes first, codebook after (arXiv 2506.18879, Eq. 20-22); an oracle for tests."""

import torch
from torch import Tensor

from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.layer_codec import EncodedTokens, LayerCodec, PartialAttention
from kvcli.rope import Rotation, to_pairs


def reordered_attend(
    codec: LayerCodec[CommVQKeyCodec, CommVQValueCodec], query: Tensor, encoded: EncodedTokens, scaling: float
) -> PartialAttention:
    """Attention of rotated queries [batch, num_heads, query_len, head_dim] that never decodes a key or a value.

    Keys: rotation commutes with the codebook, so the products conj(q_j) u_aj are formed once per query and codebook
    row; a token's score is Re sum_j e^{i n theta_j} * sum over stages of (P_ja + i P_jb), times its norm. Values: the
    softmax weights are summed over the bits first, and the codebook follows, (P S) C.
    """
    assert encoded.rotations is not None
    rotation = encoded.rotations.tokens(0, encoded.length)
    scores = _key_scores(codec.key, query.float(), encoded, rotation) * scaling
    if codec.offset is not None:
        batch, _, length, _ = rotation.cos.shape
        constant = rotation.apply(codec.offset.expand(batch, -1, length, -1))
        rows = query.float().unflatten(1, (constant.shape[1], -1))
        scores += (rows @ constant.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scaling
    visible = encoded.visible(0, encoded.length)
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0.0, lse).unsqueeze(-1))
    return _value_sum(codec.value, weights, encoded), lse


def _key_scores(codec: CommVQKeyCodec, query: Tensor, encoded: EncodedTokens, rotation: Rotation) -> Tensor:
    """Scores [batch, num_heads, query_len, length], unscaled."""
    spec, groups = codec.spec, codec.num_groups
    queries = torch.view_as_complex(to_pairs(query, spec.rope.rotary_dim).contiguous()).conj()
    queries = queries.view(len(query), spec.num_kv_heads, -1, groups, 1, codec.config.pairs_per_group)
    books = torch.view_as_complex(codec.books().view(spec.num_kv_heads, 1, groups, *codec.codebook.shape[2:4], -1, 2))
    # 1 for pairs that RoPE does not reach: [batch or 1, 1, 1, groups, length, pairs]
    angles = torch.complex(rotation.cos.float(), rotation.sin.float())
    angles = torch.nn.functional.pad(angles, (0, spec.head_dim // 2 - angles.shape[-1]), value=1.0)
    angles = angles.unflatten(-1, (groups, -1)).transpose(2, 3).unsqueeze(1)
    indices = [x.unflatten(0, (spec.num_kv_heads, 1, groups)).movedim(3, 0) for x in codec.unpack(encoded.key_codes)]
    total = 0
    for stage in range(codec.config.num_residuals):
        products = queries * books[..., stage, :, :]  # [batch, kv heads, queries, groups, N, pairs]
        first, second = (products.take_along_dim(x[..., stage, None], dim=4) for x in indices)
        total = total + first + 1j * second
    scores = (total * angles).real.sum((3, 5)) * codec.gain(encoded.key_codes).transpose(2, 3)
    return scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def _value_sum(codec: CommVQValueCodec, weights: Tensor, encoded: EncodedTokens) -> Tensor:
    """(P S) C for weights [batch, num_heads, query_len, length]."""
    codes, heads = encoded.value_codes, codec.spec.num_kv_heads
    scaled = weights * codes.scale.float().transpose(2, 3)
    sums, mass = scaled @ codec.unpack(codes).unsqueeze(1), scaled.sum(-1, keepdim=True)
    by_head, mass = (x.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 3) for x in (sums, mass))
    books = codec.codebook.float().unflatten(1, (heads, -1)).transpose(0, 1)
    out = by_head @ books + mass * codec.offset.float().view(heads, 1, -1)
    out = out.view(heads, weights.shape[0], -1, weights.shape[2], codec.spec.head_dim)
    return out.transpose(0, 1).flatten(1, 2)
