"""The attention of all layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from kvcli.rope import Rope
from kvcli.seam.layer import LayerAttention
from kvcli.seam.rotary import RotarySource
from kvcli.spec import ModelSpec

ATTENTION_NAME = "kvcli"
"""The attention implementation of a model that is attached."""

SHARED_CONFIG = "another model that has the same config object is attached; detach it, or load a copy of the config"


@dataclass(frozen=True)
class ModelAttention:
    """The attention of the layers of a model.

    Attributes:
        layers: those of full attention, in their order.
        modules: all attention modules that go through transformers' attention interface, in the order of a pass.
        source: the rotary module whose rotation we apply; None if there is none.
        rope: the rotation of keys.
        spec: shapes of the layers.
        implementation: the attention implementation that the model was loaded with.
        notes: one line each about what is not as usual.
    """

    layers: tuple[LayerAttention, ...]
    modules: tuple[nn.Module, ...]
    source: RotarySource | None
    rope: Rope
    spec: ModelSpec
    implementation: str | None
    notes: tuple[str, ...] = ()

    def layer_of(self, module: nn.Module) -> LayerAttention | None:
        """The attention of a module, if it is full attention."""
        return self._by_module.get(id(module))

    @property
    def rotating_themselves(self) -> list[nn.Module]:
        """Modules that need what the rotary module returns."""
        if self.source is None:
            return []
        layers = ((module, self.layer_of(module)) for module in self.modules)
        return [module for module, layer in layers if layer is None or layer.own_rotation]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_module", {id(layer.module): layer for layer in self.layers})

    _by_module: dict[int, LayerAttention] = field(init=False, repr=False, compare=False)
