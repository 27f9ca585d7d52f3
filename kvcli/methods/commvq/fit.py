"""Fits CommVQ's codecs of one layer from recorded samples: what keys have in common, keys, then values.

A constant part of the keys that is large beside what varies, such as the bias of Qwen2.5 models, would take up the
codebook's first stages and the token norm. RoPE is linear, R(m)(k + b) = R(m) k + R(m) b, so it is added exactly.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kvcli.methods.base import Codec
from kvcli.methods.commvq.codebook import by_group
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import fit_keys, set_pair_weight
from kvcli.methods.commvq.fit_values import fit_values_fast, fit_values_paper, set_metric
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.head_groups import KeyGroups
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import FitReport
from kvcli.methods.samples import LayerSamples, TokenBlocks
from kvcli.rope import to_pairs

_ERROR_TOKENS = 8192
_MAX_SCALAR_BITS = 8
_NEGLIGIBLE = 1e-3
_OVERSIZE = 4
_PILOT_TOKENS = 2048
_PILOT_ITERATIONS = 2
_PILOT_STAGES = 4
"""Residual stages of a trial: later ones hardly change the order of the errors."""

_LEAST_GAIN = 0.05
"""Share by which an offset must lower the held-out error: without one, decoding is a little faster."""


def fit_layer(
    codec: LayerCodec[CommVQKeyCodec, CommVQValueCodec],
    train: LayerSamples,
    heldout: LayerSamples,
    config: CommVQConfig,
    generator: torch.Generator,
) -> FitReport:
    """Fits key codebooks, then value encoder and codebook, in place; a `FitLayer`.

    Returns:
        `key_bits` and `value_bits`, of the codes per value; `key_nmse` and `value_nmse`, the held-out squared error of
        each head in the metric of the codes, for keys as a share of their variance, for values of their energy;
        `dead_key_rows`, dead rows of the key codebooks; `key_offset`, which constant is not coded.
        Warnings name heads whose keys, and layers whose values, have a larger error than a scalar code of as many bits,
        and heads whose codewords are too large.
    """
    if isinstance(codec.key, KeyGroups):
        return _fit_groups(codec, train, heldout, config, generator)
    config = codec.key.config  # with this layer's bits
    name, offset = choose_offset(codec.key, train, heldout, config, generator)
    codec.key_offset = offset.clone()
    offset = offset.unsqueeze(1)
    keys = train.keys.map(lambda block: block - offset)
    set_pair_weight(codec.key, keys, train, config.key_weighting)
    dead = fit_keys(codec.key, keys, config, generator)
    fisher = train.fisher if config.value_metric == "fisher" else None
    set_metric(codec.value, train.values, None if fisher is None else fisher.value)
    if config.value_trainer == "fast":
        fit_values_fast(codec.value, train.values, config.value_iterations)
    else:
        fit_values_paper(codec.value, train.values, config.value_steps, generator)
    key_bits = config.num_residuals * config.bits_per_code / 2 / config.pairs_per_group
    value_bits = config.value_code_bits / codec.value.spec.kv_dim
    # errors are those of scores: of weighted keys, less what is the same for all tokens
    mean = train.keys.mean(lambda block: block.mean(1, keepdim=True))
    heldout_keys, heldout_values = heldout.keys.first(_ERROR_TOKENS), heldout.values.first(_ERROR_TOKENS)
    key_error = coding_error(codec.key, heldout_keys - offset) * codec.key.channel_weight()
    train_keys, train_values = train.keys.first(_ERROR_TOKENS), train.values.first(_ERROR_TOKENS)
    train_keys, heldout_keys = ((x - mean) * codec.key.channel_weight() for x in (train_keys, heldout_keys))
    value_error = coding_error(codec.value, heldout_values) @ codec.value.metric_root
    train_values, heldout_values = (x @ codec.value.metric_root for x in (train_values, heldout_values))
    metrics = {
        "key_bits": key_bits,
        "value_bits": value_bits,
        "key_nmse": shares(key_error, heldout_keys),
        "value_nmse": shares(value_error, heldout_values),
        "dead_key_rows": dead,
        "key_offset": name,
    }
    # a token's values are coded jointly, on purpose worse in heads whose errors cost less: all heads as one
    joined = [x.transpose(0, 1).flatten(1).unsqueeze(0) for x in (value_error, train_values, heldout_values)]
    warnings = [
        *compare_with_scalar("keys", key_bits, key_error, train_keys, heldout_keys),
        *compare_with_scalar("values", value_bits, *joined),
        *oversized_books(codec.key),
    ]
    return FitReport(metrics, tuple(warnings))


def _fit_groups(codec: Any, train: LayerSamples, heldout: LayerSamples, *rest: Any) -> FitReport:
    """`fit_layer` of each value group, on the samples of its heads alone."""
    count = len(codec.key.parts)
    groups: list[Any] = [codec.of_rank(index, count) for index in range(count)]
    reports = [
        fit_layer(group, train.of_heads(index, count), heldout.of_heads(index, count), *rest)
        for index, group in enumerate(groups)
    ]
    codec.key_offset = torch.cat([group.key_offset for group in groups])
    metrics = dict(reports[0].metrics)
    for name in ("key_nmse", "value_nmse"):
        metrics[name] = [error for report in reports for error in report.metrics[name]]
    metrics["dead_key_rows"] = sum(report.metrics["dead_key_rows"] for report in reports)
    metrics["key_offset"] = ", ".join(dict.fromkeys(report.metrics["key_offset"] for report in reports))
    warnings = [f"value group {i}, {warning}" for i, report in enumerate(reports) for warning in report.warnings]
    return FitReport(metrics, tuple(warnings))


def coding_error(codec: Codec[Any], x: Tensor) -> Tensor:
    """The error of coding x [heads, tokens, head_dim], shaped like it."""
    return codec.decode(codec.encode(x.unsqueeze(0), None), None)[0] - x


def shares(error: Tensor, x: Tensor) -> list[float]:
    """Squared error of each head as a share of the energy of x, [heads, tokens, head_dim] both."""
    return [float(y) for y in error.square().sum((1, 2)) / x.square().sum((1, 2)).clamp_min(1e-30)]


def compare_with_scalar(what: str, bits: float, error: Tensor, train: Tensor, heldout: Tensor) -> list[str]:
    """A warning for each head, or one joint code, whose held-out error exceeds that of a scalar code of as many bits.

    `what` is keys or values; tensors are [heads, tokens, head_dim]; the scalar code has as many whole bits.
    """
    errors = shares(error, heldout)
    limits = scalar_nmse(train, heldout, min(int(bits), _MAX_SCALAR_BITS))
    heads = [f"{what} of head {head}" for head in range(len(errors))] if len(errors) > 1 else [what]
    return [
        f"{which}: held-out error {error:.3g}, more than the {limit:.3g} of a scalar code of {int(bits)} bits; "
        "calibrate on more varied text"
        for which, error, limit in zip(heads, errors, limits, strict=True)
        if not error <= max(limit, _NEGLIGIBLE)
    ]


def scalar_nmse(train: Tensor, heldout: Tensor, bits: int) -> list[float]:
    """Squared error as a share of the energy, of a scalar code per channel of x [heads, tokens, head_dim].

    Its 2^bits levels are the means of equally many training values.
    """
    ordered = train[:, :_ERROR_TOKENS].float().sort(dim=1).values
    x = heldout[:, :_ERROR_TOKENS].float()
    parts = ordered.tensor_split(min(2**bits, ordered.shape[1]), dim=1)
    best = reduce(torch.minimum, ((x - part.mean(1, keepdim=True)).square() for part in parts))
    return [float(e) for e in best.sum((1, 2)) / x.square().sum((1, 2)).clamp_min(1e-30)]


def oversized_books(key: CommVQKeyCodec) -> list[str]:
    """A warning for each head with codewords far larger than any key: the int8 codebook is coarse then."""
    limit = _OVERSIZE * key.norm_width**0.5
    weight = by_group(key.pair_weight, key.num_groups, 1)
    largest = (key.codebook_scale * weight * 127).amax((1, 2)).tolist()
    return [
        f"keys of head {head}: codewords reach {size:.3g} where normalised keys are {key.norm_width**0.5:.3g} at most; "
        "calibrate on more varied text"
        for head, size in enumerate(largest)
        if not size <= limit
    ]


def choose_offset(
    codec: CommVQKeyCodec, train: LayerSamples, heldout: LayerSamples, config: CommVQConfig, generator: torch.Generator
) -> tuple[str, Tensor]:
    """The constant part that is not coded, with the least held-out score error; each is tried by a fit of few stages.

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
