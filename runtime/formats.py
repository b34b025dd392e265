"""Number formats: constants and tables, once. Pure Python.

E2M1 (4 bits): sign, 2 exponent bits, 1 mantissa bit, bias 1. Code 0..7 is 0, .5, 1, 1.5, 2, 3, 4, 6; +8 is negative.
E4M3 (finite, max 448, NaN 0x7F), E5M2 (IEEE, max 57344), E8M0 (2^(byte-127), 255 = NaN).
"""

from __future__ import annotations

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6
E4M3_MAX = 448
E5M2_MAX = 57344
FLT_MAX = 3.4028234663852886e38

# Four-over-six and MS-EDEN leave head-room in the E4M3 scale for a later factor (1.5, or the correction).
E4M3_HEADROOM_MAX = 256
# Worst downward rounding of a normal E4M3 scale: with 6*(16/17) no |x|/scale exceeds 6 (Quartet II 2601.22813, section 3.1).
SR_GUARD = 16 / 17
# The clip that minimises MS-EDEN's error with E4M3 scales (Quartet II, released notebooks).
EDEN_CLIP = 0.93
# Quartet's Gaussian clip: 2.92247856 standard deviations map to 6 (2505.14669, QuEST).
QUEST_SIGMA = 2.92247856

# Unsigned ExMy block scale formats, one byte each: (exponent bits, mantissa bits, bias, largest finite value).
# E4M3 and E5M2 drop the sign of the usual formats; UE5M3 uses the eighth bit.
SCALE_FORMATS: dict[str, tuple[int, int, int, float]] = {}


def _exmy(exponent: int, mantissa: int) -> tuple[int, int, int, float]:
    """(exponent bits, mantissa bits, bias, max) of a format whose all-ones code is NaN and that has no infinity."""
    bias = 2 ** (exponent - 1) - 1
    top = 2**exponent - 1 - bias
    last = 2**mantissa - 2  # mantissa of the largest finite value: all ones less one
    largest = (1 + last / 2**mantissa) * 2.0**top if last >= 0 else 2.0 ** (top - 1)
    return exponent, mantissa, bias, largest


for _name in ("e1m6", "e2m5", "e3m4", "e4m3", "e6m1", "e8m0", "ue5m3"):
    SCALE_FORMATS[_name] = _exmy(int(_name[-3]), int(_name[-1]))
SCALE_FORMATS["e5m2"] = (5, 2, 15, float(E5M2_MAX))  # IEEE: the top exponent is infinity and NaN
