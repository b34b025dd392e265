"""One kernel for both orientations gives what the kernel of each alone gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4.kernels import quantize as kernels
from fp4.kernels.both import BothSpec, Side, quantize
from fp4.kernels.kernelspec import KernelSpec
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation, SpecError
from tests.runtime.cases import DATA, SHAPES, gaussian, same_bits

H16, H32, H128 = Rotation(16, signs="fixed"), Rotation(32, bf16=False), Rotation(128, signs="fresh", bf16=False)
SR, EDEN = NVFP4(rounding="stochastic", range_guard=True), NVFP4(rounding="ms_eden")
SEED = torch.tensor([5])
CASES: tuple[tuple[Quantizer, Rotation | None, Quantizer, Rotation | None], ...] = (
    (NVFP4(), None, NVFP4(), H16),  # X of NVIDIA's recipe
    (SR, None, SR, H16),  # its dY
    (NVFP4(four_six=True), None, EDEN, H128),
    (EDEN, H128, NVFP4(four_six=True), None),
    (MXFP4(scale_rule="even"), H16, MXFP4(scale_rule="even"), H16),
    (MXFP4(scale_rule="quest"), H32, MXFP4(scale_rule="range_fit", rounding="stochastic"), None),
    (MXFP8(), None, MXFP8(), None),
    (FP8(), None, NVFP4(), H16),
    (NVFP4(outer=128), None, NVFP4(block=(16, 16)), None),
    (MXFP4(block=(32, 32)), None, NVFP4(block=(1, 64)), None),
)


def differences(x: torch.Tensor, case: Any, dtypes: tuple[Any, Any] = (None, None), **more: Any) -> list[str]:
    q, rotation, transposed_q, transposed_rotation = case
    sides = (
        Side(q, dtypes[0], rotation=rotation, seed=SEED, site=3, **more),
        Side(transposed_q, dtypes[1], rotation=transposed_rotation, seed=SEED, site=4, signs_site=7, **more),
    )
    found = []
    for name, operand, side, results in zip(("rows", "columns"), (x, x.t()), sides, quantize(x, *sides), strict=True):
        given: dict[str, Any] = {"amax": side.amax, "rotation": side.rotation, "seed": SEED, "site": side.site}
        given["signs_site"] = side.signs_site
        want: tuple[torch.Tensor, ...]
        if side.dtype is None:
            want = kernels.quantize(operand, side.q, swizzled=side.swizzled, **given)
        else:
            want = kernels.fake_quantize(operand, side.q, dtype=side.dtype, scaled=side.scaled, **given)
        found += [f"{name} {i}" for i, (a, b) in enumerate(zip(results, want, strict=True)) if not same_bits(a, b)]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: " ".join(map(str, c)))
def test_quantizers(case: Any) -> None:
    x = gaussian(200, 168)
    assert differences(x, case) == []
    assert differences(x, case, (torch.bfloat16, None)) == []
    assert differences(x, case, (torch.float32, torch.bfloat16), scaled=True) == []


@pytest.mark.parametrize("shape", [*SHAPES, (0, 40), (40, 0), (64, 64), (65, 64), (64, 65), (1, 300), (300, 1)], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=["nearest", "stochastic"])
def test_shapes(shape: tuple[int, int], case: Any) -> None:
    assert differences(gaussian(*shape), case) == []


@pytest.mark.parametrize("data", DATA)
def test_data(data: str) -> None:
    x = DATA[data]().contiguous()
    assert differences(x, CASES[2], (torch.bfloat16, None)) == []
    assert differences(x, CASES[0], amax=torch.tensor(3.0)) == []


def test_swizzled_scales_and_strided_rows() -> None:
    assert differences(gaussian(130, 300)[:, :200], CASES[0], swizzled=True) == []
    assert differences(gaussian(70, 80).float(), CASES[5]) == []


def test_bad_input() -> None:
    x = gaussian(32, 32)
    with pytest.raises(ValueError, match="rows are contiguous"):
        quantize(x.t(), Side(NVFP4()), Side(NVFP4()))
    with pytest.raises(SpecError, match="at least 16 columns"):
        quantize(x, Side(NVFP4(block=(1, 8))), Side(NVFP4()))
    with pytest.raises(SpecError, match="second pass"):
        quantize(x, Side(NVFP4()), Side(NVFP4(rounding="ms_eden", posthoc=True), seed=SEED, rotation=H128))
    with pytest.raises(SpecError, match="each orientation alone"):
        quantize(x, Side(EDEN, seed=SEED, rotation=H128), Side(EDEN, seed=SEED, rotation=H128))
    with pytest.raises(SpecError, match="same matrix"):
        BothSpec(KernelSpec(NVFP4()), KernelSpec(NVFP4(), memory="columns", input="fp32"))
