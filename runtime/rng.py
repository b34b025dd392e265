"""Random words: Philox4x32-10 (Salmon et al., SC 2011) as a function of (seed, site, element).

A draw depends on the element's logical linear index, never on a tile, a row count or a launch, so that the oracle, Inductor
and a Triton kernel of any tile size draw the same word for the same element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

# The third word of the counter keeps draws for different purposes apart.
STREAM_ELEMENT = 0
STREAM_SIGNS = 1
STREAM_SCALE = 2

MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of each counter, in the low 32 bits of int64.

    Every tensor is int64 holding uint32 values; shapes broadcast. Bits above 31 are garbage until masked, which only the
    factors of a product need: the product of two uint32 wraps in int64, and its high half is masked with what it is
    xored with.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        r0, r1 = k0 + turn * PHILOX_KEY_STEPS[0], k1 + turn * PHILOX_KEY_STEPS[1]
        c0, c1, c2, c3 = ((p1 >> 32) ^ c1 ^ r0) & MASK, p1, ((p0 >> 32) ^ c3 ^ r1) & MASK, p0
    return c0, c1, c2, c3


def reseed(seed: Tensor, number: int) -> Tensor:
    """Another seed for each number below 2^32; the same one for 0."""
    return seed ^ (number * PHILOX_KEY_STEPS[0] & MASK)


def locate(seed: Tensor, rows: int | torch.SymInt, row: int, columns: int, column: int) -> Tensor:
    """A seed for a part of a matrix, whose elements then draw the words of their place in the whole: int64 (3,).

    seed: int64 (1,). The part has `rows` rows, is the `row`-th such part from the top, and begins at column `column` of the
    whole's `columns`. Holds the seed, the whole's columns, and the linear index of the part's first element.
    """
    i = torch.arange(3, dtype=torch.int64, device=seed.device)
    first: Any = rows * (row * columns) + column
    return torch.where(i == 0, seed, torch.where(i == 1, columns, first))


def words(
    seed: Tensor, site: int | Tensor, shape: Sequence[int | torch.SymInt], stream: int, device: torch.device, unit: int = 1
) -> Tensor:
    """Random words of the elements of a contiguous tensor.

    seed: one int64 element, read on the device. site: which op of the graph draws, an int or an int64 0-d tensor.
    stream: STREAM_SIGNS or STREAM_SCALE. Element i (linear) gets word i % 4 of counter (i // 4, stream); for scales and a seed
    of `locate`, i is the index among the whole matrix's blocks. unit: columns of a block.

    Returns int32 of `shape`: the 32 bits of each word.
    """
    return _draws(seed, site, shape, stream, device, torch.int32, unit)


def halves(seed: Tensor, site: int | Tensor, shape: Sequence[int | torch.SymInt], device: torch.device) -> Tensor:
    """Sixteen random bits of each element of a contiguous tensor, int32 in 0..65535: half a word of STREAM_ELEMENT.

    Element i (linear) gets the low (i even) or the high half of word (i // 2) % 4 of counter (i // 8, STREAM_ELEMENT); with a
    seed of `locate`, i is the index in the whole matrix.
    """
    return _draws(seed, site, shape, STREAM_ELEMENT, device, torch.int16).to(torch.int32) & 0xFFFF


def _draws(
    seed: Tensor,
    site: int | Tensor,
    shape: Sequence[int | torch.SymInt],
    stream: int,
    device: torch.device,
    dtype: torch.dtype,
    unit: int = 1,
) -> Tensor:
    """The random bits of consecutive counters, read as `dtype`; of the rows of a part, where the seed locates it. There the
    whole's columns and the part's first index are multiples of `unit` times the draws of a counter."""
    count: int | torch.SymInt = 1
    for size in shape:
        count = count * size
    each = 16 // dtype.itemsize  # draws of one counter
    located = seed.numel() == 3 and stream != STREAM_SIGNS
    if located:
        columns, first = seed[1] // unit, seed[2] // unit
        height: Any = shape[0]
        row = torch.arange(height, dtype=torch.int64, device=device).unsqueeze(1)
        counters = torch.arange((shape[1] + each - 1) // each, dtype=torch.int64, device=device)
        index = ((row * columns + first) // each + counters).reshape(-1)
    else:
        index = torch.arange((count + each - 1) // each, dtype=torch.int64, device=device)
    seed = seed[:1] if seed.numel() == 3 else seed
    zero = torch.zeros_like(index)
    if not isinstance(site, Tensor):
        site = torch.full((), site & MASK, dtype=torch.int64, device=device)
    w0, w1, w2, w3 = philox((index & MASK, index >> 32, zero + stream, zero), (seed.reshape(()).to(device) & MASK, site))
    # Two words an int64, read as smaller integers: the first is the low part.
    pairs = torch.stack((w0 | (w1 << 32), w2 | (w3 << 32)), dim=-1)
    drawn = pairs.reshape(-1).view(dtype)
    return drawn.reshape(shape[0], -1)[:, : shape[1]] if located else drawn[:count].reshape(*shape)


def uniform(word: Tensor) -> Tensor:
    """FP32 in [0, 1) from the upper 24 bits of a random word: exact, and so is the comparison with a probability."""
    return ((word >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
