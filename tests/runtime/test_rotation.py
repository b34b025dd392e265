"""The Hadamard rotation: exact order of additions, orthogonality, signs, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import reference
from fp4.runtime.spec import NVIDIA_SIGNS, Rotation
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

SIZES = (16, 32, 64, 128, 256)
SEED = torch.tensor([77])


def _expected(x: torch.Tensor, rotation: Rotation, seed: int, site: int) -> torch.Tensor:
    signs = oracle.sign_vector(rotation.size, rotation.signs, rotation.vector, seed, site)
    return torch.from_numpy(oracle.rotate(x.float().numpy(), rotation.size, signs, rotation.bf16))


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("signs", ["none", "fixed", "fresh"])
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_butterfly(size: int, signs: str, bf16: bool) -> None:
    rotation = Rotation(size=size, signs=signs, bf16=bf16)
    for shape in ((3, size), (5, 3 * size + 7), (1, 1), (0, size), (2, 0)):
        x = cases.gaussian(*shape, seed=70)
        got = reference.rotate(x, rotation, SEED, 5)
        assert got.dtype == (torch.bfloat16 if bf16 else torch.float32)
        assert got.shape == (shape[0], -(-shape[1] // size) * size)
        assert cases.same_bits(got.float(), _expected(x, rotation, 77, 5))


@pytest.mark.parametrize("data", ["huge", "denormals", "zero_parts", "poisoned", "bfloat16", "float16", "midpoints"])
def test_equals_the_butterfly_on_boundary_data(data: str) -> None:
    x = cases.DATA[data]()
    for bf16 in (True, False):
        rotation = Rotation(signs="fixed", bf16=bf16)
        with np.errstate(all="ignore"):
            expected = _expected(x, rotation, 77, 0)
        assert cases.same_bits(reference.rotate(x, rotation, SEED, 0).float(), expected)


@pytest.mark.parametrize("size", SIZES)
def test_close_to_the_matrix_product(size: int) -> None:
    """log2(n) additions, one multiply, a rounded constant: (log2(n) + 2) roundings of at most the sum of magnitudes."""
    rotation = Rotation(size=size, signs="fresh", bf16=False)
    x = cases.gaussian(20, 2 * size, seed=71)
    signs = reference.signs(rotation, SEED, 0, x.device).double()
    blocks = (x.double().reshape(-1, size) * signs).numpy()
    h = oracle.hadamard(size) / np.sqrt(size)
    exact = torch.from_numpy(blocks @ h.T)
    bound = torch.from_numpy(np.abs(blocks) @ np.abs(h).T) * (np.log2(size) + 2) * 2.0**-24
    assert ((reference.rotate(x, rotation, SEED, 0).double().reshape(-1, size) - exact).abs() <= bound).all()


@pytest.mark.parametrize("size", [16, 64, 256])  # 1/sqrt(n) is a power of two
@pytest.mark.parametrize("signs", ["none", "fixed", "fresh"])
def test_cancels_exactly_on_small_integers(size: int, signs: str) -> None:
    """Two operands rotated alike have the product of the unrotated ones: every number is a small integer over n."""
    rotation = Rotation(size=size, signs=signs, bf16=False)
    g = torch.Generator().manual_seed(72)
    x, w = (torch.randint(-8, 9, (rows, 2 * size + 3), generator=g).float() for rows in (6, 9))
    rotated = [reference.rotate(v, rotation, SEED, 4) for v in (x, w)]
    assert torch.equal(rotated[0] @ rotated[1].t(), x @ w.t())


@pytest.mark.parametrize("size", SIZES)
def test_without_signs_it_is_its_own_inverse(size: int) -> None:
    rotation = Rotation(size=size, bf16=False)
    x = torch.randint(-8, 9, (4, size), generator=torch.Generator().manual_seed(73)).float()
    back = reference.rotate(reference.rotate(x, rotation, None, 0), rotation, None, 0)
    assert torch.allclose(back, x, rtol=0, atol=size * 8 * 2.0**-22)
    if size in (16, 64, 256):
        assert torch.equal(back, x)


@pytest.mark.parametrize("signs", ["none", "fixed", "fresh"])
@pytest.mark.parametrize("size", SIZES)
def test_unrotate_equals_the_butterfly(size: int, signs: str) -> None:
    rotation = Rotation(size=size, signs=signs, bf16=False)
    vector = oracle.sign_vector(size, signs, rotation.vector, 77, 5)
    for rows, columns, cut in (
        (3, size, size),
        (5, 4 * size, 3 * size + 7),
        (2, size, 1),
        (0, size, 5),
        (2, 0, 0),
        (4, size, 0),
    ):
        y = cases.gaussian(rows, columns, seed=75)
        expected = torch.from_numpy(np.ascontiguousarray(oracle.unrotate(y.numpy(), size, vector, cut)))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = reference.unrotate(y, rotation, SEED, 5, cut, dtype)
            assert cases.same_bits(got, expected.to(dtype))
        half = y.to(torch.bfloat16)
        expected = torch.from_numpy(np.ascontiguousarray(oracle.unrotate(half.float().numpy(), size, vector, cut)))
        assert cases.same_bits(reference.unrotate(half, rotation, SEED, 5, cut, torch.float32), expected)


@pytest.mark.parametrize("data", ["huge", "denormals", "zero_parts", "poisoned", "bfloat16", "float16", "midpoints"])
def test_unrotate_equals_the_butterfly_on_boundary_data(data: str) -> None:
    y = cases.DATA[data]()
    rotation = Rotation(signs="fixed", bf16=False)
    width = y.shape[1] // 16 * 16
    with np.errstate(all="ignore"):
        vector = oracle.sign_vector(16, "fixed", rotation.vector, 0, 0)
        expected = oracle.unrotate(y[:, :width].float().numpy(), 16, vector, width - 3)
    got = reference.unrotate(y[:, :width], rotation, None, 0, width - 3, torch.float32)
    assert cases.same_bits(got, torch.from_numpy(np.ascontiguousarray(expected)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", ["none", "fixed", "fresh"])
def test_unrotate_undoes_rotate(size: int, signs: str) -> None:
    """Small integers come back: exactly where 1/sqrt(n) is a power of two, to the constant's rounding elsewhere."""
    rotation = Rotation(size=size, signs=signs, bf16=False)
    x = torch.randint(-8, 9, (4, 2 * size + 3), generator=torch.Generator().manual_seed(76)).float()
    there = reference.rotate(x, rotation, SEED, 6)
    back = reference.unrotate(there, rotation, SEED, 6, x.shape[1], torch.float32)
    assert torch.allclose(back, x, rtol=0, atol=size * 8 * 2.0**-22)
    if size in (16, 64, 256):
        assert torch.equal(back, x)
    assert torch.equal(back, reference.unrotate(there.t().contiguous().t(), rotation, SEED, 6, x.shape[1], torch.float32))
    if signs == "fresh":
        assert not torch.allclose(reference.unrotate(there, rotation, SEED + 1, 6, x.shape[1], torch.float32), x, atol=1.0)


