"""ALTO: a clamped tensor scale lost gradients of amax 1e-3 ... 1e-9; the SQNR is 20 dB at every magnitude."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import NVFP4, Quantizer
from tests.runtime import cases


@pytest.mark.parametrize("amax", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12])
@pytest.mark.parametrize(
    ("q", "sqnr_db"),
    [
        (NVFP4(), 20.4),
        (NVFP4(four_six=True), 21.2),
        (NVFP4(rounding="ms_eden"), 20.3),
        (NVFP4(rounding="stochastic"), 17.2),
    ],
    ids=str,
)
def test_sqnr(q: Quantizer, sqnr_db: float, amax: float) -> None:
    g = cases.gaussian(256, 512, seed=1)
    g = g * (amax / g.abs().max())
    value = reference.dequantize(*reference.quantize(g, q, None, torch.tensor([0])), q, 512, torch.float32)
    noise = (value.double() - g.double()).pow(2).sum()
    assert (10 * torch.log10(g.double().pow(2).sum() / noise)).item() == pytest.approx(sqnr_db, abs=0.2)
