"""Blocks of tokens: the same numbers as one tensor, in memory and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcli.methods.samples import TokenBlocks


def blocks_of(x: Tensor, size: int, axis: int = 1, folder: Path | None = None) -> TokenBlocks:
    return TokenBlocks(x.shape[axis], lambda: x.split(size, dim=axis), axis, folder)


def tensor(axis: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (tokens, 6) if axis == 0 else (3, tokens, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (63, 64), (64, 64), (65, 64), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_are_the_tensor(axis: int, tokens: int, size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    x = tensor(axis, tokens, dtype)
    source = blocks_of(x, size, axis, tmp_path)
    for blocks in (source, source.stored()):
        assert blocks.num_tokens == tokens
        assert torch.equal(blocks.whole(), x)
        assert torch.equal(blocks.first(7), x.narrow(axis, 0, min(7, tokens)))
        order = torch.randint(0, tokens, (90,))
        assert torch.equal(blocks.at(order), x.index_select(axis, order))
        assert [part.shape[axis] for part in blocks] == [part.shape[axis] for part in x.split(size, dim=axis)]


def test_what_is_stored_changes_block_by_block(tmp_path: Path) -> None:
    x, y = tensor(1, 130), tensor(1, 130) + 1
    stored = blocks_of(x, 64, folder=tmp_path).stored()
    stored.update(lambda a, b: a * b, blocks_of(y, 64))
    stored.update(lambda a: a + 1)
    assert torch.equal(stored.whole(), x * y + 1)
    assert torch.equal(blocks_of(x, 64).whole(), x)
    with pytest.raises(ValueError, match="shorter"):
        stored.update(lambda a, b: a, blocks_of(y[:, :64], 64))


def test_files_have_no_name(tmp_path: Path) -> None:
    """A killed process leaves nothing behind."""
    stored = blocks_of(tensor(1, 130), 64, folder=tmp_path).stored()
    assert not list(tmp_path.iterdir())
    assert stored.whole().shape[1] == 130


def test_a_map_is_computed_in_every_pass() -> None:
    x = tensor(1, 100)
    factor = torch.tensor(1.0)
    doubled = blocks_of(x, 64).map(lambda block: block * factor)
    factor.fill_(2)
    assert torch.equal(doubled.whole(), x * 2)
    rows = doubled.map(lambda block: block.transpose(0, 1).flatten(1), axis=0)
    assert torch.equal(rows.stored().whole(), (x * 2).transpose(0, 1).flatten(1))


def test_means_weight_blocks_by_their_tokens() -> None:
    x = tensor(1, 130)
    assert torch.allclose(blocks_of(x, 64).mean(lambda block: block.mean(1)), x.mean(1), atol=1e-4)
    assert torch.equal(TokenBlocks.of(x).mean(lambda block: block.mean(1)), x.mean(1))  # to the last bit
