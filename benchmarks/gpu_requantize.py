"""The kernels that quantize again from packed codes, on a CUDA GPU: equality with the oracle, and speed.

    python -m benchmarks.gpu_requantize RESULT.json [equality] [speed]

Equality: every case of tests/kernels/requantizing.py on every kind of data, odd shapes, with and without the transpose; the
oracle runs on the CPU. Speed: GPU time of CUDA graphs of the kernels alone, as a share of what a device copy of the bytes that
must move would take (``y.copy_(x)``), of each pass and of both; beside it the way without these kernels: the codes decoded to
memory by Inductor, then the kernels that read BF16. A few tiles each, the usual one first.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import copy_rate, graph_seconds, together
from fp4.kernels import masks
from fp4.kernels import quantize as plain
from fp4.kernels import requantize as kernels
from fp4.kernels.launch import Plan
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime import reference
from fp4.runtime.spec import NVFP4, Quantizer
from tests.kernels.masking import QUANTIZERS, ROTATIONS, gradients, quantize_differences, unrotate_equal
from tests.kernels.requantizing import CASES, RECIPES, differences
from tests.runtime.cases import DATA, SHAPES, gaussian

SEED, SITE = 5, 3
WORKERS = 12
EQUALITY_SECONDS = 150.0
PARTS_OF_INPUTS = 4  # a case's inputs are compared in so many parts
SIZES = ((16384, 4096), (4096, 11008))
NAMES = ("quartet2", "quartet")


# -- equality


def inputs() -> dict[str, Callable[[], Tensor]]:
    # First the one on which a kernel was wrong once (KernelSpec.single): a run may be cut off.
    found: dict[str, Callable[[], Tensor]] = {"(1, 1)": functools.partial(gaussian, 1, 1), **DATA}
    for shape in (*SHAPES, (40, 0), (130, 8), (8, 130)):
        found[f"{shape}"] = functools.partial(gaussian, *shape)
    found["large"] = lambda: gaussian(1000, 1032)
    return found


def equality_of(job: tuple[int, bool, int, float]) -> dict[str, Any]:
    """One case on every PARTS_OF_INPUTS-th input from the given one, in a worker."""
    index, transposed, first, deadline = job
    torch.set_num_threads(1)
    source, q, rotation = CASES[index]
    result: dict[str, Any] = {
        "source": str(source),
        "quantizer": str(q),
        "rotation": str(rotation or ""),
        "transposed": transposed,
        "inputs": 0,
        "unequal": {},
        "failed": {},
    }
    for name, make in list(inputs().items())[first::PARTS_OF_INPUTS]:
        if time.time() > deadline:
            result["cut off before"] = name
            break
        try:
            found = differences(
                make(),
                source,
                q,
                rotation,
                torch.tensor([SEED]),
                SITE,
                transposed=transposed,
                scaled=name == "outliers",
                device="cuda",
                brief=name not in ("outliers", "poisoned", "large"),
            )
            if found:
                result["unequal"][name] = found
            result["inputs"] += 1
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
            if len(result["failed"]) == 1:
                result["traceback"] = traceback.format_exc()[-1500:]
            if "CUDA error" in str(error):
                break
    return result


def masks_of(index: int) -> dict[str, Any]:
    """The clip mask's kernels with one rotation on every input, in a worker."""
    torch.set_num_threads(1)
    rotation, seed = ROTATIONS[index], torch.tensor([SEED])
    result: dict[str, Any] = {"rotation": str(rotation or ""), "comparisons": 0, "unequal": {}}
    try:
        for name, make in inputs().items():
            for q in QUANTIZERS:
                if found := quantize_differences(make(), q, rotation, seed, SITE, "cuda"):
                    result["unequal"][f"{q} {name}"] = found
                result["comparisons"] += 1
        for y, columns in gradients(rotation.size) if rotation else []:
            for dtype, masked in itertools.product((torch.bfloat16, torch.float32), (True, False)):
                if not unrotate_equal(y, rotation, columns, dtype, masked, seed, SITE, "cuda"):
                    result["unequal"][f"unrotated {tuple(y.shape)} {columns} {dtype} {masked}"] = True
                result["comparisons"] += 1
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        result["traceback"] = traceback.format_exc()[-1500:]
    return result


