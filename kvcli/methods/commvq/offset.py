"""Chooses the constant that CommVQ does not code: nothing, the bias of the key projection, or the mean key.

A constant part of the keys that is large beside what varies, such as the bias of Qwen2.5 models, would take up the
codebook's first stages and the token norm. RoPE is linear, R(m)(k + b) = R(m) k + R(m) b, so it is added exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import fit_keys, set_pair_weight
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.samples import LayerSamples, TokenBlocks
from kvcli.rope import to_pairs

_PILOT_TOKENS = 2048
_PILOT_ITERATIONS = 2
_PILOT_STAGES = 4
"""Residual stages of a trial: later ones hardly change the order of the errors."""

_LEAST_GAIN = 0.05
"""Share by which an offset must lower the held-out error: without one, decoding is a little faster."""


def choose_offset(
    codec: CommVQKeyCodec, train: LayerSamples, heldout: LayerSamples, config: CommVQConfig, generator: torch.Generator
) -> tuple[str, Tensor]:
    """The offset with the smallest held-out score error, each tried by a short fit of a few stages.

    A `key_offset` other than auto is taken without a trial. The codec does not change. Returns the offset's name, and
    the offset [num_kv_heads, head_dim].
    """
    mean = train.keys.mean(lambda block: block.mean(1))
    choices = {"none": torch.zeros_like(mean)}
    if train.key_bias is not None and train.key_bias.any():
        choices["bias"] = train.key_bias
    choices["mean"] = mean
    if config.key_offset != "auto":
        return config.key_offset, choices.get(config.key_offset, choices["none"])
    stages = min(_PILOT_STAGES, config.num_residuals)
    pilot = config.model_copy(
        update={"num_residuals": stages, "key_iterations": _PILOT_ITERATIONS, "key_assignment": "hard"}
    )
    tokens = torch.randperm(train.num_tokens, generator=generator)[:_PILOT_TOKENS]
    seed = int(torch.randint(2**31, (), generator=generator))
    some = train.keys.at(tokens)
    errors = {}
    for name, offset in choices.items():
        trial = CommVQKeyCodec(codec.spec, pilot).to(some.device)
        keys = TokenBlocks.of(some - offset.unsqueeze(1))
        set_pair_weight(trial, keys, train, pilot.key_weighting)
        fit_keys(trial, keys, pilot, torch.Generator().manual_seed(seed))
        errors[name] = score_error(trial, heldout, offset)
    best = min(errors, key=lambda name: errors[name] * (1 - _LEAST_GAIN if name == "none" else 1))
    return best, choices[best]


def score_error(codec: CommVQKeyCodec, heldout: LayerSamples, offset: Tensor) -> float:
    """Mean squared error of a score q.k before scaling, over all heads, for queries at random distances."""
    rotary_dim = codec.spec.rope.rotary_dim
    keys = (heldout.keys.first(_PILOT_TOKENS) - offset.unsqueeze(1)).unsqueeze(0)
    error = to_pairs((codec.decode(codec.encode(keys)) - keys)[0], rotary_dim).square().sum(-1).mean(1)
    queries = to_pairs(heldout.q, rotary_dim).square().sum(-1).mean(1).unflatten(0, (len(error), -1)).mean(1)
    return float((error * queries).sum(-1).mean()) / 2
