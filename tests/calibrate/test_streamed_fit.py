"""Fits that read samples block by block: the same as in memory, up to rounding, and no more memory for more tokens."""

import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import clustered, load, make_model, make_spec
from safetensors.torch import load_file
from torch import Tensor

from kvcli.artifact.fit import fit_recording, split_samples
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.methods.commvq import em, fit_values
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit_keys import pair_weight
from kvcli.methods.commvq.values import CommVQValueCodec
from kvcli.methods.samples import TokenBlocks
from kvcli.registry import get_method

SEQUENCES = torch.randint(3, 97, (20, 64), generator=torch.Generator().manual_seed(0))
METHODS: dict[str, dict[str, Any]] = {
    "commvq": {"codebook_size": 8, "num_residuals": 3, "key_iterations": 4, "value_iterations": 3},
    "blockgtq": {},
    "oscar": {},
    "kvquant": {},
    "klt": {},
    "squat": {"subspace_source": "calibration"},
}


def split(x: torch.Tensor, size: int, axis: int = 1, folder: Path | None = None) -> TokenBlocks:
    return TokenBlocks(x.shape[axis], lambda: x.split(size, dim=axis), axis, folder)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def recording(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """20 sequences of 64 tokens in parts of 3; qwen2 has a key bias."""
    folder = tmp_path_factory.mktemp("samples")
    collect(load(make_model(request.param)), SEQUENCES, CollectConfig(20, 64, 4, 3, fisher_sequences=2), folder, {})
    return Recording(folder)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4000])
def test_blocks_are_the_samples_without_sinks(recording: Recording, size: int) -> None:
    whole = recording.load(1)
    train, heldout = split_samples(recording, 1, 5, "cpu", size)
    kept = torch.arange(20 * 64)[whole.positions >= 5]
    for part, tokens in ((train, kept[kept < 18 * 64]), (heldout, kept[kept >= 18 * 64])):
        assert torch.equal(part.k, whole.k[:, tokens])
        assert torch.equal(part.v, whole.v[:, tokens])
        assert torch.equal(part.positions, whole.positions[tokens])
        assert torch.equal(part.q, whole.q)
        assert {block.shape[1] for block in part.keys} <= {min(size, len(tokens)), len(tokens) % size}


@pytest.mark.parametrize("name", METHODS)
def test_a_fit_in_blocks_is_as_good(recording: Recording, tmp_path: Path, name: str) -> None:
    """Sums of blocks round in another way, so codebooks differ a little; the held-out errors do not get worse."""
    method = get_method(name)
    config = method.config_cls(**METHODS[name]).resolve(recording.spec)
    reports: dict[int, list[Any]] = {400: [], 4000: []}
    seeds = range(3) if name == "commvq" else (0,)  # which vectors a codeword takes hangs on the last bit
    for (size, found), seed in product(reports.items(), seeds):
        done = partial(lambda found, layer_idx, metrics, reused: found.append(metrics), found)
        fit_recording(recording, method, config, tmp_path / f"{size}-{seed}", seed=seed, block_tokens=size, done=done)
    for metric in method.fit_metrics:
        blocks, whole = ([torch.tensor(x[metric]).float() for x in found] for found in reports.values())
        for a, b in zip(blocks, whole, strict=True):
            assert torch.allclose(a, b, rtol=0.1, atol=2), metric
        if metric.endswith(("nmse", "error", "energy")):
            a, b = torch.cat(blocks).mean(), torch.cat(whole).mean()
            assert torch.allclose(a, b, rtol=0.04, atol=1e-6), metric


