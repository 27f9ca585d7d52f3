"""Decoder layers compiled by `torch.compile` while decode steps run.

All layers share the code of one `forward`, so it is compiled once; weights are inputs of what is compiled. It breaks
at the cache's `update` and at the attention function, which run as they are: what is compiled is the model's own small
operations around them, such as norms, activations and residual sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvcli.seam.decoder import decoder_layers

BACKEND = "inductor"
"""What compiles, by the name that `torch.compile` knows it by."""

_RECOMPILE_LIMIT = 64
"""Variants of a function: batches, dtypes and models of one process."""


class CompiledLayers:
    """The layers of a model, compiled for the time of `active` blocks; the first one compiles."""

    def __init__(self, model: nn.Module, backend: str = BACKEND) -> None:
        self._layers: list[Any] = list(decoder_layers(model))
        self._compiled: list[Callable[..., Any]] = [torch.compile(x.forward, backend=backend) for x in self._layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the layers compiled, inside the block; the first pass raises CompileError if that cannot be."""
        from torch._dynamo import config, exc

        former = [vars(layer).get("forward") for layer in self._layers]
        for layer, compiled in zip(self._layers, self._compiled, strict=True):
            layer.forward = compiled
        try:
            # layers differ in their index, which must not make a variant of each; nothing may run uncompiled unnoticed
            with config.patch(
                allow_unspec_int_on_nn_module=True,
                recompile_limit=_RECOMPILE_LIMIT,
                fail_on_recompile_limit_hit=True,
                suppress_errors=False,
            ):
                yield
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            raise CompileError(error) from error
        finally:
            for layer, forward in zip(self._layers, former, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward


class CompileError(Exception):
    """Layers cannot be compiled, because of what `torch.compile` raised."""

    def __init__(self, cause: BaseException) -> None:
        reason = getattr(cause, "inner_exception", cause)
        lines = str(reason).strip().splitlines()
        super().__init__(": ".join(["layers are not compiled", type(reason).__name__, *lines[:1]]))
