"""vllm-project/vllm#38148: rows no multiple of 128 and scales pre-filled with 0xFF; what padding holds is never read."""

from __future__ import annotations

import pytest
import torch

from fp4.runtime import layout


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (100, 3), (129, 4), (200, 9)])
def test_padding_is_written_and_never_read(rows: int, columns: int) -> None:
    scales = torch.randint(1, 256, (rows, columns), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    swizzled = layout.swizzle(scales)
    padding = layout.swizzle(torch.ones_like(scales)) == 0
    assert not swizzled[padding].any()
    prefilled = torch.where(padding, 0xFF, swizzled)
    assert torch.equal(layout.unswizzle(prefilled, rows, columns), scales)
