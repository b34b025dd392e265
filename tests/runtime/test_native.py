"""The model of cvt.rs.satfinite.e2m1x4.f32 follows the text of the PTX ISA."""

from __future__ import annotations

import numpy as np
import torch

from fp4.runtime import reference, rng
from fp4.runtime.native import BYTE_SHIFTS, native_bytes
from fp4.runtime.rounding import round_e2m1
from fp4.runtime.spec import NVFP4
from tests.runtime.cases import gaussian

SEED, CPU = torch.tensor([5]), torch.device("cpu")
GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def carried(value: float, byte: int) -> float:
    """The magnitude that the ISA's integer addition gives: eight random bits onto the upper eight of the discarded ones."""
    low = GRID[value >= GRID].max()
    high = GRID[min(int(np.searchsorted(GRID, low)) + 1, 7)]
    discarded = 0 if high == low else int((value - low) / (high - low) * 2**22)
    return float(high if (discarded >> 14) + byte >= 256 else low)


def test_every_byte_rounds_as_the_integer_sum_carries() -> None:
    rng_ = np.random.default_rng(0)
    values = np.concatenate([rng_.uniform(0, 6, 60), GRID, (GRID[1:] + GRID[:-1]) / 2]).astype(np.float32)
    values = np.where(values < 1, np.round(values * 2**23) / 2**23, values).astype(np.float32)
    byte = torch.arange(256, dtype=torch.int32).expand(len(values), 256)
    got = round_e2m1(torch.from_numpy(values)[:, None].expand(-1, 256), byte << 14)[0]
    for row, value in zip(got.tolist(), values.tolist(), strict=True):
        assert row == [carried(value, b) for b in range(256)]


def test_four_columns_share_the_bytes_of_a_word() -> None:
    assert sorted(BYTE_SHIFTS) == [0, 8, 16, 24]
    got = native_bytes(SEED, 3, 3, 40, CPU)
    word = rng.words(SEED, 3, (3, 12), rng.STREAM_ELEMENT, CPU)  # ceil(40 / 16) counters a row
    for row, column in ((0, 0), (1, 17), (2, 39)):
        assert got[row, column] == (int(word[row, column // 4]) >> BYTE_SHIFTS[column % 4]) & 0xFF


def test_a_part_draws_as_the_whole_does() -> None:
    x, q = gaussian(8, 64), NVFP4(rounding="stochastic", tensor_scale=False)
    whole = reference.quantize(x, q, None, SEED, 3, native_draws=True)[0]
    part = reference.quantize(x[4:, 32:], q, None, rng.locate(SEED, 4, 1, 64, 32), 3, native_draws=True)[0]
    assert torch.equal(part, whole[4:, 16:])
