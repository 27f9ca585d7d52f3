"""What an engine holds on several GPUs: pages of codes beside weights, both divided by tensor parallelism."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from kvcli.cache.ranges import StepRanges
from kvcli.errors import UsageError
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.per_layer import build_codecs
from kvcli.paged.attention import Page
from kvcli.paged.pages import LayerEncoder, check_codecs
from kvcli.paged.rings import RESIDUAL_LENGTH
from kvcli.plan.memory import MethodPlan, pass_bound
from kvcli.registry import BASELINE
from kvcli.rope import unrotate

_PAGE_TOKENS = 512
"""As docs/engines.md sets them."""

_PASS_TOKENS = 8192
"""That a pass of an engine has at most."""

TIER: dict[str, Any] = json.loads(Path(__file__).with_name("tier.json").read_text(encoding="utf-8"))
"""Seconds of computing tokens, and of decoding chunks of a tier, as they were measured, with their source."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of which each serves requests of its own, and divides every layer between its GPUs."""

    nodes: int
    gpus: int
    memory_bytes: int  # of a GPU, that an engine may use

    def holds(self, plan: MethodPlan, length: int, requests: int | None = None) -> dict[str, int | None] | None:
        """`tokens` in the pages of all nodes, and `requests` of so many tokens at a time; None: no codes in pages.

        With `requests`, also the `nodes` that hold these, None if no node holds one. Passes of the engine are counted
        by `pass_bound`, which is more than they take.

        UsageError: layers of other kinds, or heads that do not divide between the GPUs.
        """
        each = self._bytes(plan)
        if each is None:
            return None
        of_token, of_request = each
        passes = pass_bound(plan.planned, _PASS_TOKENS, _PASS_TOKENS, 1, fused=True)
        divided = plan.planned.weights_bytes + plan.memory(1, 1).artifact_bytes
        left = max(0, self.memory_bytes - -(-divided // self.gpus) - passes)
        of_node = left // (-(-length // _PAGE_TOKENS) * _PAGE_TOKENS * of_token + of_request)
        held: dict[str, int | None] = {"tokens": self.nodes * (left // (_PAGE_TOKENS * of_token)) * _PAGE_TOKENS}
        held["requests"] = self.nodes * of_node
        if requests is not None:
            held["nodes"] = -(-requests // of_node) if of_node else None
        return held

    def tier(self, plan: MethodPlan) -> dict[str, int | None]:
        """Bytes of a token in a tier, None without codes; from how many MB per second on loading beats computing."""
        planned, decoded, speed = plan.planned, TIER["decoded"].get(plan.name), None
        if any(codec.new_state(1, torch.device("cpu")) is not None for codec in plan.codecs):
            return {"tier_bytes": None, "from_MB_per_s": None}
        each = float(planned.spec.fp16_bytes_per_token())
        if plan.method.name != BASELINE:  # with a token that is kept as it is
            each = each / TIER["chunk_tokens"] + sum(sum(_bits(codec)) for codec in plan.codecs) / 8
        if decoded and self.gpus == 1 and planned.weights_bytes == TIER["weights_bytes"]:
            computing, decoding = (x["seconds"] / x["tokens"] for x in (TIER["computed"], decoded))
            speed = round(each / (computing - decoding) / 1e6)
        return {"tier_bytes": ceil(each), "from_MB_per_s": speed}

    def _bytes(self, plan: MethodPlan) -> tuple[int, int] | None:
        """Bytes per token in pages, and per request beside them, on each GPU."""
        spec, dtype, ranks = plan.planned.spec, plan.planned.dtype, min(self.gpus, plan.planned.spec.num_kv_heads)
        if spec.other_layers:
            raise UsageError("engines are planned for models all of whose layers attend to the whole context")
        if spec.num_kv_heads % ranks or self.gpus % ranks or spec.num_heads % self.gpus:
            heads = f"{spec.num_heads} heads and {spec.num_kv_heads} kv heads"
            raise UsageError(f"{heads} do not divide between {self.gpus} GPUs")
        if plan.method.name == BASELINE:  # the engine's own cache
            return spec.fp16_bytes_per_token() // ranks, 0
        try:
            codecs = _codecs(plan, ranks)
            check_codecs(plan.name, codecs)
        except UsageError:
            return None
        sizes, ranges = dict[Any, int](), StepRanges(2, torch.device("cpu"))
        for codec in codecs:
            if (key := _bits(codec)) not in sizes:
                encoder = LayerEncoder(codec, 0, dtype, ranges, unrotate)
                sizes[key] = Page(encoder, dtype, _PAGE_TOKENS, plan.config.sink_length).token_bytes
        recent = RESIDUAL_LENGTH + codecs[0].key.tokens_per_group - 1
        return sum(sizes[_bits(codec)] for codec in codecs), recent * spec.fp16_bytes_per_token() // ranks


def _codecs(plan: MethodPlan, ranks: int) -> Sequence[LayerCodec]:
    """Those of a GPU, fitted as tensor parallelism needs it; UsageError: codes are of the heads of other GPUs, too."""
    spec, config = plan.planned.spec, plan.config
    if ranks == 1:
        return plan.codecs
    if not plan.method.needs_artifact:
        spec = replace(spec, num_heads=spec.num_heads // ranks, num_kv_heads=spec.num_kv_heads // ranks)
        return build_codecs(plan.method, spec, config)
    groups = {name: ranks for name in ("value_groups", "head_groups") if hasattr(config, name)}
    codecs = build_codecs(plan.method, spec, type(config)(**{**dict(config), **groups}))
    return [codec.of_rank(0, ranks) for codec in codecs]


def _bits(codec: LayerCodec) -> tuple[float, float]:
    return codec.key.bits_per_token(), codec.value.bits_per_token()
