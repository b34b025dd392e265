"""No tile changes a bit: what the autotuner may choose from gives the same codes, scales and draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fp4.kernels import launch
from fp4.kernels import quantize as kernels
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.runtime.cases import gaussian, same_bits

H64 = Rotation(64, signs="fresh", bf16=False)


@pytest.mark.parametrize(
    ("q", "rotation"),
    [
        (NVFP4(rounding="stochastic"), None),
        (NVFP4(block=(16, 16)), None),
        (NVFP4(rounding="ms_eden"), H64),
        (MXFP4(scale_rule="quest"), H64),
    ],
    ids=str,
)
def test_tiles(q: Quantizer, rotation: Rotation | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = gaussian(70, 300), torch.tensor([5])

    def results() -> list[torch.Tensor]:
        given: dict[str, Any] = {"rotation": rotation, "seed": seed, "site": 3}
        return [*kernels.quantize(x, q, **given), kernels.fake_quantize(x, q, **given)[0]]

    want = results()
    for change in ({"rows": 32}, {"units": 4}, {"rows": 128, "units": 32}):

        def tile(spec: KernelSpec, target: Target, units: int, change: dict[str, int] = change) -> Tile:
            least = dict(zip(("rows", "units"), spec.least_tile, strict=True))
            return dataclasses.replace(tile_of(spec, target), **{k: max(v, least[k]) for k, v in change.items()})

        monkeypatch.setattr(launch, "PLANS", {})
        monkeypatch.setattr(launch, "fitted", tile)
        assert all(same_bits(a, b) for a, b in zip(results(), want, strict=True))