def equality(pool: Any, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    start = time.time()
    cases = list(itertools.product(range(len(CASES)), (True, False)))
    jobs = [(*case, first, start + EQUALITY_SECONDS) for first in range(PARTS_OF_INPUTS) for case in cases]
    masks = pool.map_async(masks_of, range(len(ROTATIONS)), chunksize=1)  # first: they take seconds, the others minutes
    others = pool.imap_unordered(equality_of, jobs, chunksize=1)
    masked = masks.get()
    found: dict[str, Any] = {"masks equal": not any(r["unequal"] or "failed" in r for r in masked), "masks": masked}
    save(found)
    rows = together(list(others), ("source", "quantizer", "rotation", "transposed"))
    bad = [r for r in rows if r["unequal"] or r["failed"] or "cut off before" in r]
    return {
        **found,
        "cases": len(rows),
        "inputs each": len(inputs()),
        "comparisons": sum(r["inputs"] for r in rows),
        "fewest of a case": min(r["inputs"] for r in rows),
        "all equal": not bad,
        "not all equal": bad,
        "seconds": time.time() - start,
    }


# -- speed

# Rows, units, warps and turns of the tiles tried.
TILES = (
    (16, 8, 1, 1),
    (16, 8, 2, 4),
    (32, 8, 1, 4),
    (32, 8, 2, 1),
    (64, 8, 4, 1),
    (128, 8, 4, 1),
    (64, 4, 2, 4),
    (64, 2, 1, 4),
    (256, 4, 8, 1),
)


def packed_operand(source: Quantizer, shape: tuple[int, int]) -> kernels.Packed:
    """The codes of a Gaussian (rows, columns), by the kernels; the operand is its transpose."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    codes, scales, _ = plain.quantize(x, source)
    return kernels.Packed(codes, scales, None, source, shape[1])


def passes(index: int, shape: tuple[int, int]) -> dict[str, tuple[Plan, list[Tensor], int]]:
    """By name: the plan, all the tensors of its kernel, and the bytes that must move."""
    source, q, rotation = RECIPES[index]
    packed = packed_operand(source, shape)
    seed, amax = torch.tensor([SEED], device="cuda"), torch.tensor(5.0, device="cuda")
    tensors = packed.codes, packed.scales
    run = kernels.PackedRun(tensors, source, packed.columns, packed.dtype, packed.transposed, q, rotation, 1)
    plans = {"packed": run.packed(False), "decoded": run.decoded(torch.bfloat16, False)}
    if q.needs_amax:
        plans["amax"] = run.amax()
    found = {}
    for name, plan in plans.items():
        outputs = [make() for make in plan.makers]
        found[name] = plan, [*plan.read(tensors, amax, seed, SITE), *outputs], sum(t.nbytes for t in (*tensors, *outputs))
    return found


def tiles(spec: Any, target: Any) -> list[Tile]:
    least_rows, least_units = spec.least_tile
    found = [tile_of(spec, target)]
    for rows, units, warps, turns in TILES:
        tile = Tile(max(rows, least_rows), max(units, least_units), warps, turns)
        if tile not in found:
            found.append(tile)
    return found


def warm(job: tuple[int, str, int]) -> None:
    """Compile one kernel in a worker, into Triton's cache on disk."""
    index, name, i = job
    try:
        plan, given, _ = passes(index, (512, 512))[name]
        found = tiles(plan.spec, plan.target)
        if i < len(found):
            plan.tiled(found[i])(given, (SITE, SITE))
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.empty_cache()  # the measurement will meet the same error and report it


def rivals(index: int, shape: tuple[int, int]) -> dict[str, float]:
    """Seconds of the way without these kernels: decode to BF16 by Inductor, then amax and quantize from memory."""
    source, q, rotation = RECIPES[index]
    packed = packed_operand(source, shape)
    seed = torch.tensor([SEED], device="cuda")

    @torch.compile(dynamic=False)
    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        return reference.decode(codes, scales, source, shape[1], torch.bfloat16)

    operand = decode(packed.codes, packed.scales).t()
    given = torch.tensor(5.0, device="cuda")
    draws: dict[str, Any] = {"rotation": rotation, "seed": seed}
    found = {
        "decode by Inductor": graph_seconds(lambda: decode(packed.codes, packed.scales)),
        "packed, from BF16": graph_seconds(lambda: plain.quantize(operand, q, amax=given, site=SITE, **draws)),
        "decoded, from BF16": graph_seconds(lambda: plain.fake_quantize(operand, q, amax=given, site=SITE, **draws)),
    }
    if q.needs_amax:
        found["amax, from BF16"] = graph_seconds(lambda: plain.amax(operand, signs_site=SITE, **draws))
    return found


def masks_speed(shape: tuple[int, int], copy: float) -> dict[str, Any]:
    """Quartet's masked kernels, the launchers as they are: shares of a copy, and microseconds of the oracle by Inductor."""
    q, rotation = QUANTIZERS[0], ROTATIONS[1]
    assert rotation is not None
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    _, _, _, mask = masks.quantize(x, q, rotation=rotation)

    @torch.compile(dynamic=False)
    def quantize(x: Tensor) -> tuple[Tensor, ...]:
        rotated = reference.rotate(x, rotation, None, 0)
        codes, scales, _ = reference.quantize(rotated, q)
        return codes, scales, reference.clip_mask(rotated, scales, q)

    @torch.compile(dynamic=False)
    def back(x: Tensor, mask: Tensor) -> Tensor:
        return reference.unrotate(reference.apply_mask(x, mask), rotation, None, 0, shape[1], torch.bfloat16)

    made = functools.partial(masks.unrotate, x, rotation, columns=shape[1], dtype=torch.bfloat16, mask=mask)
    found: dict[str, Any] = {}
    for name, run, rival, moved in (
        ("quantize and mask", lambda: masks.quantize(x, q, rotation=rotation), lambda: quantize(x), x.numel() * (2 + 21 / 32)),
        ("mask and rotate back", made, lambda: back(x, mask), x.numel() * (4 + 1 / 8)),
    ):
        seconds, other = graph_seconds(run), graph_seconds(rival)
        found[name] = {
            "of copy": round(moved / seconds / copy, 3),
            "microseconds": seconds * 1e6,
            "oracle by Inductor, microseconds": other * 1e6,
        }
    return found


def eden_speed(shape: tuple[int, int], copy: float) -> dict[str, Any]:
    """MS-EDEN over H128 from BF16 and from codes, all passes, the launchers as they are: packed and decoded output.

    of copy: of the bytes that must move, the operand read once, the result written once. amax: algorithm 1, the operand read
    twice. posthoc: read once.
    """
    source, _, rotation = RECIPES[0]
    seed = torch.tensor([SEED], device="cuda")
    base = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    packed = packed_operand(source, shape)
    half = 0.5 + 1 / 16
    found: dict[str, Any] = {}
    for posthoc, (name, operand) in itertools.product(
        (False, True), (("BF16", base), ("BF16 transposed", base.t()), ("codes transposed", packed))
    ):
        q = NVFP4(rounding="ms_eden", posthoc=posthoc)
        draws: dict[str, Any] = {"rotation": rotation, "seed": seed, "site": SITE}
        from_codes = isinstance(operand, kernels.Packed)
        for output, function in (
            ("packed", kernels.requantize if from_codes else plain.quantize),
            ("decoded", kernels.fake_requantize if from_codes else plain.fake_quantize),
        ):
            seconds = graph_seconds(functools.partial(function, operand, q, **draws))
            moved = base.numel() * ((half if from_codes else 2.0) + (half if output == "packed" else 2.0))
            found[f"{name}, {output}, {'posthoc' if posthoc else 'amax'}"] = {
                "of copy": round(moved / seconds / copy, 3),
                "microseconds": round(seconds * 1e6, 1),
            }
    return found


def speed(pool: Any, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    start = time.time()
    names = ("packed", "decoded", "amax")
    jobs = [(i, n, t) for i in range(len(RECIPES)) for n in names for t in range(len(TILES) + 1)]
    pool.map(warm, jobs, chunksize=2)
    result: dict[str, Any] = {"compile seconds": time.time() - start}
    for shape in SIZES:
        copy = copy_rate(shape)
        rows: dict[str, Any] = {"copy, TB/s": copy / 1e12}
        result[f"{shape}"] = rows
        for name, measure in (("ms_eden", eden_speed), ("masks", masks_speed)):
            try:
                rows[name] = measure(shape, copy)
            except Exception as error:
                rows[name] = f"{type(error).__name__}: {str(error)[:300]}"
            save(result)
        for index, name in enumerate(NAMES):
            best: dict[str, float] = {}
            usual: dict[str, float] = {}
            bytes_: dict[str, int] = {}
            entry: dict[str, Any] = {}
            rows[name] = entry
            for kind, (plan, given, moved) in passes(index, shape).items():
                bytes_[kind] = moved
                found: list[Any] = []
                candidates = tiles(plan.spec, plan.target)
                for i, tile in enumerate(candidates if shape == SIZES[0] else candidates[:1]):
                    try:
                        launch = functools.partial(plan.tiled(tile), given, (SITE, SITE))
                        compiled = launch()
                        seconds = graph_seconds(launch)
                    except Exception as error:
                        entry.setdefault("failed", {})[f"{kind} {tile}"] = f"{type(error).__name__}: {str(error)[:200]}"
                        continue
                    share = round(moved / seconds / copy, 3)
                    found.append([tile.rows, tile.units, tile.warps, tile.turns, share, compiled.n_regs, compiled.n_spills])
                    if i == 0:
                        usual[kind] = seconds
                    best[kind] = min(seconds, best.get(kind, seconds))
                entry[kind] = {
                    "usual, of copy": found[0][4] if found else None,
                    "usual, microseconds": usual.get(kind, 0.0) * 1e6,
                    "rows, units, warps, turns, of copy, registers, spills": found,
                }
                save(result)
            for kind in ("packed", "decoded"):
                seconds = usual[kind] + usual.get("amax", 0.0)
                entry[f"both passes, {kind}, of a copy of the bytes"] = round(
                    (bytes_[kind] + bytes_.get("amax", 0)) / seconds / copy, 3
                )
                entry[f"both passes, {kind}, microseconds"] = seconds * 1e6
            try:
                other = rivals(index, shape)
                entry["without these kernels, microseconds"] = {k: v * 1e6 for k, v in other.items()}
                for kind in ("packed", "decoded"):
                    seconds = sum(v for k, v in other.items() if k.split(",")[0] not in ("packed", "decoded") or kind in k)
                    entry[f"speedup, {kind}"] = round(seconds / (usual[kind] + usual.get("amax", 0.0)), 2)
            except Exception as error:
                entry["rivals failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            save(result)
    return result


def main() -> None:
    path, chosen = Path(sys.argv[1]), sys.argv[2:] or ["equality", "speed"]
    import triton

    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
    }

    def save(name: str, value: Any) -> None:
        result[name] = value
        path.write_text(json.dumps(result, indent=1) + "\n")

    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        parts: dict[str, Callable[[], Any]] = {
            "equality": lambda: equality(pool, functools.partial(save, "equality")),
            "speed": lambda: speed(pool, functools.partial(save, "speed")),
        }
        for name in chosen:
            try:
                save(name, parts[name]())
            except Exception as error:  # one part's failure must not lose the other's figures
                save(name, f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}")
            torch.cuda.empty_cache()
            print(name, str(result[name])[:600], flush=True)


if __name__ == "__main__":
    main()
