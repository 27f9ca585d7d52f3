"""Attaching a method to a model: the session that makes caches and attends over them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from kvcli.artifact import Artifact
from kvcli.attention.forward import ForwardPass
from kvcli.attention.layer import Forms, attend_layer
from kvcli.attention.reference import attend_exact, reference_attend, take_in, unrotate
from kvcli.cache.compressed import CompressedCache, CompressedLayer
from kvcli.errors import CacheError, ConfigError, UnsupportedModelError, UsageError
from kvcli.kernels.launch import check_device, has_triton
from kvcli.methods.base import LayerCodec
from kvcli.methods.config import CacheConfig, first_error
from kvcli.methods.encoded import AttendCodes
from kvcli.methods.method import Method
from kvcli.models import fingerprint
from kvcli.registry import parse_method
from kvcli.seam import ForwardContext, Seam, exact_attention
from kvcli.spec import ModelSpec


class Session:
    """A model attached to a method; made by `attach`, ended by `detach` or by leaving the `with` block."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        method: Method,
        config: CacheConfig,
        codecs: list[LayerCodec],
        impl: str,
    ) -> None:
        self.model, self.spec, self.method, self.config, self.codecs = model, spec, method, config, codecs
        device = next(model.parameters()).device
        impl = choose_impl(method, impl, device)
        self._forms = attend_forms(method, impl)
        for codec in codecs:
            codec.use_kernels(impl == "fused")
        self._seam = Seam(model, self._attend)
        self._seam.open()

    def new_cache(self) -> CompressedCache:
        """An empty cache, to be passed to the model or to `generate` as `past_key_values`."""
        return CompressedCache(self.spec, self.method, self.config, self.codecs, self._seam)

    def detach(self) -> None:
        """Restores the model exactly; detaching twice is harmless."""
        self._seam.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def _attend(
        self,
        context: ForwardContext,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        mask: Tensor | None,
        scaling: float,
    ) -> Tensor:
        if isinstance(key, CompressedLayer):
            with _current_device(query):
                return attend_layer(key, query, _forward_pass(context, key, query, mask), self._forms, scaling)
        if key.shape[2] != query.shape[2]:
            raise CacheError("while a model is attached, pass past_key_values=session.new_cache() to it")
        rotate = context.rotation.apply
        return exact_attention(rotate(query), rotate(key), value, mask, scaling)


def attach(
    model: nn.Module, method: str, *, artifact: str | Path | Artifact | None = None, impl: str = "auto", **config: Any
) -> Session:
    """Attaches a compression method to a transformers model.

    Args:
        model: a causal language model of a supported family.
        method: name of a method, with or without bits (`kivi`, `kivi-2`); see `kvcli methods`.
        artifact: for methods that are fitted, the artifact or its folder.
        impl: form of attention over the codes, and of encoding: `auto` (kernels on a GPU, PyTorch elsewhere),
            `reference`, `fused`, or another form the method has.
        config: settings of the method; with an artifact, only those of the cache (`sink_length`, `residual_length`,
            `flush_block`) may differ from the artifact's.

    Returns:
        A session; use it as a context manager or call `detach`.

    Raises:
        UsageError: unknown method or form, or a missing artifact.
        ConfigError: settings that do not exist or do not fit.
        ArtifactError: an artifact that cannot be used with this model.
        UnsupportedModelError: an architecture kvcli does not compress, or layers on several devices.
    """
    record, from_bits = parse_method(method)
    config = {**from_bits, **config}
    spec = ModelSpec.from_config(model.config)
    if isinstance(artifact, (str, Path)):
        artifact = Artifact.load(artifact)
    if record.needs_artifact and artifact is None:
        raise UsageError(
            f"method '{method}' needs an artifact; train one with 'kvcli train-codebook' and 'kvcli export'"
        )
    if artifact is None:
        settings = make_config(record, config)
        codecs = build_codecs(record, spec, settings)
    else:
        artifact.check_model(spec, fingerprint(model, spec), record.name)
        settings = artifact.config_with(config)
        codecs = artifact.build_codecs(settings)
    device = _device_of_layers(model, spec.num_layers)
    for codec in codecs:
        codec.to(device).eval()
    return Session(model, spec, record, settings, codecs, impl)


def build_codecs(method: Method, spec: ModelSpec, config: CacheConfig) -> list[LayerCodec]:
    """The codecs of all layers of a method that is not fitted.

    Raises:
        ConfigError: settings that do not fit the model's shapes.
    """
    try:
        return [method.build(spec, config, layer_idx) for layer_idx in range(spec.num_layers)]
    except ValueError as error:
        raise ConfigError(f"{method.name}: {error}") from error


def make_config(method: Method, values: dict[str, Any]) -> CacheConfig:
    """A method's settings from plain values.

    Raises:
        ConfigError: unknown names or values out of range.
    """
    try:
        return method.config_cls(**values)
    except ValidationError as error:
        raise ConfigError(f"{method.name}: {first_error(error)}") from error


def choose_impl(method: Method, impl: str, device: torch.device) -> str:
    """What `auto` stands for: Triton kernels on a GPU, else the PyTorch reference.

    Raises:
        UsageError: no such implementation, or kernels that cannot run on the device.
    """
    if impl == "auto":
        return "fused" if device.type == "cuda" and has_triton() else "reference"
    if impl not in ("reference", "fused"):
        raise UsageError(f"there is no implementation '{impl}'; choose one of auto, reference, fused")
    if impl == "fused":
        check_device(device)
    return impl


def attend_forms(method: Method, impl: str) -> Forms:
    """How attention is computed, for an implementation that `choose_impl` returned."""
    if impl == "reference":
        return Forms(reference_attend, attend_exact, take_in, unrotate)
    from kvcli.attention.kernels import attend_exact_fused, decoded_attend, few_queries
    from kvcli.attention.rotation_kernels import take_in_fused, unrotate_fused

    codes: AttendCodes = decoded_attend
    if method.attend_kernels is not None:
        codes = few_queries(import_module(method.attend_kernels).fused_attend)
    return Forms(codes, attend_exact_fused, take_in_fused, unrotate_fused)


def _current_device(x: Tensor) -> AbstractContextManager[Any]:
    """Makes a tensor's GPU the current one: Triton launches there, whatever its arguments are on."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def _device_of_layers(model: nn.Module, num_layers: int) -> torch.device:
    """The device that all layers' keys are made on."""
    ends = tuple(f"layers.{layer_idx}.self_attn.k_proj.weight" for layer_idx in range(num_layers))
    devices = {parameter.device for name, parameter in model.named_parameters() if name.endswith(ends)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(f"the model's layers are on several devices ({names}); kvcli needs them on one")
    return devices.pop()


def _forward_pass(context: ForwardContext, layer: CompressedLayer, query: Tensor, mask: Tensor | None) -> ForwardPass:
    """This forward pass over the layer's cache, begun by the first layer and shared by all."""
    name = f"pass-{id(layer.timeline)}"
    if name not in context.shared:
        step = layer.timeline.begin(query.shape[0], query.shape[2], context.positions, mask)
        context.shared[name] = ForwardPass(layer.timeline, step, context.rotation, mask)
    now: ForwardPass = context.shared[name]
    return now
