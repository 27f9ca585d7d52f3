"""Kernels compiled side by side: what is called, how often, and in which order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kvcli.kernels import compiling

MODES = [pytest.param(True, marks=pytest.mark.skipif(not hasattr(triton, "AsyncCompileMode"), reason="Triton 3.5"))]


@pytest.mark.parametrize("launchers", [True, False])
@pytest.mark.parametrize("together", [*MODES, False])
def test_all_are_compiled_then_loaded_and_counted(
    together: bool, launchers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a Triton whose launchers are not built so: they are built where kernels are loaded."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    if not together:
        monkeypatch.delattr(triton, "AsyncCompileMode", raising=False)
    events: list[tuple[str, int]] = []
    shown: dict[str, list[int]] = {}

    @contextmanager
    def progress(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        done = shown[label] = [total, 0]

        def advance(count: int) -> None:
            done[1] += count

        yield advance

    class Kernel(SimpleNamespace):
        @property
        def run(self) -> None:
            events.append(("load", self.number))
            loaders.append(get_ident())

    class Driver:
        def launcher_cls(self, src: int, metadata: None) -> None:
            events.append(("build", src))

    loaders: list[int] = []
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver() if launchers else object(), raising=False)

    def variant(number: int) -> tuple[torch.device, Callable[[], Any]]:
        def launch() -> Any:
            mode = triton.runtime._async_compile.active_mode.get() if together else None
            if mode is not None:
                return mode.submit(number, lambda: events.append(("compile", number)), lambda kernel: None)
            if ("compile", number) not in events:
                events.append(("compile", number))
            return Kernel(number=number, src=number, metadata=None)

        return torch.device("cpu"), launch

    compiling._compile([variant(number) for number in range(5)], progress)
    assert sorted(events[:5]) == [("compile", number) for number in range(5)]
    assert sorted(events[5:-5]) == [("build", number) for number in range(5 * launchers)]
    assert events[-5:] == [("load", number) for number in range(5)]
    assert loaders == [get_ident()] * 5
    assert shown == {"compiling kernels": [5, 5], "loading kernels": [5, 5]}


def test_what_is_specialized_for() -> None:
    alike = {"is_constexpr": False, "do_not_specialize": False, "do_not_specialize_on_alignment": False}
    plain, constant = SimpleNamespace(**alike), SimpleNamespace(is_constexpr=True)
    any_value = SimpleNamespace(**{**alike, "do_not_specialize": True})
    anywhere = SimpleNamespace(**{**alike, "do_not_specialize_on_alignment": True})
    numbers = [compiling._specialized(plain, x) for x in (1, 2, 3, 16, 32, 2**31)]
    assert [numbers.index(x) for x in numbers] == [0, 1, 1, 3, 3, 5]
    assert compiling._specialized(any_value, 1) == compiling._specialized(any_value, 16)
    assert compiling._specialized(constant, 2) != compiling._specialized(constant, 3)
    x = torch.zeros(8)
    assert compiling._specialized(plain, x) == compiling._specialized(plain, x[4:]) == (torch.float32, True)
    assert compiling._specialized(plain, x[1:]) == (torch.float32, False)
    assert compiling._specialized(anywhere, x[1:]) == compiling._specialized(anywhere, x)
    assert compiling._specialized(plain, 0.5) == compiling._specialized(plain, 1.0)
