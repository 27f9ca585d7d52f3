"""Tables of CommVQ's paper (arXiv 2506.18879, appendix A.4 and A.5) about coding errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcli.methods.base import Codec
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit import coding_error
from kvcli.methods.commvq.fit_keys import fit_keys
from kvcli.methods.commvq.fit_values import fit_values_fast, set_metric
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.scalar.codec import PerTokenValue
from research.paper_tables import LayerInputs, PaperTable, Row

_PAPER_PAIRS = 64
_GROUP = 32
_TABLE_9 = ((8, 2, 1, 0.2699), (16, 4, 1, 0.2011), (32, 16, 1, 0.1265), (64, 64, 1, 0.0906))
_TABLE_10 = ((8, 2, 8, 0.0798), (16, 4, 8, 0.0790), (32, 16, 8, 0.0254), (64, 64, 11, 0.0095))
_FIGURE_4 = tuple((64, 64, stages, None) for stages in (1, 2, 3, 5, 8, 11, 15, 18, 21))
_TABLE_11 = {("asymmetric", 2): 0.00030, ("commvq", 2): 0.00014, ("asymmetric", 1): 0.00380, ("commvq", 1): 0.00027}


def key_rows(inputs: LayerInputs, shapes: Sequence[tuple[int, int, int, float | None]]) -> Iterator[Row]:
    """Errors of CommVQ's keys by pairs per group, codebook rows and stages; unweighted, with one norm per token.

    Args:
        inputs: samples.
        shapes: g of a head with 64 pairs (scaled to the model's head), N, R and the paper's error.
    """
    spec, keys = inputs.spec, inputs.heldout.k
    variance = (keys - keys.mean(1, keepdim=True)).square().mean()
    full: dict[tuple[int, int], CommVQKeyCodec] = {}
    for group, size, stages, paper in shapes:
        pairs = max(1, group * spec.head_dim // 2 // _PAPER_PAIRS)
        most = max(count for g, n, count, _ in shapes if (g, n) == (group, size))
        if (group, size) not in full:
            full[group, size] = _fitted_keys(inputs, pairs, size, most)
        codec = _first_stages(full[group, size], stages)
        error = coding_error(codec, keys).square().mean()
        bits = stages * codec.config.bits_per_code / 2 / pairs
        share = float(error / variance)
        yield {"g": pairs, "N": size, "R": stages, "bits": bits, "mse": float(error), "nmse": share, "paper": paper}


def _fitted_keys(inputs: LayerInputs, pairs: int, size: int, stages: int) -> CommVQKeyCodec:
    config = CommVQConfig(pairs_per_group=pairs, codebook_size=size, num_residuals=stages).resolve(inputs.spec)
    codec = CommVQKeyCodec(inputs.spec, config).to(inputs.train.positions.device)
    fit_keys(codec, inputs.train.keys, config, torch.Generator().manual_seed(inputs.seed))
    return codec


def _first_stages(codec: CommVQKeyCodec, stages: int) -> CommVQKeyCodec:
    """The same codec with its first stages alone: stages are fitted one after another."""
    config = codec.config.model_copy(update={"num_residuals": stages})
    first = CommVQKeyCodec(codec.spec, config).to(codec.codebook.device)
    first.codebook.copy_(codec.codebook[:, :, :stages])
    first.codebook_scale.copy_(codec.codebook_scale)
    first.pair_weight.copy_(codec.pair_weight)
    return first


def value_rows(inputs: LayerInputs) -> Iterator[Row]:
    """Errors of values by asymmetric quantization per token (KIVI) and by CommVQ, at 2 and 1 bits."""
    spec, values = inputs.spec, inputs.heldout.v
    energy = values.square().mean()
    for (name, bits), paper in _TABLE_11.items():
        codec: Codec[Any]
        if name == "commvq":
            codec = fitted = CommVQValueCodec(spec, CommVQConfig(bits=bits).resolve(spec)).to(values.device)
            set_metric(fitted, inputs.train.values, None)
            fit_values_fast(fitted, inputs.train.values, fitted.config.value_iterations)
        else:
            codec = PerTokenValue(spec, 2 if bits == 2 else 1, _GROUP)
        error = coding_error(codec, values).square().mean()
        stored = codec.bits_per_token() / spec.kv_dim
        share = float(error / energy)
        yield {"method": name, "bits": bits, "stored": stored, "mse": float(error), "nmse": share, "paper": paper}


_MODEL = "MSE of Llama-3.1-8B's first layer"
TABLES = {
    "commvq-9": PaperTable("CommVQ, Table 9: keys with one stage", _MODEL, lambda x: key_rows(x, _TABLE_9)),
    "commvq-10": PaperTable(
        "CommVQ, Table 10: keys by group, codebook and stages", _MODEL, lambda x: key_rows(x, _TABLE_10)
    ),
    "commvq-figure-4": PaperTable(
        "CommVQ, Figure 4: keys by stages", "a curve without numbers", lambda x: key_rows(x, _FIGURE_4)
    ),
    "commvq-11": PaperTable("CommVQ, Table 11: values", _MODEL, value_rows),
}
