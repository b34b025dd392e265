"""pytorch/ao#4117, #4201; NVIDIA/TransformerEngine#3262: E8M0 bytes 0, 254 and 255 are 2^-127, 2^127 and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime import cases

ONE = {"e2m1": 0x22, "e4m3": 0x38, "e5m2": 0x3C}


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127), (255, math.nan)])
@pytest.mark.parametrize("q", [MXFP4(), MXFP8(), MXFP8(format="e5m2"), NVFP4(scale="e8m0", tensor_scale=False)], ids=str)
def test_decoded(q: Quantizer, byte: int, value: float) -> None:
    width = q.block[1]
    codes = torch.full((1, width // 2 if q.packed else width), ONE[q.element_dtype], dtype=torch.uint8)
    got = reference.decode(codes, torch.tensor([[byte]], dtype=torch.uint8), q, width, torch.float32)
    assert cases.same_bits(got, torch.full((1, width), value))


STORED = (
    (0.0, 0),
    (2.0**-149, 0),
    (2.0**-126, 0),
    (2.0**-125, 0),
    (2.0**-124, 1),
    (1.0, 125),
    (2.0**127, 252),
    (math.nan, 255),
    (math.inf, 255),
)


@pytest.mark.parametrize(("amax", "byte"), STORED)
def test_stored(amax: float, byte: int) -> None:
    """`floor` stores the maximum's exponent less 2, and never goes below byte 0."""
    x = torch.zeros(1, 32)
    x[0, 9] = amax
    assert reference.quantize(x, MXFP4())[1].item() == byte
