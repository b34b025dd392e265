"""Philox4x32-10: published known answers, the layout of key and counter, and independence of how it is asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4.runtime import reference, rng
from fp4.runtime.spec import NVFP4
from tests.runtime import cases
from tests.runtime import oracle_numpy as oracle

CPU = torch.device("cpu")
# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def words(seed: torch.Tensor, site: int, shape: tuple[int, ...], stream: int, device: torch.device) -> torch.Tensor:
    """The words as uint32 values."""
    return rng.words(seed, site, shape, stream, device).to(torch.int64) & 0xFFFFFFFF


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_the_oracle(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    assert tuple(int(v) for v in oracle.philox(np.array(counter, np.uint64), key)) == answer


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([v]) for v in (*counter, *key))
    assert tuple(int(word.item()) & rng.MASK for word in rng.philox((c0, c1, c2, c3), (k0, k1))) == answer


def test_known_answer_through_words() -> None:
    assert words(torch.tensor([0]), 0, (4,), 0, CPU).tolist() == list(KNOWN_ANSWERS[0][2])


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32 + 5, -1, 2**63 - 1])
@pytest.mark.parametrize("site", [0, 1, 77, 2**31 - 1])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_words_equal_the_oracle(seed: int, site: int, stream: int) -> None:
    got = words(torch.tensor([seed]), site, (1001,), stream, CPU)
    expected = oracle.words(np.arange(1001), seed, site, stream)
    assert np.array_equal(got.numpy().astype(np.uint64), expected)


def test_uniform_keeps_24_bits() -> None:
    got = rng.uniform(rng.words(torch.tensor([5]), 3, (4000,), 0, CPU))
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), oracle.uniform(np.arange(4000), 5, 3, 0))


def test_halves_are_the_words_halves() -> None:
    got = rng.halves(torch.tensor([5]), 3, (3, 667), CPU)
    assert np.array_equal(got.reshape(-1).numpy(), oracle.halves(np.arange(2001), 5, 3))
    assert got.min() >= 0
    assert got.max() < 1 << 16
    assert abs(got.float().mean().item() - 32767.5) < 5 * 65536 / (12 * 2001) ** 0.5


def test_shape_only_arranges_the_words() -> None:
    seed = torch.tensor([8])
    assert torch.equal(words(seed, 1, (3, 5, 7), 0, CPU), words(seed, 1, (105,), 0, CPU).reshape(3, 5, 7))
    assert words(seed, 1, (0, 32), 0, CPU).shape == (0, 32)


def test_every_input_changes_the_words() -> None:
    base = words(torch.tensor([3]), 5, (4096,), 0, CPU)
    for other in (
        words(torch.tensor([4]), 5, (4096,), 0, CPU),
        words(torch.tensor([3]), 6, (4096,), 0, CPU),
        words(torch.tensor([3]), 5, (4096,), 1, CPU),
        words(torch.tensor([3]), 5, (4096,), 2, CPU),
    ):
        assert (base != other).float().mean() > 0.999


def test_words_are_uniform() -> None:
    """Mean of the top 24 bits, and each of the 32 bits, within 5 standard errors."""
    n = 1 << 18
    drawn = words(torch.tensor([11]), 2, (n,), 0, CPU)
    assert drawn.min() >= 0
    assert drawn.max() < 2**32
    u = (drawn >> 8).double() * 2.0**-24
    assert abs(u.mean().item() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    for bit in range(32):
        assert abs(((drawn >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / n**0.5


def test_row_prefix_has_the_same_draws() -> None:
    """Rows come first in the index: quantizing the first rows alone, with the same scales, gives the same codes."""
    x = cases.gaussian(64, 96, seed=51)
    q, seed = NVFP4(rounding="stochastic"), torch.tensor([1])
    amax = reference.amax(x)
    whole = reference.quantize(x, q, amax, seed, 3)
    part = reference.quantize(x[:10], q, amax, seed, 3)
    assert torch.equal(part[0], whole[0][:10])
    assert torch.equal(part[1], whole[1][:10])