def test_unit_vectors_give_the_matrix() -> None:
    for size in SIZES:
        got = reference.rotate(torch.eye(size), Rotation(size=size, bf16=False), None, 0)
        expected = (oracle.hadamard(size) * np.float32(1 / np.sqrt(size))).astype(np.float32)
        assert np.array_equal(got.numpy(), expected)


def test_padding_takes_part() -> None:
    """A short last block spreads over all of its n columns, as if the zeros were data."""
    x = cases.gaussian(3, 5, seed=74)
    rotation = Rotation(size=16, signs="fixed", bf16=False)
    padded = torch.nn.functional.pad(x, (0, 11))
    got = reference.rotate(x, rotation, None, 0)
    assert torch.equal(got, reference.rotate(padded, rotation, None, 0))
    assert (got != 0).all()


class TestSigns:
    @pytest.mark.parametrize("size", SIZES)
    def test_none_fixed_fresh(self, size: int) -> None:
        for signs in ("none", "fixed", "fresh"):
            rotation = Rotation(size=size, signs=signs)
            got = reference.signs(rotation, SEED, 3, torch.device("cpu"))
            assert got.dtype == torch.float32
            assert np.array_equal(got.numpy(), oracle.sign_vector(size, signs, rotation.vector, 77, 3))

    def test_default_vector_is_nvidias(self) -> None:
        text = "+++-+------+-+--"
        assert tuple(1 if c == "+" else -1 for c in text) == NVIDIA_SIGNS
        got = reference.signs(Rotation(size=32, signs="fixed"), None, 0, torch.device("cpu"))
        assert got.tolist() == [float(v) for v in NVIDIA_SIGNS * 2]

    @pytest.mark.parametrize("length", [1, 2, 16, 32, 64, 128])
    def test_any_vector(self, length: int) -> None:
        g = torch.Generator().manual_seed(length)
        vector = tuple((2 * torch.randint(0, 2, (length,), generator=g) - 1).tolist())
        got = reference.signs(Rotation(size=128, signs="fixed", vector=vector), None, 0, torch.device("cpu"))
        assert tuple(got.int().tolist()) == vector * (128 // length)

    def test_fresh_signs_differ_by_step_and_site_and_are_balanced(self) -> None:
        rotation = Rotation(size=256, signs="fresh")
        cpu = torch.device("cpu")
        seeds = torch.arange(64).split(1)
        drawn = torch.stack([reference.signs(rotation, seed, site, cpu) for seed in seeds for site in range(8)])
        assert len({tuple(row.tolist()) for row in drawn}) == 512
        assert abs(drawn.mean().item()) < 5 / drawn.numel() ** 0.5
        gram = drawn @ drawn.t() / 256
        assert (gram - torch.eye(512)).abs().max() < 6 / 16
