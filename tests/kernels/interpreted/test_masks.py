"""The kernels of the clip mask equal the oracle, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4.kernels import masks
from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Rotation, SpecError
from tests.kernels.masking import QUANTIZERS, ROTATIONS, gradients, quantize_differences, unrotate_equal
from tests.runtime.cases import DATA, SHAPES, gaussian, same_bits

SEED, SITE = torch.tensor([5]), 3


def check(x: torch.Tensor, q: MXFP4, rotation: Rotation | None) -> None:
    assert quantize_differences(x, q, rotation, SEED, SITE) == []


@pytest.mark.parametrize("data", DATA)
def test_the_mask_of_quartet(data: str) -> None:
    check(DATA[data](), MXFP4(scale_rule="quest"), Rotation(32, bf16=False))


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("q", QUANTIZERS, ids=str)
def test_every_mask(q: MXFP4, rotation: Rotation | None) -> None:
    for name in ("outliers", "poisoned", "huge"):
        check(DATA[name](), q, rotation)
        check(DATA[name]().t(), q, rotation)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int]) -> None:
    for x in (gaussian(*shape), gaussian(shape[0], 3 * shape[1])[:, ::3], gaussian(1, shape[1]).expand(shape)):
        check(x, MXFP4(scale_rule="quest"), Rotation(32, bf16=False))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("rotation", [r for r in ROTATIONS if r is not None] + [Rotation(256, signs="fresh")], ids=str)
def test_gradients_are_masked_and_rotated_back(rotation: Rotation, masked: bool) -> None:
    for y, columns in gradients(rotation.size):
        for dtype in (torch.bfloat16, torch.float32):
            assert unrotate_equal(y, rotation, columns, dtype, masked, SEED, SITE)


def test_what_is_clipped_counts_for_nothing() -> None:
    """A NaN where the forward clipped is a zero, like any other value there; elsewhere it stays."""
    y = gaussian(4, 64)
    y[1, 3], y[2, 40] = float("nan"), float("inf")
    mask = torch.full((4, 8), 255, dtype=torch.uint8)
    mask[1, 0] = 0
    rotation = Rotation(32)
    got = masks.unrotate(y, rotation, columns=64, dtype=torch.float32, mask=mask)
    assert same_bits(got, reference.unrotate(reference.apply_mask(y, mask), rotation, None, 0, 64, torch.float32))
    assert got[1].isfinite().all()
    assert not got[2, 32:].isfinite().any()


def test_a_quantizer_without_a_mask_is_an_error() -> None:
    for q in (NVFP4(), MXFP4(prescale=0.75)):
        with pytest.raises(SpecError, match="prescale 1"):
            masks.quantize(gaussian(2, 32), q)
    with pytest.raises(TypeError, match="bfloat16 or torch.float32"):
        masks.unrotate(gaussian(2, 32), Rotation(32), columns=32, dtype=torch.float16)
    mask = torch.zeros((2, 3), dtype=torch.uint8)
    with pytest.raises(ValueError, match="whole blocks"):
        masks.unrotate(gaussian(2, 32), Rotation(32), columns=32, dtype=torch.float32, mask=mask)
