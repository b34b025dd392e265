"""The kernel that makes FP8 of packed MXFP4 equals the oracle, value for value, factor and counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4.kernels.fp8 import operand
from fp4.runtime import fp8
from fp4.runtime.spec import MXFP4

FORMATS = list(fp8.REACH)


def check(codes: torch.Tensor, scales: torch.Tensor, q: MXFP4, dtype: torch.dtype) -> None:
    top = fp8.top_scale(scales)
    counter = torch.tensor([3, 5])
    got, factor = operand(codes, scales, top, q, dtype, counter)
    want, want_factor, outside = fp8.operand(codes, scales, top, q, dtype)
    assert torch.equal(factor, want_factor)
    assert got.shape == want.shape
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])
    assert counter.tolist() == [3 + int(outside), 5 + want.numel()]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (33, 2), (64, 16), (70, 33), (0, 2), (3, 0)], ids=str)
def test_shapes(dtype: torch.dtype, block: tuple[int, int], shape: tuple[int, int]) -> None:
    """shape: rows, blocks in a row. Scales over some forty octaves, so some leave either reach."""
    generator = torch.Generator().manual_seed(sum(shape))
    codes = torch.randint(0, 256, (shape[0], 16 * shape[1]), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (-(-shape[0] // block[0]), shape[1]), generator=generator, dtype=torch.uint8)
    check(codes, scales, MXFP4(block=block), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_scale_and_code(dtype: torch.dtype) -> None:
    codes = torch.tensor([0x10 * (2 * i + 1) + 2 * i for i in range(8)] * 2, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256).to(torch.uint8)[:, None]
    for top in (1, 100, 255):
        check(codes[:top], scales[:top], MXFP4(), dtype)
    check(codes, scales, MXFP4(), dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.integers(1, 20), st.sampled_from(FORMATS), st.integers(1, 255))
def test_any(seed: int, rows: int, blocks: int, dtype: torch.dtype, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 16 * blocks), generator=generator, dtype=torch.uint8)
    scales = torch.randint(256 - spread, 256, (rows, blocks), generator=generator, dtype=torch.uint8)
    check(codes, scales, MXFP4(), dtype)
