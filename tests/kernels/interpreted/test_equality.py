"""Every kernel equals the oracle bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp4
from fp4.kernels import quantize as kernels
from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.kernels.equality import differences, recipe_operands, supported
from tests.runtime.cases import DATA, QUANTIZERS, SHAPES, gaussian, same_bits
from tests.runtime.strategies import operands, quantizers, rotations

SEED, SITE = torch.tensor([5]), 3


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("q", "rotation"), recipe_operands(), ids=str)
def test_operands_of_the_recipes(q: Quantizer, rotation: Rotation | None, data: str) -> None:
    assert differences(DATA[data](), q, rotation, SEED, SITE, brief=data != "outliers") == []


@pytest.mark.parametrize("q", [q for q in QUANTIZERS if supported(q)], ids=str)
@pytest.mark.parametrize("data", ["midpoints", "poisoned", "denormals"])
def test_every_quantizer(q: Quantizer, data: str) -> None:
    assert differences(DATA[data](), q, None, SEED, SITE, brief=data != "midpoints") == []


H128 = Rotation(128, signs="fresh", bf16=False)
OF_ALL_KINDS = [
    (NVFP4(), None),
    (NVFP4(block=(16, 16)), None),
    (NVFP4(four_six=True), None),
    (NVFP4(rounding="stochastic"), Rotation(16, signs="fixed")),
    (NVFP4(rounding="ms_eden"), H128),
    (NVFP4(outer=128), None),
    (MXFP4(scale_rule="quest"), Rotation(32, bf16=False)),
    (fp4.FP8(block=(128, 128)), None),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("q", "rotation"), OF_ALL_KINDS, ids=str)
def test_shapes_and_strides(q: Quantizer, rotation: Rotation | None, shape: tuple[int, int]) -> None:
    """Every shape with one of the strides; the largest with all, and in every form."""
    x, largest = gaussian(*shape), shape == max(SHAPES)
    assert differences(x, q, rotation, SEED, SITE, brief=not largest) == []
    strided = x.t().contiguous().t(), gaussian(shape[0], 3 * shape[1])[:, ::3], gaussian(1, shape[1]).expand(shape)
    for y in strided if largest else (strided[SHAPES.index(shape) % 3],):
        assert differences(y, q, rotation, SEED, SITE, brief=True) == []


@pytest.mark.parametrize(("q", "rotation"), OF_ALL_KINDS, ids=str)
def test_whole_tiles(q: Quantizer, rotation: Rotation | None) -> None:
    """No masks where tiles are whole."""
    for operand in (gaussian(64, 256).bfloat16(), gaussian(256, 64).t()):
        assert differences(operand, q, rotation, SEED, SITE, brief=True) == []


@pytest.mark.parametrize(("q", "rotation"), OF_ALL_KINDS[3:5], ids=str)
def test_a_matrix_taken_for_one_of_4096_columns(q: Quantizer, rotation: Rotation | None) -> None:
    """Draws by an element's place, whatever the matrix is taken for."""
    assert differences(gaussian(32, 1152).bfloat16(), q, rotation, SEED, SITE, brief=True) == []


@pytest.mark.parametrize("rotation", [H128, Rotation(16, signs="fixed"), Rotation(32, bf16=False)], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.2e38, -2e37])
def test_amax_after_a_rotation_that_leaves_fp32(rotation: Rotation, value: float) -> None:
    """The largest finite magnitude, though others are not: where |a| + |b| overflows, | |a| - |b| | may be it."""
    x = gaussian(20, 300)
    x[3, 7], x[3, 9], x[17, 150] = value, value, value
    for operand in (x.bfloat16(), x.t()):
        want = reference.amax(reference.rotate(operand, rotation, SEED, SITE))
        assert same_bits(kernels.amax(operand, rotation=rotation, seed=SEED, signs_site=SITE), want)


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("signs", ["none", "fixed", "fresh"])
def test_rotations(size: int, signs: str) -> None:
    for vector in ((1, -1, -1, 1), (1, -1) * 8, (1, 1, -1, 1) * (size // 4)):
        rotation = Rotation(size, signs=signs, vector=vector, bf16=size != 32)
        for x in (gaussian(5, 300), gaussian(300, 5).t()):
            assert differences(x, NVFP4(), rotation, SEED, SITE, brief=True) == []


def test_a_given_amax_of_another_tensor() -> None:
    for factor in (0.01, 100.0):
        for q in (NVFP4(), NVFP4(four_six=True), NVFP4(rounding="stochastic")):
            assert differences(gaussian(7, 64), q, None, SEED, SITE, torch.tensor(4.0 * factor), brief=True) == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_mxfp4_decoded_to_fp8(dtype: torch.dtype, rule: str) -> None:
    q, x = MXFP4(scale_rule=rule), gaussian(40, 96) * torch.exp2(torch.arange(-5.0, 3.0)).repeat(5)[:, None]
    x[3, 40] = float("nan")
    want = reference.decode(*reference.quantize(x, q)[:2], q, 96, dtype)
    assert same_bits(kernels.fake_quantize(x, q, dtype=dtype)[0].float(), want.float())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(quantizers().filter(supported), st.none() | rotations(), operands(), st.integers(0, 2**32 - 1), st.booleans())
def test_any_specification(q: Quantizer, rotation: Rotation | None, x: torch.Tensor, seed: int, transposed: bool) -> None:
    if transposed:
        x = x.t().contiguous().t()
    assert differences(x, q, rotation, torch.tensor([seed]), seed >> 3, brief=True) == []
