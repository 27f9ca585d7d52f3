"""SQuat's laws: KIVI at lambda 0, the exact constrained optimum, subspaces that are the SVD's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_spec, record

import kvcli
from kvcli.artifact.fit import fit_recording
from kvcli.errors import ConfigError
from kvcli.methods.config import SQuatConfig
from kvcli.methods.scalar.codec import PerChannelKey
from kvcli.methods.squat.codec import SQuatKey, SQuatState, correction, leading_factor, query_gram
from kvcli.registry import get_method
from kvcli.seam.versions import with_cache


def finalized(config: SQuatConfig, queries: torch.Tensor) -> tuple[SQuatKey, SQuatState]:
    codec = SQuatKey(make_spec(), config, "post_rope")
    state = codec.new_state(queries.shape[0], torch.device("cpu"))
    codec.observe(state, queries, queries[:, :2], torch.full((queries.shape[0],), float(queries.shape[2])))
    codec.finalize_state(state, list(range(queries.shape[0])))
    return codec, state


def low_rank_queries(batch: int = 1, time: int = 200) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, 4, time, 3) @ torch.randn(3, 16) * 3 + 0.1 * torch.randn(batch, 4, time, 16)


@pytest.mark.parametrize("block_size", [0, 4])
def test_lambda_zero_is_kivi_bit_for_bit(block_size: int) -> None:
    config = SQuatConfig(squat_lambda=0, group_size=8, residual_length=8, block_size=block_size)
    codec, state = finalized(config, low_rank_queries())
    x = torch.randn(1, 2, 64, 16)
    ours, kivi = codec.encode(x, state), PerChannelKey(make_spec(), 2, 8).encode(x)
    assert all(torch.equal(a, b) for a, b in zip(ours.tensors().values(), kivi.tensors().values(), strict=True))


def test_the_update_is_the_constrained_optimum_in_float64() -> None:
    torch.manual_seed(0)
    factor = torch.randn(5, 12, dtype=torch.float64)
    p = torch.eye(12, dtype=torch.float64) + 0.3 * factor.T @ factor
    error = torch.randn(4, dtype=torch.float64)
    # minimise delta^T P delta over all 12 channels, the first 3 already fixed at 0, the next 4 given: KKT conditions
    constraint = torch.zeros(7, 12, dtype=torch.float64)
    constraint[torch.arange(7), torch.arange(7)] = 1
    kkt = torch.cat((torch.cat((2 * p, constraint.T), dim=1), torch.cat((constraint, torch.zeros(7, 7)), dim=1)), dim=0)
    right = torch.cat((torch.zeros(12), torch.zeros(3), error))
    optimum = torch.linalg.solve(kkt, right.double())[7:12]
    ours = -error @ correction(0.3**0.5 * factor, 3, 7).double()
    assert torch.allclose(ours, optimum, atol=1e-6)
    # the paper's own form, Lemma 2: B_t H_t with H_t from the inverse of the top-left block of P^-1
    inverse = torch.linalg.inv(p)
    top_left, bottom_left = inverse[:7, :7], inverse[7:, :7]
    last = torch.linalg.inv(top_left)[:, 3:7]
    assert torch.allclose(bottom_left @ last @ error, optimum, atol=1e-12)


def test_the_subspace_is_the_svds() -> None:
    q = low_rank_queries()
    rows = q[0].unflatten(0, (2, 2)).flatten(1, 2)
    _, s, vh = torch.linalg.svd(rows.double(), full_matrices=False)
    q_hat = s[:, :3, None] * vh[:, :3]
    expected = (q_hat.transpose(-1, -2) @ q_hat).float()
    gram = query_gram(q, 2)[0]
    for solver in ("svd", "power"):
        q_hat = leading_factor(gram, 3, solver).float()
        assert torch.allclose(q_hat.transpose(-1, -2) @ q_hat, expected, rtol=1e-3, atol=1e-5 * expected.abs().max())


def test_error_leaves_the_query_subspace() -> None:
    queries = low_rank_queries()
    x = torch.randn(1, 2, 256, 16)
    score_error = {}
    for weight in (0.0, 0.1):
        codec, state = finalized(SQuatConfig(squat_lambda=weight, group_size=8, residual_length=8), queries)
        error = codec.decode(codec.encode(x, state)) - x
        grouped = queries.unflatten(1, (2, 2)).flatten(2, 3)
        score_error[weight] = (grouped @ error.transpose(-1, -2)).square().mean()
    assert score_error[0.1] < 0.6 * score_error[0.0]


def test_lambda_per_token_does_not_depend_on_the_prompts_length() -> None:
    once, twice = low_rank_queries(), low_rank_queries().repeat(1, 1, 2, 1)
    config = SQuatConfig(group_size=8, residual_length=8)
    assert torch.allclose(finalized(config, once)[1].matrix, finalized(config, twice)[1].matrix, rtol=1e-3, atol=1e-4)
    plain = config.model_copy(update={"lambda_scaling": "none"})
    assert not torch.allclose(finalized(plain, once)[1].matrix, finalized(plain, twice)[1].matrix, rtol=0.1)


def test_sequences_have_their_own_subspace_unless_shared() -> None:
    queries = torch.cat((low_rank_queries(), torch.randn(1, 4, 200, 16)))
    config = SQuatConfig(group_size=8, residual_length=8)
    own = finalized(config, queries)[1].matrix
    assert not torch.allclose(own[0], own[1], rtol=0.1)
    shared = finalized(config.model_copy(update={"share_batch": True}), queries)[1].matrix
    assert torch.equal(shared[0], shared[1])
    assert torch.allclose(shared[0], own[0])


@pytest.mark.parametrize("method", ["squat", "squat-pre"])
def test_the_subspace_is_fixed_by_the_prompt(tiny_model: Any, method: str) -> None:
    with kvcli.attach(tiny_model, method, group_size=4, residual_length=4) as session, torch.no_grad():
        cache = session.new_cache()
        tiny_model(torch.randint(3, 97, (1, 20)), **with_cache(cache))
        before = cache.layers[0].store.state.matrix.clone()
        for _ in range(9):
            tiny_model(torch.tensor([[5]]), **with_cache(cache))
        assert torch.equal(cache.layers[0].store.state.matrix, before)
        assert cache.sequences.counts.keys.coded[0] == 24
        assert cache.memory().state_bytes == 3 * (2 * 16 * 16 * 4 + 4)


def test_a_calibrated_subspace_needs_its_artifact(tiny_model: Any) -> None:
    settings = {"group_size": 4, "residual_length": 4, "subspace_source": "calibration"}
    with (
        kvcli.attach(tiny_model, "squat", **settings) as session,
        pytest.raises(ConfigError, match="needs an artifact with a fitted subspace"),
        torch.no_grad(),
    ):
        tiny_model(torch.randint(3, 97, (1, 20)), **with_cache(session.new_cache()))


def test_a_subspace_from_the_prompt_is_not_fitted(tiny_model: Any, tmp_path: Path) -> None:
    recording = record(tiny_model, tmp_path / "samples")
    config = SQuatConfig(group_size=4, residual_length=4, subspace_source="prompt")
    with pytest.raises(ConfigError, match="set subspace_source=calibration"):
        fit_recording(recording, get_method("squat"), config, tmp_path / "run")
