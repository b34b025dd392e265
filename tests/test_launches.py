"""What one linear's step launches on a GPU: a budget, read from the code that Inductor generates for an H200."""

from __future__ import annotations

import pytest
import torch

from benchmarks.launches import kind, step

pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the stand-ins are for PyTorch 2.13")

AMAX = ["triton_red_fused", "triton_per_fused"]  # with what makes the operand, were it not an input here; and of its parts
SCALED = ["triton_poi_fused", "fp4.product"]  # two tensor scales of posthoc multiplied, one number; cuBLAS scales by it


def kinds(recipe: str, exact: bool = True) -> tuple[list[str], list[str]]:
    forward, backward = step(recipe, exact)
    return [kind(c) for c in forward], [kind(c) for c in backward]


def test_nvfp4() -> None:
    """Three quantizers and a GEMM in forward; in backward three, the decoding of what forward saved, and two. W is not copied
    for dgrad. The seed is drawn once. A quantizer multiplies the two tensor scales."""
    forward, backward = kinds("nvfp4")
    assert sorted(forward) == sorted(
        [*AMAX, *AMAX, "fp4.seed", "fp4.rotate_quantize", "fp4.fake_quantize", "fp4.fake_quantize", "fp4.product"]
    )
    assert sorted(backward) == sorted([*AMAX, *["fp4.fake_quantize"] * 3, "fp4.decode", *["fp4.product"] * 2])


def test_mxfp4_and_mxfp8_need_nothing_but_quantizers_and_products() -> None:
    for recipe in ("mxfp4_h16", "mxfp8"):
        forward, backward = kinds(recipe)
        assert sorted(forward) == ["fp4.fake_quantize", "fp4.fake_quantize", "fp4.product", "fp4.rotate_quantize"]
        assert backward.count("fp4.product") == 2
        assert backward.count("fp4.fake_quantize") == 3
        assert set(backward) <= {"fp4.product", "fp4.fake_quantize", "fp4.decode"}
        assert len(backward) <= 6


def test_quartet2() -> None:
    """Backward reads the saved codes where they lie: nothing is decoded, transposed or rotated in memory."""
    forward, backward = kinds("quartet2")
    assert len(forward) <= 10
    assert sorted(backward) == sorted(
        [*["fp4.fake_quantize"] * 2, *["fp4.fake_requantize"] * 2, "fp4.rotate_quantize", *SCALED, *SCALED]
    )


def test_fp8_products_have_no_epilogue() -> None:
    forward, backward = kinds("mxfp4_h16", exact=False)
    for calls, products in ((forward, 1), (backward, 2)):
        assert calls.count("fp4.fp8_mm") == products
        assert calls.count("fp4.fp8_operand") == 2 * products
        assert not {"mm_dtype", "fp4.product", "triton_poi_fused"} & set(calls)
    forward, backward = kinds("fp8", exact=False)
    assert set(forward) | set(backward) == {"fp4.rotate_quantize", "fp4.fp8_block_mm"}
    assert (len(forward), len(backward)) == (4, 5)
