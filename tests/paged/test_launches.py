"""How many kernels a layer of a captured step launches, of Triton and PyTorch: what short contexts wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from factories import make_model
from parts import DEVICE
from test_paged_model import enabled
from torch.utils._python_dispatch import TorchDispatchMode

from kvcli.paged.batch import Batch
from kvcli.paged.model import PagedModel
from kvcli.paged.requests import ScheduledRequest

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(DEVICE != "cpu", reason="counts in Triton's interpreter")]


class Launches(TorchDispatchMode):
    """Counts operators that make numbers, and those of Triton."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
        if isinstance(out, torch.Tensor) and "empty" not in str(func):
            is_view = out.untyped_storage().data_ptr() in storages and not func._schema.is_mutable
            self.names += [] if is_view else [str(func)]
        return out


@contextmanager
def of_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The launches that find where tokens go, and those of each layer's RoPE and attention, of models made inside."""
    from triton.runtime.interpreter import InterpretedFunction

    layers, counted = list[list[str]](), list[Launches]()
    attend, launch = PagedModel._attend, InterpretedFunction.__getitem__
    of = Batch.of.__func__  # type: ignore[attr-defined]

    def layer(self: Any, call: Any) -> Any:
        with Launches() as mode:
            counted[:] = [mode]
            output = attend(self, call)
        layers.append(mode.names)
        return output

    def places(cls: Any, *args: Any, **named: Any) -> Batch:
        with Launches() as mode:
            counted[:] = [mode]
            batch: Batch = of(cls, *args, **named)
        layers.append(mode.names)
        return batch

    def launched(self: Any, grid: Any) -> Any:
        def run(*args: Any, **named: Any) -> None:
            before = [len(mode.names) for mode in counted]
            launch(self, grid)(*args, **named)
            for mode, count in zip(counted, before, strict=True):
                mode.names[count:] = [self.fn.__name__]  # not what the interpreter does

        return run

    with monkeypatch.context() as patch:
        patch.setattr(PagedModel, "_attend", layer)
        patch.setattr(Batch, "of", classmethod(places))
        patch.setattr(InterpretedFunction, "__getitem__", launched)
        yield layers


@pytest.mark.parametrize(("name", "most"), [("kivi-2", 11), ("klt", 15)])
def test_a_layer_of_a_step_launches_few_kernels(
    name: str, most: int, tiny_artifact: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcli.registry import get_method, parse_method

    method = get_method(parse_method(name)[0].name)
    how: Any = {"artifact": tiny_artifact(method)} if method.needs_artifact else {"name": name}
    model = make_model("llama")
    made = enabled(model, impl="fused", sink_length=4, residual_length=32, size=32, **how)
    with of_layers(monkeypatch) as layers, made as paged, torch.no_grad():
        paged.run([ScheduledRequest(list(range(3, 83)), 0, 0, [*range(4)], 1)])
        of = Batch.of.__func__  # type: ignore[attr-defined]
        captured = classmethod(lambda cls, *args, **named: of(cls, *args, **{**named, "null_page": paged.num_pages}))
        monkeypatch.setattr(Batch, "of", captured)
        for i in range(2):  # the first one makes tables
            layers.clear()
            paged.run([ScheduledRequest([5], 80 + i, 0, [*range(4)], 1)])
    assert len(layers) == 1 + model.config.num_hidden_layers
    assert "_place_kernel" in layers[0]
    assert len(layers[0]) <= 13, layers[0]
    for names in layers[2:]:  # what all layers share is found in the first
        assert len(names) == most, names
