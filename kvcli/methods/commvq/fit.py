"""Fits CommVQ's codecs of one layer from recorded samples: keys, then values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcli.methods.base import Codec, LayerCodec
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import fit_keys
from kvcli.methods.commvq.fit_values import fit_values_fast, fit_values_paper
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.method import FitReport
from kvcli.samples import LayerSamples

_ERROR_TOKENS = 8192


def fit_layer(
    codec: LayerCodec[CommVQKeyCodec, CommVQValueCodec],
    train: LayerSamples,
    heldout: LayerSamples,
    config: CommVQConfig,
    generator: torch.Generator,
) -> FitReport:
    """Fits key codebooks, then value encoder and codebook, in place.

    Args:
        codec: the layer's codecs, on the device the samples are on.
        train: samples to fit on, without the tokens that the cache keeps as sinks.
        heldout: samples to measure on.
        config: resolved settings.
        generator: CPU generator of every random choice.

    Returns:
        `key_nmse` and `value_nmse`, the held-out `nmse` of each head; `dead_key_rows`, dead rows of the key codebooks.
    """
    dead = fit_keys(codec.key, train, config, generator)
    if config.value_trainer == "fast":
        fit_values_fast(codec.value, train.v, config.value_iterations)
    else:
        fit_values_paper(codec.value, train.v, config.value_steps, generator)
    return FitReport(
        {
            "key_nmse": nmse(codec.key, heldout.k),
            "value_nmse": nmse(codec.value, heldout.v),
            "dead_key_rows": dead,
        }
    )


def nmse(codec: Codec[Any], x: Tensor) -> list[float]:
    """Normalised squared error sum |x - x_hat|^2 / sum |x|^2 of each head, for x [heads, tokens, head_dim]."""
    x = x[:, :_ERROR_TOKENS]
    x_hat = codec.decode(codec.encode(x.unsqueeze(0), None), None)[0]
    error, energy = (x_hat - x).square().sum((1, 2)), x.square().sum((1, 2))
    return [float(e) for e in error / energy.clamp_min(1e-30)]
