"""A quotient by a reciprocal in two parts rounds to the element that the IEEE quotient rounds to (helpers' `quotient`)."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SIGNIFICANDS = 1 << 23
# Of the midpoints between neighbours of E2M1 (1, 1.25, 1.5, 1.75) and of E4M3, subnormal ones too.
MIDPOINTS = [1 + k / 16 for k in range(16)]


def two_parts(d: Floats) -> tuple[Floats, Floats]:
    """The helper `reciprocal` of d in [1, 2); its two fma in FP64, where their sums are exact but for a last bit far below."""
    high = np.float32(1) / d
    error = (1.0 - high.astype(np.float64) * d).astype(np.float32)  # 48 bits at most, of which the upper half cancels
    low = error * high
    return high, (low.astype(np.float64) * error + low).astype(np.float32)


def side(x: Floats, high: Floats, low: Floats, midpoint: float) -> NDArray[np.int64]:
    """-1, 0, 1 as fma(x, high, x * low) is below, at or above the midpoint: in units of 2^-47 the product is an integer.

    What is within half a step of a midpoint rounds to it, a tie as well, since its significand is even; below 1 steps are half
    as long.
    """
    product = (x.astype(np.float64) * 2.0**23).astype(np.int64) * (high.astype(np.float64) * 2.0**24).astype(np.int64)
    distance, rest = product - int(midpoint * 2**47), (x * low).astype(np.float64) * 2.0**47
    above = (distance - (1 << 23)).astype(np.float64) > -rest
    below = (distance + (1 << (22 if midpoint == 1.0 else 23))).astype(np.float64) < -rest
    return above.astype(np.int64) - below.astype(np.int64)


@pytest.mark.parametrize("midpoint", MIDPOINTS)
def test_the_side_of_a_midpoint_is_the_quotient_s(midpoint: float) -> None:
    """For every significand of the divisor, and the dividends around their product."""
    for start in range(0, SIGNIFICANDS, 1 << 20):
        d = (np.arange(start, start + (1 << 20), dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
        high, low = two_parts(d)
        near = (d.astype(np.float64) * midpoint).astype(np.float32)
        for step in range(-2, 3):
            x = (near.view(np.int32) + np.int32(step)).view(np.float32)
            quotient = x / d  # IEEE
            wanted = np.sign(quotient.astype(np.float64) - midpoint).astype(np.int64)
            found = side(x, high, low, midpoint)
            assert np.array_equal(found, wanted), (midpoint, step, d[found != wanted][:3])


def test_one_part_is_not_enough() -> None:
    """What the test is for: by the reciprocal alone the side is another one at times."""
    d = (np.arange(1 << 20, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    x = (d.astype(np.float64) * 1.25).astype(np.float32)
    by_reciprocal = (x * (np.float32(1) / d)).astype(np.float64)
    assert np.any(np.sign(by_reciprocal - 1.25) != np.sign((x / d).astype(np.float64) - 1.25))
