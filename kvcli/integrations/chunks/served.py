"""The served model: settings of an engine's JSON; shapes, RoPE and codecs from config and artifact, no weights."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcli.artifact.choice import MethodChoice
from kvcli.commands.sizes import parse_size
from kvcli.contexts.chunks import ChunkStore
from kvcli.errors import ChunkError, ConfigError, UsageError, error_text, explain
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.integrations.skeleton import rope_of, skeleton
from kvcli.methods.config import BiasOffsetConfig, CacheConfig, SequenceOffsetConfig
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.method import Method
from kvcli.methods.per_layer import build_codecs
from kvcli.models.builtin_models import BUILTIN_MODELS, fetch_builtin
from kvcli.models.checkpoint import read_config
from kvcli.models.hub import download_config
from kvcli.progress import no_progress, say_nothing
from kvcli.registry import method_name
from kvcli.rope import NoRope, Rope
from kvcli.spec import ModelSpec

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


class ChunkSettings(BaseModel):
    """Which model is served, and how its chunks are coded, as engines take it in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="served model, for its config: a folder, a built-in name or OWNER/MODEL on the hub")
    revision: str = Field("", description="commit, tag or branch of a model on the hub")
    method: str = Field("", description="method that needs no artifact, with its bits")
    artifact: str = Field("", description="folder of an artifact, which says its method")
    recipe: str = Field("", description="file of a recipe, which says its method, artifact and settings")
    settings: dict[str, Any] = Field(default_factory=dict, description="settings of the method")
    exact_tokens: int = Field(1, ge=0, le=64, description="first tokens of every chunk that are kept as they are")
    device: str = Field("cpu", description="torch device that encodes and decodes")
    max_workers: int = Field(1, ge=1, le=64, description="threads that encode and decode")

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """The settings from plain values; ConfigError for unknown or missing names, and values out of range."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(f"kvcli's chunks: {explain(error, cls.model_fields)}") from error


class StoreSettings(ChunkSettings):
    """And in which store they are, for engines that leave that to kvcli."""

    model: str = Field("", description="served model; default: the engine's")
    folder: str = Field(description="store of the chunks, which engines may share")
    max_bytes: str = Field("64GiB", description="bound of the store; chunks that were not used are removed")

    def store(self) -> ChunkStore:
        """The store; UsageError: no size; ContextError, OSError: it cannot be written."""
        return ChunkStore(self.folder, parse_size(self.max_bytes) or 0)


class Served:
    """The model that a server serves, and the codecs of its chunks; `fitted`, those of all layers of an artifact.

    The `source` says which weights and artifact, as plain JSON values; the first `exact_tokens` of every chunk stay as
    they are; `identity` is a digest, of 16 bytes, of everything that codes depend on; `label`, the method and its bits.

    KvcliError: a method that needs what a chunk does not hold, or settings that do not fit the model's shapes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rope: Rope,
        method: Method,
        config: CacheConfig,
        fitted: list[LayerCodec] | None = None,
        source: Mapping[str, Any] | None = None,
        exact_tokens: int = 1,
        device: str = "cpu",
    ) -> None:
        self.spec, self.rope, self.method, self.exact_tokens = spec, rope, method, exact_tokens
        if device == "meta":
            raise ConfigError("device 'meta' holds no data; choose another, such as cpu or cuda")
        try:
            self.device = torch.zeros(1, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device '{device}' cannot be used: {error_text(error)[:200]}") from error
        if not isinstance(rope, NoRope):
            rope.module.to(self.device)
        self._config, self.label = config, method_name(method.name, config.model_dump())
        self._fitted = None if fitted is None else self._ready(fitted)
        self._parts: dict[tuple[int, int], list[LayerCodec]] = {}
        what = {
            "method": method.name,
            "config": config.model_dump(),
            "spec": spec.to_dict(),
            "rope": rope.frequencies(),
            "source": dict(source or {}),
            "exact_tokens": exact_tokens,
        }
        self.identity = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()[:16]
        if isinstance(config, BiasOffsetConfig) and config.key_offset == "bias":
            raise ConfigError(
                f"method '{method.name}' codes keys less the bias of the model's key projection, which is not in its "
                'config; say "settings": {"key_offset": "none"}, unless the projection has a bias'
            )
        if isinstance(config, SequenceOffsetConfig) and config.sequence_offset == "mean":
            raise ConfigError("a chunk does not know the first keys of its sequence; leave out sequence_offset")
        if any(codec.key.new_state(1, self.device) is not None for codec in self._whole):
            raise UsageError(f"method '{method.name}' computes a state from the prompt's queries, which no chunk has")

    @classmethod
    def load(cls, settings: ChunkSettings, model: str = "", of_flags: Any = None) -> Self:
        """Reads the model's config, and the artifact or the recipe, which are compared with its shapes alone.

        An engine's `model` is a default, as the `revision` in its record `of_flags` is, whose `hf_config` is used.

        KvcliError: a model, method, artifact or device that cannot be used, or that do not belong together.
        """
        name, named = settings.model or model, (settings.method, settings.artifact, settings.recipe, settings.settings)
        choice = MethodChoice.of(*named).for_pages()
        folder = Path(name).expanduser()
        if name in BUILTIN_MODELS:  # no other model is fetched as a whole
            folder = fetch_builtin(BUILTIN_MODELS[name], say_nothing, no_progress)
        if folder.is_dir():
            weights = _sample_of(folder)
        else:
            served = of_flags.revision if of_flags and name == model else None
            folder = download_config(name, settings.revision or served)
            weights = folder.name  # the commit
        model_config = of_flags.hf_config if of_flags else read_config(folder)
        source, spec, fitted = dict[str, Any](weights=weights), ModelSpec.from_config(model_config), None
        if choice.fitted is not None:
            fitted, source["artifact"] = choice.codecs(spec)[1], choice.fitted.metadata["files"]
        rope: Rope = NoRope(spec.rope.rotary_dim, torch.device("cpu"))
        if any(x.needs_rotations for x in fitted or build_codecs(choice.record, spec, choice.config)):
            rope = rope_of(skeleton(model_config))
        rest = settings.exact_tokens, settings.device
        return cls(spec, rope, choice.record, choice.config, fitted, source, *rest)

    def namer(self, **what: Any) -> Callable[[bytes], str]:
        """Names chunks by an engine's keys, and by `identity` and plain values: all that their bytes depend on."""
        prefix = hashlib.sha256(self.identity + json.dumps(what, sort_keys=True).encode()).digest()
        return lambda key: hashlib.sha256(prefix + key).hexdigest()[:40]

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the device the current one, where kernels are launched."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def codecs(self, layout: ChunkLayout, layers: Sequence[int] | None = None) -> list[LayerCodec]:
        """The codecs of these layers of a model; None: of as many of its first ones as a chunk's layout has.

        ChunkError: some of the model's heads only, or of its layers that nobody named, with an artifact, whose codecs
        are of all; or tokens that are no whole groups.
        """
        if layers is not None:
            every = self._whole if layout.num_kv_heads == self.spec.num_kv_heads else []
            codecs = [every[i] for i in layers] if every and layout.num_layers == len(layers) else []
        elif self._fitted is None:
            codecs = self._codecs_of_part(layout.num_layers, layout.num_kv_heads)
        else:
            same = (layout.num_layers, layout.num_kv_heads) == (self.spec.num_layers, self.spec.num_kv_heads)
            codecs = self._fitted if same else []
        if not codecs:
            raise ChunkError(
                f"a chunk has {layout.num_layers} layers and {layout.num_kv_heads} kv heads, but the artifact codes "
                f"{self.spec.num_layers} layers and {self.spec.num_kv_heads} kv heads together: serve without tensor "
                "and pipeline parallelism, or with a method that needs no artifact"
            )
        group = max(codec.tokens_per_group for codec in codecs)
        if layout.num_tokens % group or layout.num_tokens <= self.exact_tokens:
            raise ChunkError(
                f"a chunk has {layout.num_tokens} tokens; {self.method.name} needs a multiple of {group}, more than "
                f"the {self.exact_tokens} that are kept as they are"
            )
        return codecs

    @cached_property
    def _whole(self) -> list[LayerCodec]:
        """The codecs of all heads and layers."""
        return self._fitted or self._codecs_of_part(self.spec.num_layers, self.spec.num_kv_heads)

    def _codecs_of_part(self, num_layers: int, num_kv_heads: int) -> list[LayerCodec]:
        """Codecs of a method that is not fitted, for the layers and heads that a rank has."""
        if (num_layers, num_kv_heads) not in self._parts:
            num_heads = num_kv_heads * self.spec.num_kv_groups
            shape: dict[str, Any] = {"num_kv_heads": num_kv_heads, "num_heads": num_heads}
            if num_layers != self.spec.num_layers:
                shape |= {"num_layers": num_layers, "layer_indices": (), "unrotated": ()}
            part = replace(self.spec, **shape)
            try:
                codecs = build_codecs(self.method, part, self._config)
            except ConfigError as error:  # bits of each layer of the whole model
                raise ChunkError(str(error)) from error
            self._parts[num_layers, num_kv_heads] = self._ready(codecs)
        return self._parts[num_layers, num_kv_heads]

    def _ready(self, codecs: list[LayerCodec]) -> list[LayerCodec]:
        for codec in codecs:
            codec.to(self.device).eval()
            codec.use_kernels(self.device.type == "cuda")
        return codecs


def _sample_of(folder: Path) -> str:
    """A digest of the config, and of bytes from all parts of a checkpoint's files."""
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"")
    for path in sorted(x for kind in _WEIGHTS for x in folder.glob(kind)):
        if path.stat().st_size:
            data = np.memmap(path, np.uint8, "r")
            digest.update(data[:: len(data) // 4096 | 1].tobytes())
    return digest.hexdigest()
