"""Packing of codes, and the swizzled scale layout by its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import layout
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

# Rows and columns of a scale matrix: one tile, parts of one, several, none.
SCALE_SHAPES = ((128, 4), (1, 1), (127, 3), (129, 5), (256, 8), (300, 17), (32, 4), (33, 4), (0, 4), (5, 0))


def _bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_even_column_is_the_low_nibble() -> None:
    assert layout.pack(torch.tensor([[0x1, 0xA, 0xF, 0x0]], dtype=torch.uint8)).tolist() == [[0xA1, 0x0F]]


def test_pack_round_trip_over_every_pair() -> None:
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8).reshape(1, 512)
    packed = layout.pack(pairs)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(layout.unpack(packed), pairs)
    assert torch.equal(packed, torch.from_numpy(oracle.pack(pairs.numpy())))


@pytest.mark.parametrize("shape", [(3, 16), (1, 2), (0, 16), (4, 0)])
def test_pack_of_a_view(shape: tuple[int, int]) -> None:
    codes = _bytes(shape[1], shape[0]) & 15
    packed = layout.pack(codes.t())
    assert torch.equal(packed, layout.pack(codes.t().contiguous()))
    assert torch.equal(layout.unpack(packed), codes.t())
    assert torch.equal(cases.unpack(packed), codes.t())


@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_swizzle_is_the_formula(shape: tuple[int, int]) -> None:
    scales = _bytes(*shape)
    got = layout.swizzle(scales)
    assert got.dtype == torch.uint8
    assert got.is_contiguous()
    assert np.array_equal(got.numpy(), oracle.swizzle(scales.numpy()))
    assert torch.equal(layout.swizzle(scales.t().contiguous().t()), got)


@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
def test_unswizzle_is_the_inverse(shape: tuple[int, int]) -> None:
    scales = _bytes(*shape, seed=1)
    back = layout.unswizzle(layout.swizzle(scales), *shape)
    assert back.is_contiguous()
    assert torch.equal(back, scales)


def test_padding_is_zero_bytes() -> None:
    """All scales 0xFF: as many 0xFF bytes as scales, every other byte of the tiles is 0."""
    got = layout.swizzle(torch.full((130, 6), 0xFF, dtype=torch.uint8))
    assert got.numel() == 2 * 2 * 512
    assert (got == 0xFF).sum() == 130 * 6
    assert (got == 0).sum() == got.numel() - 130 * 6


def test_offset_is_a_bijection_of_a_tile() -> None:
    """Row index, then column index, as data: every byte of the tile is one (row, column)."""
    row = layout.swizzle(torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4))
    column = layout.swizzle(torch.arange(4, dtype=torch.uint8)[None].expand(128, 4))
    assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == 512
    assert row[:16].tolist() == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4
    assert column[:8].tolist() == [0, 1, 2, 3] * 2
