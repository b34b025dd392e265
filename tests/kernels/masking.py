"""The clip mask's kernels against the oracle: what the tests and the GPU benchmark compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4.kernels import masks
from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, Rotation
from tests.kernels.equality import equal_codes
from tests.runtime.cases import same_bits

QUANTIZERS = (
    MXFP4(scale_rule="quest"),
    MXFP4(),
    MXFP4(block=(32, 32), scale_rule="quest"),
    MXFP4(scale_rule="range_fit", rounding="stochastic"),
)
ROTATIONS = (None, Rotation(32, bf16=False), Rotation(128, signs="fresh"), Rotation(16, signs="fixed", bf16=False))


def on(device: str, x: Tensor) -> Tensor:
    """A copy with the strides of x, those of 0 too."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def quantize_differences(
    x: Tensor,
    q: MXFP4,
    rotation: Rotation | None,
    seed: Tensor,
    site: int,
    device: str = "cpu",
    native_draws: bool = False,
) -> list[str]:
    """Which of codes, scales, tensor scale and mask of `x` are not the oracle's, which runs on the CPU."""
    rotated = x if rotation is None else reference.rotate(x, rotation, seed, site)
    want = reference.quantize(rotated, q, None, seed, site, native_draws)
    draws: dict[str, Any] = {"seed": seed.to(device), "site": site, "native_draws": native_draws}
    run = masks.quantize(on(device, x), q, rotation=rotation, **draws)
    got = [t.cpu() for t in run]
    equal = {
        "codes": equal_codes(got[0], want[0], want[1], q),
        "scales": same_bits(got[1], want[1]),
        "tensor scale": same_bits(got[2], want[2]),
        "mask": torch.equal(got[3], reference.clip_mask(rotated, want[1], q)),
    }
    return [name for name, same in equal.items() if not same]


def unrotate_equal(
    y: Tensor, rotation: Rotation, columns: int, dtype: torch.dtype, masked: bool, seed: Tensor, site: int, device: str = "cpu"
) -> bool:
    """Is the kernel's unrotated gradient the oracle's? masked: with a random mask."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.randint(0, 256, (y.shape[0], -(-y.shape[1] // 32) * 4), generator=generator, dtype=torch.uint8)
    want = reference.unrotate(reference.apply_mask(y, mask) if masked else y, rotation, seed, site, columns, dtype)
    given = mask.to(device) if masked else None
    draws: dict[str, Any] = {"seed": seed.to(device), "site": site}
    return same_bits(masks.unrotate(on(device, y), rotation, columns=columns, dtype=dtype, mask=given, **draws).cpu(), want)


def gradients(size: int) -> list[tuple[Tensor, int]]:
    """Gradients of a rotation's size, contiguous, transposed and strided, and the columns they are cut to."""
    found = []
    generator = torch.Generator().manual_seed(2)
    for rows, groups, columns in ((40, 2, 2 * size), (17, 3, 2 * size + 5), (1, 1, 1), (0, 1, size), (33, 1, size - 1)):
        y = torch.randn((rows, groups * size), generator=generator)
        wide = torch.randn((rows, groups * size + 8), generator=generator)
        found += [(given, columns) for given in (y, y.bfloat16(), y.t().contiguous().t(), wide[:, 4:-4])]
    return found
