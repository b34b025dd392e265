"""fp4-trainkit: 1.8 and 3.6 lost the mantissa's carry into the exponent in E2M1; they are 2 and 4."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer


@pytest.mark.parametrize("q", [NVFP4(tensor_scale=False), MXFP4()], ids=str)
def test_carry(q: Quantizer) -> None:
    x = torch.zeros(1, 32)
    x[0, ::16] = 6.0  # the scale of each block is 1
    x[0, 1:5] = torch.tensor([1.8, 3.6, -1.8, -3.6])
    value = reference.dequantize(*reference.quantize(x, q), q, 32, torch.float32)
    assert value[0, :6].tolist() == [6.0, 2.0, 4.0, -2.0, -4.0, 0.0]
