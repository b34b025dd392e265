"""The oracle of a stochastic rounding that the hardware draws for: ``cvt.rs.satfinite.e2m1x4.f32`` (sm_100a, sm_103a).

PTX ISA 9.1, "cvt": four FP32 operands {a, b, e, f} and 32 random bits become four codes, f in the lowest nibble. Rounding is
away from zero where the integer sum of an operand's random bits and the discarded bits of its mantissa carries. The upper
bytes of both 16-bit halves of the random word serve a and b, the lower bytes e and f: eight bits an operand. Bits below the
upper eight discarded ones cannot carry, so a value goes up with probability floor(256 * fraction) / 256: on average 1/512 of a
step too rarely.

Two points the text leaves to its figure, taken here as: the first of a pair has its byte in the upper half, most significant
bit first; and below 1, where E2M1 is subnormal, the discarded bits are those below its step of 0.5. Not checked on the
hardware: ``python -m benchmarks.blackwell_rounding`` compares the instruction with this model on a GPU that has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4.runtime.layout import ceil_div
from fp4.runtime.rng import STREAM_ELEMENT, words

# Of columns 4i to 4i + 3 (operands f, e, b, a): where the byte of each starts in the word they share.
BYTE_SHIFTS = (0, 16, 8, 24)
# Columns that share one Philox counter, four words.
COLUMNS = 16


def native_bytes(seed: Tensor, site: int | Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """The eight random bits of each element: (rows, columns) int32. Up where byte + floor(256 * fraction) carries.

    Column c takes its byte from word (c % 16) // 4 of counter row * ceil(columns / 16) + c // 16; where `seed` is one of
    ``rng.locate``, of its place in the whole matrix.
    """
    units = ceil_div(columns, COLUMNS)
    word = words(seed, site, (rows, units * 4), STREAM_ELEMENT, device, COLUMNS // 4)
    shift = torch.tensor(BYTE_SHIFTS, dtype=torch.int32, device=device)
    return ((word[:, :, None] >> shift) & 0xFF).reshape(rows, units * COLUMNS)[:, :columns]
