"""torchao as a third oracle: equal where the conventions coincide; where they do not, the test says how."""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, MXFP8, NVFP4, Quantizer
from tests.runtime import cases

FLOOR, EVEN, RCEIL = ScaleCalculationMode.FLOOR, ScaleCalculationMode.EVEN, ScaleCalculationMode.RCEIL
ELEMENTS = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("data", ["gaussian", "quarter_grid", "outliers", "zero_parts", "wide", "midpoints"])
@pytest.mark.parametrize(
    ("q", "mode"),
    [
        (MXFP4(), FLOOR),
        (MXFP4(scale_rule="even"), EVEN),
        (MXFP4(scale_rule="ceil"), RCEIL),
        (MXFP8(scale_rule="floor"), FLOOR),
        (MXFP8(), RCEIL),
        (MXFP8(format="e5m2", scale_rule="floor"), FLOOR),
        (MXFP8(format="e5m2"), RCEIL),
    ],
    ids=str,
)
def test_mx_scales_and_codes_are_equal(q: Quantizer, mode: ScaleCalculationMode, data: str) -> None:
    x = cases.DATA[data]().to(torch.bfloat16)
    x = x[:, : x.shape[1] // 32 * 32].contiguous()
    their_scales, their_codes = to_mx(x, ELEMENTS[q.element_dtype], 32, mode)
    codes, scales, _ = reference.quantize(x, q)
    assert torch.equal(scales, their_scales.view(torch.uint8))
    assert torch.equal(codes, their_codes.view(torch.uint8).reshape(codes.shape))


def test_mx_infinity_differs() -> None:
    """A block with an infinity: NaN here, finite numbers there."""
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    x[0, 3] = float("inf")
    their_scales, _ = to_mx(x, ELEMENTS["e4m3"], 32, RCEIL)
    assert their_scales.view(torch.uint8).item() != 255
    assert reference.quantize(x, MXFP8())[1].item() == 255


def _nvfp4_both(x: torch.Tensor, tensor_scale: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (one a byte) and scale bytes: theirs, then ours."""
    theirs = nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()) if tensor_scale else None)
    codes, scales, _ = reference.quantize(x, NVFP4(tensor_scale=tensor_scale))
    return cases.unpack(theirs[1].view(torch.uint8)), theirs[0].view(torch.uint8), cases.unpack(codes), scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensor_scale", [True, False])
def test_nvfp4_is_equal_on_gaussian_data(tensor_scale: bool, dtype: torch.dtype) -> None:
    their_codes, their_scales, codes, scales = _nvfp4_both(cases.gaussian(256, 1024, seed=110).to(dtype), tensor_scale)
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes, their_codes)


def _quarter_grid(largest: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(111)
    return torch.randint(-4 * largest, 4 * largest + 1, (256, 1024), generator=g).to(torch.bfloat16) / 4


def test_nvfp4_without_tensor_scale_is_equal_on_quarter_grid_data() -> None:
    their_codes, their_scales, codes, scales = _nvfp4_both(_quarter_grid(6), False)
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes, their_codes)


def test_nvfp4_differs_on_quarter_grid_data() -> None:
    """amax / 6 / T and x * ((1/T) / s) there, amax * (S / 6) and x * (1 / (s / S)) here: quotients on the midpoints part ways.

    Some 5.9 % of the codes, each by one step; the two agree on Gaussian data to the last code.
    """
    their_codes, _, codes, _ = _nvfp4_both(_quarter_grid(6), True)
    differ = codes != their_codes
    assert differ.double().mean().item() == pytest.approx(0.059, abs=0.004)
    assert ((codes[differ] & 7).int() - (their_codes[differ] & 7).int()).abs().max() == 1
    assert torch.equal(codes & 8, their_codes & 8)


def test_nvfp4_zero_tensor_differs() -> None:
    """Their tensor scale is 0 and every block scale NaN; here the scales are 0 and so is every value."""
    x = torch.zeros(16, 64)
    _, their_scales, codes, scales = _nvfp4_both(x, True)
    assert their_scales.view(torch.float8_e4m3fn).float().isnan().all()
    assert not scales.any()
    assert not codes.any()


def test_nvfp4_zero_block_differs() -> None:
    """Their block scale is at least 2^-6; here a zero block has scale 0."""
    x = cases.gaussian(16, 64, seed=112)
    x[3, 16:32] = 0
    their_codes, their_scales, codes, scales = _nvfp4_both(x, True)
    assert (their_scales[3, 1].item(), scales[3, 1].item()) == (0x08, 0)
    their_scales[3, 1] = 0
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes, their_codes)
