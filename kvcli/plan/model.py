"""What planning needs of a model: its config, found by name without weights, and the bytes that weights will take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from kvcli.bench.shapes import SHAPES, shape_config
from kvcli.builtin_models import BUILTIN_MODELS, copy_folder
from kvcli.checkpoint import plain_attention
from kvcli.errors import KvcliError, ModelError, UnsupportedModelError
from kvcli.models import find_config
from kvcli.plan.live_bytes import META, Peak, peak_bytes
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class PlannedModel:
    """A model that is not loaded.

    Attributes:
        name: what the user asked for.
        config: of transformers.
        dtype: that its weights will have.
        device: that it will be on.
    """

    name: str
    config: Any
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def spec(self) -> ModelSpec:
        """Shapes of its attention."""
        return ModelSpec.from_config(self.config)

    @cached_property
    def key_bias(self) -> bool:
        """Whether its key projections have a bias."""
        projections = (x for name, x in self._whole.named_modules() if name.rpartition(".")[2] == "k_proj")
        return any(getattr(x, "bias", None) is not None for x in projections)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of all weights, one that two layers share counted once."""
        return sum(weight.nbytes for weight in self._whole.parameters())

    @property
    def quantized(self) -> str:
        """How the checkpoint's weights are quantized, which `weights_bytes` does not know; empty if they are not."""
        settings = getattr(self.config, "quantization_config", None) or {}
        settings = settings if isinstance(settings, Mapping) else settings.to_dict()
        return str(settings.get("quant_method", "in some way")) if settings else ""

    @cached_property
    def _whole(self) -> nn.Module:
        """The model without numbers."""
        return self.empty()

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of the weights' files, which are mapped while they are read; of other dtypes, 16 bits are assumed."""
        stored = getattr(self.config, "dtype", None)
        itemsize = stored.itemsize if isinstance(stored, torch.dtype) else 2
        return self.weights_bytes * itemsize // self.dtype.itemsize

    def empty(self, num_layers: int | None = None) -> nn.Module:
        """The model on the `meta` device: shapes without numbers.

        Args:
            num_layers: as many layers of full attention, with the others before them; None: all layers of the model.

        Raises:
            UnsupportedModelError: a model that cannot be made with fewer layers.
        """
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config) if num_layers is None else self._shortened(num_layers)
        attention = plain_attention(config)
        with META:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=self.dtype, attn_implementation=attention)
        return model.eval()

    def _shortened(self, num_layers: int) -> Any:
        """The config of the model up to a layer of full attention, this one included."""
        config = self.config.get_text_config(decoder=True)
        values, depth, kept = config.to_dict(), config.num_hidden_layers, self.spec.in_model(num_layers - 1) + 1
        if kept < depth:
            values = {
                name: value[:kept] if isinstance(value, list) and len(value) == depth else value
                for name, value in values.items()
            }
            values["num_hidden_layers"] = kept
        try:
            return type(config).from_dict(values)
        except Exception as error:  # configs are checked by code of each type, which raises what it likes
            raise self._untraceable(error) from error

    def peak_bytes(self, run: Callable[[], object]) -> Peak:
        """As `kvcli.plan.live_bytes.peak_bytes`, of passes of `empty` models.

        Raises:
            UnsupportedModelError: a model that does not run without numbers.
        """
        try:
            return peak_bytes(run)
        except KvcliError:
            raise
        except Exception as error:  # code of all types of models, on a device that it was not written for
            raise self._untraceable(error) from error

    def _untraceable(self, error: Exception) -> UnsupportedModelError:
        reason = " ".join(str(error).split())
        return UnsupportedModelError(
            f"models of the type {self.config.model_type} cannot be planned, and perhaps not be compressed: {reason}"
        )


def model_config(name: str, base_config: str | None = None, revision: str | None = None) -> Any:
    """The transformers config of a model: named shapes need no file, other models their config.json only.

    Args:
        name: a shape of `kvcli bench`, a built-in model, a hub name, a folder or a .gguf file.
        base_config: for GGUF files, a hub name or folder whose config is used.
        revision: branch, tag or commit of a model on the hub.

    Raises:
        ModelError: no such model, or its config cannot be read.
        UnsupportedModelError: an architecture that kvcli does not compress.
    """
    builtin = BUILTIN_MODELS.get(name)
    if name in SHAPES and not (builtin and (copy_folder(builtin) / "config.json").is_file()):
        return shape_config(name)
    try:
        return find_config(name, base_config=base_config, revision=revision)
    except ModelError as error:
        raise type(error)(f"{error}; shapes that need no model: {', '.join(SHAPES)}") from error
