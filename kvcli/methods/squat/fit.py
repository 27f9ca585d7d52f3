"""Fits SQuat's query subspace offline, on calibration queries."""

from __future__ import annotations

import torch

from kvcli.errors import ConfigError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport
from kvcli.methods.samples import LayerSamples
from kvcli.methods.scalar.per_token import PerTokenValue
from kvcli.methods.squat.codec import SQuatKey
from kvcli.methods.squat.config import SQuatConfig
from kvcli.methods.squat.subspace import leading_factor, query_gram


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

    Raises:
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
