"""What calibration records: exactly the model's own q, k and v, in any windows, and after an interruption."""

from contextlib import ExitStack
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
    last = "norm" if hasattr(attention, "q_norm") else "proj"
    with ExitStack() as hooks:
        for kind, name in (("q", f"q_{last}"), ("k", f"k_{last}"), ("v", "v_proj")):

            def keep(module: Any, inputs: Any, output: torch.Tensor, kind: str = kind) -> None:
                actual[kind] = output.reshape(SEQUENCES.numel(), -1, 16).transpose(0, 1)

            hooks.callback(getattr(attention, name).register_forward_hook(keep).remove)
        with torch.no_grad():
            model(SEQUENCES)
    return actual


@pytest.mark.parametrize("layer_window", [0, 2])
def test_samples_are_the_models_own(any_model: Any, tmp_path: Path, layer_window: int) -> None:
    config = CollectConfig(5, 12, 3, 2, layer_window)
    collect(load(any_model), SEQUENCES, config, tmp_path, {})
    recording = Recording(tmp_path)
    assert recording.layers == [0, 1, 2]
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 3 * len(config.windows(recording.spec))
    predicted = config.disk_bytes(recording.spec)
    assert predicted <= sum(path.stat().st_size for path in files) < predicted + 2048 * len(files)
    for layer_idx in recording.layers:
        samples, expected = recording.load(layer_idx), projections(any_model, layer_idx)
        for kind, tokens in (("k", 5 * 12), ("v", 5 * 12), ("q", 3 * 12)):  # stored in 16 bits
            assert torch.allclose(getattr(samples, kind), expected[kind][:, :tokens], rtol=2e-3, atol=1e-3)
        assert samples.positions.tolist() == list(range(12)) * 5
    assert any_model.config._attn_implementation == "sdpa"  # the model is itself again


def record(folder: Path, seed: int = 1, **options: Any) -> None:
    collect(load(make_model("llama")), SEQUENCES, CollectConfig(5, 12, 2, 2), folder, {"seed": seed}, **options)


def test_another_recording_is_refused_and_kept(tmp_path: Path) -> None:
    record(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SamplesError, match=r"differs in provenance.seed: 1 there, 2 here\); .*--overwrite"):
        record(tmp_path, seed=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    record(tmp_path, seed=2, overwrite=True)
    assert Recording(tmp_path).manifest.provenance == {"seed": 2}
    (tmp_path / "samples.json").write_text("{}")  # which may be of another program
    with pytest.raises(SamplesError, match="--overwrite"):
        record(tmp_path)
    assert (tmp_path / "samples.json").read_text() == "{}"


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(SamplesError, match="layer 7"):
        Recording(tmp_path).load(7)
    with pytest.raises(SamplesError, match="kvcli calibrate"):
        Recording(tmp_path / "nothing")