def test_a_fit_repeats_to_the_last_bit(recording: Recording, tmp_path: Path) -> None:
    config = CommVQConfig(**METHODS["commvq"]).resolve(recording.spec)
    for run in ("a", "b"):
        fit_recording(recording, get_method("commvq"), config, tmp_path / run, block_tokens=400, layers=[1])
    first, second = (load_file(tmp_path / run / "layer-001.safetensors") for run in ("a", "b"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not [path for path in (tmp_path / "a").iterdir() if path.name.startswith("tmp")]


def test_iterations_of_em_are_those_of_all_vectors_at_once() -> None:
    x = clustered(2, 700, 8)
    book = em.initial_codebook(TokenBlocks.of(x), 8, torch.Generator().manual_seed(0))
    again = em.initial_codebook(split(x, 64).stored(), 8, torch.Generator().manual_seed(0))
    assert torch.equal(book, again)
    book[:, 6:] = 1e3  # dead rows, which take the vectors of the largest errors
    whole = TokenBlocks.of(x)
    for blocks in (split(x, 64), split(x, 699), split(x, 64).stored()):
        assert torch.allclose(em.step(blocks, book), em.step(whole, book), rtol=1e-5, atol=1e-6)
        assert torch.equal(em.worst_vectors(blocks, book), em.worst_vectors(whole, book))
        assert em.hard_error(blocks, book) == pytest.approx(em.hard_error(whole, book), rel=1e-5)
        soft = [em.soft_step(some, book[:, :6], 0.5) for some in (blocks, whole)]
        assert torch.allclose(*soft, rtol=1e-4, atol=1e-5)


def test_statistics_of_values_are_those_of_all_tokens_at_once() -> None:
    x = clustered(2, 700, 16) * torch.linspace(0.5, 3, 16) + 2
    costs = torch.rand(2, 8)
    rows = x.transpose(0, 1).flatten(1)
    codecs = [CommVQValueCodec(make_spec(), CommVQConfig(bits=1).resolve(make_spec())) for _ in range(2)]
    for size in (64, 699):
        mine, whole = (
            (*fit_values.regular_covariance(tokens), pair_weight(costs, tokens, 16))
            for tokens in (split(x, size), TokenBlocks.of(x))
        )
        for a, b in zip(mine, whole, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-9)
        blocks, one = (fit_values.principal_bits(y, 40) for y in (split(rows, size, 0), TokenBlocks.of(rows, 0)))
        # principal components have no sign, so what bits stand for is compared
        decoded = [bits.whole().float() @ book + offset for book, offset, bits in (blocks, one)]
        assert (decoded[0] - decoded[1]).square().mean() < 0.02 * rows.var()
        for codec, values in zip(codecs, (split(x, size), TokenBlocks.of(x)), strict=True):
            fit_values.set_metric(codec, values, torch.eye(16).expand(2, -1, -1))
        assert torch.allclose(codecs[0].metric_root, codecs[1].metric_root, rtol=1e-4, atol=1e-6)


MEASURED = """
import json, resource, sys
from pathlib import Path
import torch
from factories import load, make_model
from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.artifact.fit import fit_recording
from kvcli.registry import get_method
torch.set_num_threads(1)
model, method = load(make_model("llama", head_dim=32, num_hidden_layers=1)), get_method("commvq")
settings = {"codebook_size": 2, "num_residuals": 1, "key_iterations": 2, "value_iterations": 1, "value_sweeps": 1}
config = method.config_cls(**settings, value_code_bits=16).resolve(model.spec)
for count in map(int, sys.argv[2:]):
    folder = Path(str(count))
    sequences = torch.randint(3, 97, (count, 512), generator=torch.Generator().manual_seed(0))
    collect(model, sequences, CollectConfig(count, 512, 4, 8), folder / "samples", {})
    fit_recording(Recording(folder / "samples"), method, config, folder / "run", block_tokens=int(sys.argv[1]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def test_memory_does_not_grow_with_tokens(tmp_path: Path, repo_root: Path) -> None:
    """90112 and 360448 tokens. In one block, the difference is 69 MiB for keys alone, and there are several copies."""
    path = f"{repo_root}:{repo_root / 'tests' / 'support'}"
    command = [sys.executable, "-c", MEASURED, "8192", "176", "704"]
    said = subprocess.check_output(command, cwd=tmp_path, env={"PATH": "", "PYTHONPATH": path}, text=True)
    few, many = map(float, said.split()[-2:])
    assert many < few + 25


def tensor(axis: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (tokens, 6) if axis == 0 else (3, tokens, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (63, 64), (64, 64), (65, 64), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_are_the_tensor(axis: int, tokens: int, size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    x = tensor(axis, tokens, dtype)
    source = split(x, size, axis, tmp_path)
    for blocks in (source, source.stored()):
        assert blocks.num_tokens == tokens
        assert torch.equal(blocks.whole(), x)
        assert torch.equal(blocks.first(7), x.narrow(axis, 0, min(7, tokens)))
        order = torch.randint(0, tokens, (90,))
        assert torch.equal(blocks.at(order), x.index_select(axis, order))
        assert [part.shape[axis] for part in blocks] == [part.shape[axis] for part in x.split(size, dim=axis)]


def test_what_is_stored_changes_block_by_block(tmp_path: Path) -> None:
    x, y = tensor(1, 130), tensor(1, 130) + 1
    stored = split(x, 64, folder=tmp_path).stored()
    stored.update(lambda a, b: a * b, split(y, 64))
    stored.update(lambda a: a + 1)
    assert torch.equal(stored.whole(), x * y + 1)
    assert torch.equal(split(x, 64).whole(), x)
    with pytest.raises(ValueError, match="shorter"):
        stored.update(lambda a, b: a, split(y[:, :64], 64))


def test_files_have_no_name(tmp_path: Path) -> None:
    """A killed process leaves nothing behind."""
    stored = split(tensor(1, 130), 64, folder=tmp_path).stored()
    assert not list(tmp_path.iterdir())
    assert stored.whole().shape[1] == 130


def test_a_map_is_computed_in_every_pass() -> None:
    x = tensor(1, 100)
    factor = torch.tensor(1.0)
    doubled = split(x, 64).map(lambda block: block * factor)
    factor.fill_(2)
    assert torch.equal(doubled.whole(), x * 2)
    rows = doubled.map(lambda block: block.transpose(0, 1).flatten(1), axis=0)
    assert torch.equal(rows.stored().whole(), (x * 2).transpose(0, 1).flatten(1))


def test_means_weight_blocks_by_their_tokens() -> None:
    x = tensor(1, 130)
    assert torch.allclose(split(x, 64).mean(lambda block: block.mean(1)), x.mean(1), atol=1e-4)
    assert torch.equal(TokenBlocks.of(x).mean(lambda block: block.mean(1)), x.mean(1))  # to the last bit
