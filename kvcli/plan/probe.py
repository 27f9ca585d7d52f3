"""How fast a model reads text, from some seconds of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvcli.calibrate.config import CollectConfig
from kvcli.models import LoadedModel
from kvcli.seam.decoder import backbone

_SECONDS = 3.0
_PROBED_TOKENS = 1024
_GRADIENT_PASSES = 4
"""What gradients of a sequence take, in forward passes: back through layers, and attention once more."""


@dataclass(frozen=True)
class Probe:
    """The rate of forward passes without a cache.

    Attributes:
        tokens_per_s: as measured.
        loaded: the model.
    """

    tokens_per_s: float
    loaded: LoadedModel

    def calibration_seconds(self, config: CollectConfig) -> float:
        """About how long a recording takes; a pass ends after the last layer of its window."""
        spec, tokens = self.loaded.spec, config.num_sequences * config.seq_len
        passes = sum(stop / spec.num_layers for _, stop in config.windows(spec))
        return (tokens * passes + _GRADIENT_PASSES * config.fisher_tokens) / self.tokens_per_s

    def prompt_seconds(self, tokens: int) -> float:
        """About how long a prompt takes, encoding left out; from some thousand tokens on, attention takes longer."""
        return tokens / self.tokens_per_s


@torch.inference_mode()
def probe_model(loaded: LoadedModel, seq_len: int) -> Probe:
    """Times forward passes for a few seconds.

    Args:
        loaded: the model.
        seq_len: tokens of a sequence; longer ones than 1024 are cut.
    """
    device, length = loaded.model.device, min(seq_len, _PROBED_TOKENS)
    ids = torch.arange(length, device=device).remainder(loaded.spec.vocab_size).unsqueeze(0)

    def pass_seconds() -> float:
        started = time.perf_counter()
        backbone(loaded.model)(input_ids=ids, use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    pass_seconds()  # the first pass compiles and allocates
    seconds: list[float] = []
    while not seconds or sum(seconds) < _SECONDS:
        seconds.append(pass_seconds())
    return Probe(length * len(seconds) / sum(seconds), loaded)
