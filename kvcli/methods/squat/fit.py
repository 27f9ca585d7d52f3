"""Fits SQuat's query subspace offline, on calibration queries."""

from __future__ import annotations

from typing import Any

import torch

from kvcli.methods.base import LayerCodec
from kvcli.methods.method import FitReport
from kvcli.methods.squat.codec import SQuatKey, leading_factor, query_gram
from kvcli.samples import LayerSamples


def fit_subspace(
    codec: LayerCodec, train: LayerSamples, heldout: LayerSamples, config: Any, generator: torch.Generator
) -> FitReport:
    """Keeps the Gram matrix of the recorded queries, in the space that the codec asks for.

    Returns:
        The share of the queries' energy that the leading `subspace_dim` directions hold, for each kv head.
    """
    key = codec.key
    assert isinstance(key, SQuatKey)
    queries = train.q if key.query_space == "pre_rope" else train.rotated_queries()
    gram = query_gram(queries.unsqueeze(0), key.spec.num_kv_heads)[0]
    key.gram.copy_(gram)
    key.gram_count.fill_(queries.shape[1] * key.spec.num_kv_groups)
    held = leading_factor(gram, config.subspace_dim, config.subspace_solver)
    share = held.square().sum((-2, -1)) / gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
    return FitReport({"subspace_energy": [float(x) for x in share]})
