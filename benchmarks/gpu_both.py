"""On a CUDA GPU: operands quantized along rows and columns in one read, against the two kernels one after the other.

    python -m benchmarks.gpu_both RESULT.json [PAIR ...]     # names of PAIRS; all when none is given

Equality: every result of the one kernel is that of the two, bit for bit (which equal the oracle: gpu_kernels). Speed: GPU
time of CUDA graphs of the kernels, as a share of what a copy of the bytes that must move would take: x once, both results.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import copy_rate, graph_seconds
from fp4.kernels import both
from fp4.kernels import quantize as kernels
from fp4.kernels.both import Side
from fp4.kernels.launch import PLANS
from fp4.kernels.tiles import Tile
from fp4.runtime.spec import MXFP4, NVFP4, Rotation

SIZES = ((16384, 4096), (4096, 11008))
SHAPES = (*SIZES, (1000, 1032), (65, 300), (1, 16), (130, 8))
H16, H128 = Rotation(16, signs="fixed"), Rotation(128, signs="fresh", bf16=False)
SR, SIX, EDEN = NVFP4(rounding="stochastic", range_guard=True), NVFP4(four_six=True), NVFP4(rounding="ms_eden")
EVEN, MX16 = MXFP4(scale_rule="even"), Rotation(16, bf16=False)
BF16 = torch.bfloat16
PAIRS: dict[str, tuple[Side, Side]] = {
    "nearest, packed": (Side(NVFP4()), Side(NVFP4())),
    "nearest, decoded": (Side(NVFP4(), BF16), Side(NVFP4(), BF16)),
    "X of nvfp4: decoded; H16, packed": (Side(NVFP4(), BF16), Side(NVFP4(), rotation=H16)),
    "dY of nvfp4: stochastic, decoded; H16, decoded": (Side(SR, BF16), Side(SR, BF16, rotation=H16)),
    "mxfp4_h16, packed": (Side(EVEN, rotation=MX16), Side(EVEN, rotation=MX16)),
    "four_six, decoded; MS-EDEN H128, decoded": (Side(SIX, BF16), Side(EDEN, BF16, rotation=H128)),
}
USUAL, WORKERS = both.tile_of, 12
TILES = ((64, 4, 2, 2), (64, 8, 4, 1), (64, 8, 4, 4), (128, 8, 8, 2))


def drawn(side: Side, x: Tensor, seed: Tensor) -> Side:
    amax = torch.tensor(5.0, device="cuda")
    return replace(side, seed=seed, amax=amax if side.q.needs_amax else None, site=3, signs_site=7)


def alone(x: Tensor, side: Side) -> tuple[Tensor, ...]:
    given: dict[str, Any] = {"amax": side.amax, "rotation": side.rotation, "seed": side.seed, "site": side.site}
    given["signs_site"] = side.signs_site
    if side.dtype is None:
        return kernels.quantize(x, side.q, **given)
    return kernels.fake_quantize(x, side.q, dtype=side.dtype, **given)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dim() else bool(a == b)


def use(tile: tuple[int, int, int, int] | None) -> None:
    """From now on a kernel of both has this tile, or the usual one."""
    both.tile_of = USUAL if tile is None else lambda spec: Tile(*tile)
    PLANS.clear()


def warm(job: tuple[str, tuple[int, int], tuple[int, int, int, int] | None]) -> None:
    """Compile a pair's kernels for a shape in a worker, into Triton's cache on disk."""
    name, shape, tile = job
    try:
        use(tile)
        x, seed = torch.randn(shape, device="cuda", dtype=BF16), torch.tensor([5], device="cuda")
        sides = [drawn(side, x, seed) for side in PAIRS[name]]
        both.quantize(x, *sides)
        for operand, side in zip((x, x.t()), sides, strict=True):
            alone(operand, side)
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.empty_cache()  # the measurement will meet the same error and report it


def measure(pair: tuple[Side, Side], shape: tuple[int, int], rate: float) -> dict[str, Any]:
    x, seed = torch.randn(shape, device="cuda", dtype=BF16), torch.tensor([5], device="cuda")
    sides = [drawn(side, x, seed) for side in pair]
    results = both.quantize(x, *sides)
    moved = x.nbytes + sum(t.nbytes for result in results for t in result)
    seconds = [graph_seconds(lambda o=o, s=s: alone(o, s)) for o, s in zip((x, x.t()), sides, strict=True)]
    one = graph_seconds(lambda: both.quantize(x, *sides))
    shares = {}
    for values in TILES:
        use(values)
        try:
            shares[str(values)] = round(moved / graph_seconds(lambda: both.quantize(x, *sides)) / rate, 3)
        except Exception as error:  # a tile smaller than a rotation, or too large for a multiprocessor
            shares[str(values)] = type(error).__name__
    use(None)
    return {
        "of copy": round(moved / one / rate, 3),
        "us": round(one * 1e6, 1),
        "us alone, rows and columns": [round(s * 1e6, 1) for s in seconds],
        "of copy, by tile": shares,
    }


def main() -> None:
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "unequal": [],
    }
    seed, compared = torch.tensor([5], device="cuda"), 0
    pairs = {name: PAIRS[name] for name in sys.argv[2:] or PAIRS}
    jobs: list[Any] = [*itertools.product(pairs, SHAPES, [None]), *itertools.product(pairs, SIZES[:1], TILES)]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(warm, jobs, chunksize=1)
    for name, pair in pairs.items():
        for shape in SHAPES:
            x = torch.randn(shape, device="cuda", dtype=BF16)
            sides = [drawn(side, x, seed) for side in pair]
            for i, (operand, side, got) in enumerate(zip((x, x.t()), sides, both.quantize(x, *sides), strict=True)):
                for a, b in zip(got, alone(operand, side), strict=True):
                    compared += 1
                    if not same(a, b):
                        result["unequal"].append(f"{name} {shape} {('rows', 'columns')[i]}")
    result["compared"] = compared
    for shape in SIZES:
        rate = copy_rate(shape)
        rows: dict[str, Any] = {"copy, TB/s": rate / 1e12}
        result[f"{shape}"] = rows
        for name, pair in pairs.items():
            try:
                rows[name] = measure(pair, shape, rate)
            except Exception as error:
                rows[name] = f"failed: {type(error).__name__}: {str(error)[:300]}"
            Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(Path(sys.argv[1]).read_text())


if __name__ == "__main__":
    main()
