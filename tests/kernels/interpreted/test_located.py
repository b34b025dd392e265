"""A part of a matrix, quantized by a kernel with the seed of its place, has the codes of the whole there."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference, rng
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.kernels.equality import differences

CASES = (
    (NVFP4(rounding="stochastic"), None),
    (NVFP4(rounding="stochastic"), Rotation(16, signs="fixed")),
    (MXFP4(scale_rule="ceil", rounding="stochastic"), None),
    (NVFP4(rounding="ms_eden"), Rotation(128, signs="fresh", bf16=False)),
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("q", "rotation"), CASES, ids=lambda v: str(v))
def test_parts_draw_as_the_whole(q: Quantizer, rotation: Rotation | None, transposed: bool) -> None:
    seed, site = torch.tensor([77]), 3
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = x if rotation is None else reference.rotate(x, rotation, seed, site)
    amax = reference.amax(whole)
    want = reference.quantize(whole, q, amax, seed, site)
    for i in range(4):
        row, column = divmod(i, 2)
        located = rng.locate(seed, 16, row, 256, 128 * column)
        part = x.chunk(2)[row].chunk(2, 1)[column]
        if transposed:
            part = part.t().contiguous().t()
        rotated = part if rotation is None else reference.rotate(part, rotation, located, site)
        got = reference.quantize(rotated, q, amax, located, site)
        for a, b in zip(got[:2], want[:2], strict=True):
            assert torch.equal(a, b.chunk(2)[row].chunk(2, 1)[column])
        assert differences(part, q, rotation, located, site, amax=amax, brief=True) == []
