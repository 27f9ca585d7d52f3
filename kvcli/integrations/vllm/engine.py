"""What the layers of a model that vLLM has loaded have in common: RoPE, kernels, codecs, and the numbers of a pass."""

from functools import cache, partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionMetadata

from kvcli.attention.backend import choose_backend
from kvcli.cache.ranges import StepRanges
from kvcli.errors import ModelError, UsageError
from kvcli.integrations.vllm.environment import ARTIFACT, METHOD, choice_of_environment
from kvcli.integrations.vllm.model import codecs_of
from kvcli.paged.attention import Page
from kvcli.paged.pages import LayerEncoder
from kvcli.paged.rings import RESIDUAL_LENGTH, ResidualRings
from kvcli.spec import ModelSpec

_SPARE_RINGS = 16
"""Rings of requests that have just finished, which vLLM does not tell."""

_CONNECTORS = (None, "OffloadingConnector", "ExampleConnector")
"""Connectors of vLLM that move whole pages."""

_CHECKED = 64
"""Passes between two looks at the largest numbers."""


class EngineState:
    """What the layers of a loaded model have in common: RoPE, kernels, and the largest numbers of a pass."""

    def __init__(self, config: VllmConfig) -> None:
        check_engine(config)
        choice = choice_of_environment()
        if choice is None:
            raise UsageError(f"this backend stores codes: set {METHOD} or {ARTIFACT}")
        model, loading = config.model_config, config.load_config
        ranks = config.parallel_config.tensor_parallel_size

        def weights() -> Path:
            folder = Path(model.model)
            if folder.is_dir():
                return folder
            try:
                options = {"revision": model.revision, "cache_dir": loading.download_dir}
                return Path(snapshot_download(model.model, local_files_only=True, **options))
            except (OSError, ValueError) as error:
                raise ModelError(
                    f"the checkpoint of '{model.model}' is no folder and not in the hub's cache"
                ) from error

        dummy = loading.load_format == "dummy"
        exact, codecs, self.rope = codecs_of(model.hf_text_config, choice, ranks, None if dummy else weights)
        device = torch.empty(0, device=config.device_config.device_type).device
        self.ranges = StepRanges(2 * len(codecs), device)
        if hasattr(self.rope, "module"):
            self.rope.module.to(device)
        self.backend = choose_backend(choice.record, codecs, "auto", device)
        spec = ModelSpec.from_config(model.hf_text_config)
        self.encoders = dict[int, LayerEncoder]()  # by the layer's number in the model
        for layer_idx, codec in enumerate(codecs):
            codec.to(device).eval()
            codec.use_kernels(self.backend.impl == "fused")
            in_model = spec.in_model(layer_idx)
            self.encoders[in_model] = LayerEncoder(codec, in_model, model.dtype, self.ranges, self.backend.unrotate)

        self.group, self.sinks = codecs[0].key.tokens_per_group, exact.sink_length
        if config.kv_transfer_config is not None:
            check_transfer(choice.method, self.group)
        rings = config.scheduler_config.max_num_seqs + _SPARE_RINGS
        residual_length = choice.named.get("residual_length", RESIDUAL_LENGTH)
        self.make_rings = partial(ResidualRings, rings, residual_length, self.group, device)
        self.rings = list[ResidualRings]()
        self.tokens: AttentionMetadata | None = None  # of the last pass
        self.num_heads = codecs[0].key.spec.num_heads
        self.page = cache(lambda encoder, size: Page(encoder, model.dtype, size, self.sinks))
        self._passes = 0

    def pages(self, size: int) -> list[Page]:
        """How all layers lay out pages of so many tokens."""
        return [self.page(encoder, size) for encoder in self.encoders.values()]

    def check(self) -> None:
        """CacheError: numbers of the passes so far exceed the range of the codes, or exact keys are lost."""
        self.ranges.check()
        for rings in self.rings:
            rings.check()

    def check_sometimes(self) -> None:
        """`check`, which waits for the GPU, before every `_CHECKED`-th pass; prompts are looked at after each."""
        self._passes += 1
        if self._passes % _CHECKED == 0:
            self.check()


_made: list[tuple[VllmConfig, EngineState]] = []
"""The last engine of this process, which has one at a time."""


def engine_state(config: VllmConfig) -> EngineState:
    """Those of an engine, made once for all of its layers."""
    if not _made or _made[0][0] is not config:
        # vLLM loads weights in its own dtype and on the GPU by default, which codecs are made without
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            _made[:] = [(config, EngineState(config))]
    return _made[0][1]


def check_transfer(method: str, group: int) -> None:
    """UsageError: pages of a method cannot leave the device and come back."""
    if group > 1:
        raise UsageError(
            f"{method} encodes {group} tokens together, and a request that pages come back to can begin within them: "
            "choose a method that encodes tokens independently, or omit kv_transfer_config"
        )


def check_engine(config: VllmConfig) -> None:
    """UsageError: the engine has a feature that was not tried with codes in pages."""
    parallel, cache, transfer = config.parallel_config, config.cache_config, config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    for what, on in {
        "speculative decoding": config.speculative_config is not None,
        f"transfer of pages by {connector}": connector not in _CONNECTORS,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        f"kv_cache_dtype '{cache.cache_dtype}'": cache.cache_dtype != "auto",
    }.items():
        if on:
            raise UsageError(f"{what} and codes in pages do not go together")
