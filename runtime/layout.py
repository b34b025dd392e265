"""Layouts: two codes a byte, blocks of a padded matrix, and the swizzled scale layout of the tensor cores."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = int | torch.SymInt

# One tile of swizzled scales: 128 rows x 4 scales.
TILE_ROWS = 128
TILE_COLUMNS = 4
TILE_BYTES = TILE_ROWS * TILE_COLUMNS


@overload
def ceil_div(a: int, b: int) -> int: ...
@overload
def ceil_div(a: Size, b: int) -> Size: ...
def ceil_div(a: Size, b: int) -> Size:
    return (a + b - 1) // b


def pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    """`x` (R, C), zero-padded below and to the right to multiples of `rows` and `columns`. No copy when nothing is missing."""
    r, c = x.shape
    down, right = ceil_div(r, rows) * rows - r, ceil_div(c, columns) * columns - c
    if statically_known_true(down == 0) and statically_known_true(right == 0):
        return x
    missing: list[Any] = [0, right, 0, down]
    return F.pad(x, missing)


def blocks(x: Tensor, block: tuple[int, ...]) -> Tensor:
    """`x` (R, C) as blocks (ceil(R/b0), b0, ceil(C/b1), b1), zero-padded."""
    b0, b1 = block
    r, c = x.shape
    return pad_to(x, b0, b1).reshape(ceil_div(r, b0), b0, ceil_div(c, b1), b1)


def materialize(x: Tensor) -> Tensor:
    """`x`, contiguous, as a buffer that Inductor writes once, where it would repeat the computation at each use."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def cut(x: Tensor, rows: Size, columns: Size) -> Tensor:
    """The inverse of `blocks`: the first `rows` rows and `columns` columns, as a view of all of them.

    Not written as a slice: Inductor's C++ backend (torch 2.13) divides a loop over a sliced dimension by the block and drops
    the remainder. Behind as_strided it computes whole blocks.
    """
    height, width = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]
    full = x.reshape(height, width)
    if statically_known_true(rows == height) and statically_known_true(columns == width):
        return full
    return full.contiguous().as_strided((rows, columns), (width, 1))


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte: (R, C) uint8 of 4-bit codes, C even -> (R, C/2) uint8, the even column in the low nibble."""
    # Flat, since a matrix of no columns has strides that no wider dtype can view.
    pairs = codes.reshape(-1).view(torch.int16)  # the even column is the low byte; slices of step 2 would not vectorize
    return ((pairs & 0xF) | (pairs >> 4)).to(torch.uint8).reshape(codes.shape[0], codes.shape[1] // 2)


def unpack(codes: Tensor) -> Tensor:
    """The inverse of `pack`: (R, C/2) uint8 -> (R, C) uint8."""
    byte = codes.to(torch.int16)
    return ((byte & 0xF) | ((byte >> 4) << 8)).contiguous().view(torch.uint8)


def row_scales(scales: Tensor, rows: Size, block_rows: int) -> Tensor:
    """Block scales (ceil(R/block_rows), C) as tensor cores read them, one scale a row: (R, C)."""
    return scales if block_rows == 1 else scales.repeat_interleave(block_rows, 0)[:rows].contiguous()


def swizzle(scales: Tensor) -> Tensor:
    """Block scales (R, C) uint8 in the tensor cores' order: flat uint8, 512 bytes a tile of 128 rows x 4 scales.

    offset(r, c) = ((r//128)*ceil(C/4) + c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + c%4; rows and columns are padded with zero
    bytes (cuBLAS, "1D block scaling factors layout").
    """
    tiles = blocks(scales, (TILE_ROWS, TILE_COLUMNS))  # (row tiles, 128, column tiles, 4)
    split = tiles.reshape(tiles.shape[0], 4, 32, tiles.shape[2], TILE_COLUMNS)
    return split.permute(0, 3, 2, 1, 4).reshape(-1)


def swizzle_rows(scales: Tensor, rows: Size, block_rows: int) -> Tensor:
    """Block scales (ceil(rows/block_rows), C) in the tensor cores' order, one scale a row: flat uint8."""
    return swizzle(row_scales(scales, rows, block_rows))


def transpose_codes(codes: Tensor, columns: Size, block: int, packed: bool) -> Tensor:
    """Codes of an (R, columns) matrix to those of its transpose, R padded to the block with zeros: uint8 (columns, bytes)."""
    whole = unpack(codes) if packed else codes
    flipped = pad_to(whole[:, :columns].t(), 1, block).contiguous()
    return pack(flipped) if packed else flipped


def unswizzle(data: Tensor, rows: Size, columns: Size) -> Tensor:
    """The inverse of `swizzle`: flat uint8 -> (rows, columns) uint8."""
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    split = data.reshape(row_tiles, column_tiles, 32, 4, TILE_COLUMNS).permute(0, 3, 2, 1, 4)
    return split.reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)[:rows, :columns].contiguous()
