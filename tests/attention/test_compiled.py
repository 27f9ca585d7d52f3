"""Decode steps with compiled layers make the tokens of ordinary steps, and leave the model as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from factories import make_model
from torch._dynamo.testing import CompileCounter

import kvcli
from kvcli.artifact.choice import MethodChoice
from kvcli.attention.generation import SamplingConfig
from kvcli.bench import fixed_length
from kvcli.bench.fixed_length import FIXED_LENGTH, replay_step, with_fixed_length
from kvcli.bench.model import ModelRun, attached, run_model
from kvcli.errors import UsageError
from kvcli.registry import parse_method
from kvcli.seam.versions import with_cache

SETTINGS = {"residual_length": 16, "group_size": 16}
SAMPLING = SamplingConfig(24)
IDS = torch.randint(3, 97, (3, 40), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(40) >= torch.tensor([0, 5, 11])[:, None]).long()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, method: str, compiler: Any) -> tuple[str | None, list[torch.Tensor]]:
    """The note of compiled steps, whose tokens are those of ordinary ones; and logits of a token after either."""
    settings = {key: SETTINGS[key] for key in parse_method(method)[0].config_cls.model_fields.keys() & SETTINGS}
    mask = torch.nn.functional.pad(MASK, (0, SAMPLING.max_new_tokens), value=1)
    rest = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
    with kvcli.attach(model, method, **settings) as session:
        expected = session.generate(IDS, MASK, sampling=SAMPLING, mode="steps")
        made = session.generate(IDS, MASK, sampling=SAMPLING, compile_layers=compiler)
        assert torch.equal(made.sequences, expected.sequences)
        assert made.compiled == (made.note is None)
        return made.note, [model(IDS[:, :1], **with_cache(x.cache), **rest).logits for x in (made, expected)]


@pytest.mark.parametrize(("family", "num_layers"), [("llama", 12), ("qwen2", 3), ("qwen3", 3)])
def test_compiled_steps_make_the_same_tokens(family: str, num_layers: int) -> None:
    """Twelve layers are more than the variants of a function that `torch.compile` would make by default."""
    model, counter = make_model(family, num_hidden_layers=num_layers), CompileCounter()
    for method in ("kivi-2", "fp16", "squat-pre-2", "qjl") if family == "qwen2" else ("kivi-2", "kivi-2"):
        assert compiled(model, method, counter)[0] is None
        # norm; projections, of layer 0 and of any; output projection; residual sum, norm, MLP: shared by all methods
        assert counter.frame_count == 5
        assert not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_steps_compiled_by_inductor() -> None:
    assert compiled(make_model("llama", num_hidden_layers=2), "kivi-2", True)[0] is None


@pytest.mark.parametrize("graphs_that_work", [0, 1, 3])
def test_layers_that_cannot_be_compiled_run_as_they_are(graphs_that_work: int) -> None:
    """Also where a part of a layer was compiled, and the step had written to the cache."""
    model, seen = make_model("llama"), []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(1)
        if len(seen) > graphs_that_work:
            raise OSError("no compiler\nhere is why")
        return graph.forward

    former = model.model.layers[1].forward
    model.model.layers[1].forward = former
    note, follow = compiled(model, "kivi-2", backend)
    assert str(note).startswith("layers are not compiled: ")
    assert "no compiler" in str(note)
    assert "why" not in str(note)
    assert len(seen) == graphs_that_work + 1
    assert torch.equal(*follow)
    assert vars(model.model.layers[1])["forward"] is former
    assert "forward" not in vars(model.model.layers[0])


def test_other_errors_are_raised_and_the_model_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcli.attention import session as module

    model = make_model("llama")
    with kvcli.attach(model, "kivi-2", **SETTINGS) as session:
        real, calls = module.attend_layer, []

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 8:  # in the second step
                raise KeyboardInterrupt
            return real(*args)

        monkeypatch.setattr(module, "attend_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(IDS, MASK, sampling=SAMPLING, compile_layers="eager")
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_passes_are_not_compiled() -> None:
    with (
        kvcli.attach(make_model("llama"), "rtn") as session,
        pytest.raises(UsageError, match="graphs or steps, not passes"),
    ):
        session.generate(IDS, MASK, mode="passes", compile_layers=True)


def test_compiled_rows_say_so() -> None:
    model = make_model("llama")
    with attached(model, MethodChoice("kivi-2").plus(SETTINGS), "auto", 0) as new_cache:
        run = run_model(model, new_cache, IDS, 30, None, backend="eager")
    assert (run.how, run.note) == ("steps, compiled", None)


def test_the_baseline_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fastest variant counts; one variant of its functions serves all layers."""
    model, counter, step = make_model("llama", num_hidden_layers=12), CompileCounter(), []

    def record(call: Any) -> Any:
        call()
        step.append(1)
        return type("Graph", (), {"replay": lambda self: call()})(), None

    monkeypatch.setattr(fixed_length, "record_graph", record)
    seconds, _, note = replay_step(model, 3, 20, 2, 3, counter)  # type: ignore[arg-type]
    assert (len(seconds), note) == (3, None)
    assert counter.frame_count == 5
    assert not any("forward" in vars(layer) for layer in model.model.layers)

    answers = {None: ([2.0], 77, None), "eager": ([1.0], 77, None)}
    monkeypatch.setattr(fixed_length, "replay_step", lambda *arguments: answers[arguments[-1]])
    on_gpu = type("Model", (), {"device": torch.device("cuda")})()
    runs = [ModelRun(1.0, 1.0, 3.0, 1, None, None)]
    (run,) = with_fixed_length(on_gpu, runs, 1, 20, 11, "eager")
    assert (run.how, run.decode_s) == (f"{FIXED_LENGTH}, compiled", 1.0)
    answers["eager"] = ([2.5], 77, None)
    (run,) = with_fixed_length(on_gpu, runs, 1, 20, 11, "eager")
    assert (run.how, run.decode_s) == (FIXED_LENGTH, 2.0)
