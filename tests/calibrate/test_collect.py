"""What calibration records: exactly the model's own q, k and v, in any windows, and after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import load, make_model

from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.errors import SamplesError

SEQUENCES = torch.randint(3, 97, (5, 12), generator=torch.Generator().manual_seed(0))


def projections(model: Any, layer_idx: int) -> dict[str, torch.Tensor]:
    """q, k and v of a layer as its own modules make them, [heads, tokens, head_dim]."""
    actual: dict[str, torch.Tensor] = {}
    attention = model.model.layers[layer_idx].self_attn
    # where a family normalises q and k per head, that comes before RoPE too
    names = {"q": "q_norm", "k": "k_norm"} if hasattr(attention, "q_norm") else {"q": "q_proj", "k": "k_proj"}
    hooks = []
    for kind, name in {**names, "v": "v_proj"}.items():

        def keep(module: Any, inputs: Any, output: torch.Tensor, kind: str = kind) -> None:
            actual[kind] = output.reshape(-1, output.numel() // SEQUENCES.numel() // 16, 16).transpose(0, 1)

        hooks.append(getattr(attention, name).register_forward_hook(keep))
    with torch.no_grad():
        model(SEQUENCES)
    for hook in hooks:
        hook.remove()
    return actual


@pytest.mark.parametrize("layer_window", [0, 2])
def test_samples_are_the_models_own(any_model: Any, tmp_path: Path, layer_window: int) -> None:
    config = CollectConfig(5, 12, 3, 2, layer_window)
    recording = collect(load(any_model), SEQUENCES, config, tmp_path, {})
    assert recording.layers == [0, 1, 2]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 * len(config.windows(recording.spec))
    for layer_idx in recording.layers:
        samples, expected = recording.load(layer_idx), projections(any_model, layer_idx)
        assert torch.allclose(samples.k, expected["k"], rtol=2e-3, atol=1e-3)  # stored in 16 bits
        assert torch.allclose(samples.v, expected["v"], rtol=2e-3, atol=1e-3)
        assert torch.allclose(samples.q, expected["q"][:, : 3 * 12], rtol=2e-3, atol=1e-3)
        assert samples.positions.tolist() == list(range(12)) * 5
    assert any_model.config._attn_implementation == "sdpa"  # the model is itself again


def test_disk_is_predicted(tmp_path: Path) -> None:
    config = CollectConfig(4, 12, 2, 2)
    recording = collect(load(make_model("llama")), SEQUENCES[:4], config, tmp_path, {})
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    predicted = config.disk_bytes(recording.spec)
    assert predicted <= written < predicted + 4096


def test_recording_resumes_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcli.calibrate.collect as module

    model, config = make_model("llama"), CollectConfig(5, 12, 2, 2, 2)
    calls = []
    run = module._run

    def counted(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        run(*arguments)

    monkeypatch.setattr(module, "_run", counted)
    with pytest.raises(KeyboardInterrupt):
        collect(load(model), SEQUENCES, config, tmp_path / "cut", {})
    with pytest.raises(SamplesError, match="not finished"):
        Recording(tmp_path / "cut")
    resumed = collect(load(model), SEQUENCES, config, tmp_path / "cut", {})
    assert len(calls) == 4 + 3  # six parts, three of them actual
    assert collect(load(model), SEQUENCES, config, tmp_path / "cut", {}).num_tokens == 60
    assert len(calls) == 7
    monkeypatch.setattr(module, "_run", run)
    whole = collect(load(model), SEQUENCES, config, tmp_path / "whole", {})
    for layer_idx in range(3):
        assert torch.equal(resumed.load(layer_idx).k, whole.load(layer_idx).k)


def test_another_recording_is_refused_and_kept(tmp_path: Path) -> None:
    model = make_model("llama")
    collect(load(model), SEQUENCES, CollectConfig(5, 12, 2, 2), tmp_path, {"seed": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SamplesError, match=r"differs in provenance.seed: 1 there, 2 here\); .*--overwrite"):
        collect(load(model), SEQUENCES, CollectConfig(5, 12, 2, 2), tmp_path, {"seed": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    again = collect(load(model), SEQUENCES, CollectConfig(5, 12, 2, 2), tmp_path, {"seed": 2}, overwrite=True)
    assert again.manifest.provenance == {"seed": 2}


def test_damaged_parts_are_named(tmp_path: Path) -> None:
    recording = collect(load(make_model("llama")), SEQUENCES, CollectConfig(5, 12, 2, 2), tmp_path, {})
    part = tmp_path / "window-000-part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(SamplesError, match="part-00001"):
        recording.load(0)
    with pytest.raises(SamplesError, match="layer 7"):
        recording.load(7)
    with pytest.raises(SamplesError, match="kvcli calibrate"):
        Recording(tmp_path / "nothing")


def test_an_unrecognised_manifest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text("{}")
    with pytest.raises(SamplesError, match="--overwrite"):
        collect(load(make_model("llama")), SEQUENCES, CollectConfig(5, 12, 2, 2), tmp_path, {})
    assert (tmp_path / "samples.json").read_text() == "{}"
