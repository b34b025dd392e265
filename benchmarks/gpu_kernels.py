"""The generated quantize kernels on a CUDA GPU: equality with the oracle, and speed against a copy of as many bytes.

    python -m benchmarks.gpu_kernels RESULT.json [equality] [speed | usual] [CASE ...]

Equality: every quantizer of tests/runtime/cases.py and every operand of every recipe, on every kind of data there, odd shapes,
strides and dtypes; the oracle runs on the CPU. Speed: GPU time of CUDA graphs of the kernel alone, the tensor amax given, bytes
counted once; the copy is ``y.copy_(x)``. For each case the usual tile and the best of a few; "usual": that tile alone. CASE:
the names of those to time, e.g. "stochastic decoded"; all by default.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4.kernels import quantize as kernels
from fp4.kernels.build import build
from fp4.kernels.helpers import HELPERS
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import flat
from fp4.kernels.launch import launcher as launcher_of
from fp4.kernels.target import target_of
from fp4.kernels.tiles import Tile, fitted
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation
from tests.kernels.equality import differences, recipe_operands, supported
from tests.runtime.cases import DATA, QUANTIZERS, SHAPES, gaussian

SEED, SITE = 5, 3
PARTS = {"equality", "speed", "usual"}
WORKERS = 12
EQUALITY_SECONDS = 170.0
PARTS_OF_INPUTS = 8  # a specification's inputs are compared in so many parts
H16, H128 = Rotation(16, signs="fixed"), Rotation(128, signs="fresh", bf16=False)


def operands() -> list[tuple[Quantizer, Rotation | None]]:
    """What the recipes quantize, and every quantizer of the tests without a rotation."""
    found = dict.fromkeys(recipe_operands())
    found.update(((q, None), None) for q in QUANTIZERS if supported(q))
    return list(found)


def inputs() -> dict[str, Callable[[], Tensor]]:
    """Operands by name. Functions, so that a worker makes only what it needs."""
    made: dict[str, Callable[[], Tensor]] = dict(DATA)
    for name in ("gaussian", "outliers", "quarter_grid", "midpoints", "wide"):
        made[f"{name}, bf16"] = functools.partial(_bf16, name)
    for shape in SHAPES:
        made[f"{shape}"] = functools.partial(gaussian, *shape)
        made[f"{shape}, a transpose"] = functools.partial(_transpose, *shape)
    made["every third column"] = lambda: gaussian(33, 240)[:, ::3]
    made["one row expanded"] = lambda: gaussian(1, 96).expand(33, 96)
    made["large, bf16"] = lambda: gaussian(1000, 1032).bfloat16()
    made["large transpose, bf16"] = lambda: gaussian(1032, 1000).bfloat16().t()
    return made


def _bf16(name: str) -> Tensor:
    return DATA[name]().bfloat16()


def _transpose(rows: int, columns: int) -> Tensor:
    return gaussian(rows, columns).t().contiguous().t()


def on_gpu(x: Tensor) -> Tensor:
    """A copy with the strides of x, those of 0 too."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


BRIEF_EXCEPT = ("outliers, bf16", "midpoints", "(129, 257), a transpose")


def equality_of(case: tuple[int, int, float]) -> dict[str, Any]:
    """One operand specification on every PARTS_OF_INPUTS-th input from the given one, in a worker process."""
    index, first, deadline = case
    torch.set_num_threads(1)
    q, rotation = operands()[index]
    result: dict[str, Any] = {"quantizer": str(q), "rotation": str(rotation or ""), "inputs": 0, "unequal": {}, "failed": {}}
    for name, make in list(inputs().items())[first::PARTS_OF_INPUTS]:
        if time.time() > deadline:
            result["cut off before"] = name
            break
        try:
            x = make()
            brief = name not in BRIEF_EXCEPT
            seed = torch.tensor([SEED], device="cuda")
            if found := differences(on_gpu(x), q, rotation, seed, SITE, oracle="cpu", brief=brief):
                result["unequal"][name] = found
            result["inputs"] += 1
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {str(error)[:300]}"
            if len(result["failed"]) == 1:
                result["traceback"] = traceback.format_exc()[-1500:]
            if "CUDA error" in str(error):
                break
    return result


def together(rows: list[dict[str, Any]], names: tuple[str, ...] = ("quantizer", "rotation")) -> list[dict[str, Any]]:
    """The parts of each case as one. names: of what tells cases apart."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        whole = found.setdefault(tuple(row[name] for name in names), row)
        if whole is not row:
            whole["inputs"] += row["inputs"]
            whole["unequal"] |= row["unequal"]
            whole["failed"] |= row["failed"]
            for key in ("cut off before", "traceback"):
                if key in row:
                    whole.setdefault(key, row[key])
    return list(found.values())


def equality(pool: Any) -> dict[str, Any]:
    """Some inputs of every specification first, then others, so that a run that ends early has compared each."""
    start = time.time()
    deadline = start + EQUALITY_SECONDS
    cases = [(i, first, deadline) for first in range(PARTS_OF_INPUTS) for i in range(len(operands()))]
    rows = together(list(pool.imap_unordered(equality_of, cases, chunksize=1)))
    bad = [r for r in rows if r["unequal"] or r["failed"] or "cut off before" in r]
    return {
        "specifications": len(rows),
        "inputs each": len(inputs()),
        "comparisons": sum(r["inputs"] for r in rows),
        "fewest of a specification": min(r["inputs"] for r in rows),
        "all equal": not bad,
        "not all equal": bad,
        "seconds": time.time() - start,
    }


def graph_replays_draw_anew() -> dict[str, Any]:
    """A captured quantize reads the seed on the device: another seed, other codes, those of an eager call."""
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    q, seed = NVFP4(rounding="stochastic"), torch.tensor([1], device="cuda")

    def run() -> Tensor:
        return kernels.quantize(x, q, rotation=H16, seed=seed)[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    equal, seen = [], []
    for value in (1, 2, 3):
        seed.fill_(value)
        graph.replay()
        seen.append(captured.clone())
        equal.append(torch.equal(captured, run()))
    return {"equal to eager": equal, "all different": not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))}


def beyond_int32() -> dict[str, Any]:
    """More than 2^31 elements: the last rows are quantized like the same rows alone."""
    x = torch.randn(64, 16384, device="cuda", dtype=torch.bfloat16).repeat(2050, 1)
    one = torch.tensor(4.0, device="cuda")
    codes, scales, _ = kernels.quantize(x, NVFP4(), amax=one)
    few = kernels.quantize(x[-64:], NVFP4(), amax=one)
    flipped = kernels.quantize(x.t(), NVFP4(), amax=one)
    few_flipped = kernels.quantize(x[-4096:].t(), NVFP4(), amax=one)
    return {
        "elements": x.numel(),
        "rows": torch.equal(codes[-64:], few[0]) and torch.equal(scales[-64:], few[1]),
        "columns": torch.equal(flipped[0][:, -2048:], few_flipped[0]) and torch.equal(flipped[1][:, -256:], few_flipped[1]),
    }


def reciprocals() -> dict[str, int]:
    """By exponent, how many significands have a reciprocal, by the kernels' helper, that is not the nearest FP32."""
    text = f"import triton\nimport triton.language as tl\n\n\n{HELPERS['near_inverse']}\n\n\n"
    text += "@triton.jit\ndef kernel(x_ptr, N: tl.constexpr):\n    i = x_ptr + tl.program_id(0) * N + tl.arange(0, N)\n"
    kernel, found = build(text + "    tl.store(i, near_inverse(tl.load(i)))\n"), {}
    for exponent in (-126, -125, -100, -64, -1, 0, 1, 64, 100, 124, 125):
        x = (torch.arange(1 << 23, device="cuda", dtype=torch.int32) | (exponent + 127) << 23).view(torch.float32)
        nearest = (1 / x.double()).float()
        kernel[(x.numel() // 1024,)](x, N=1024)
        found[f"2^{exponent}"] = int((x != nearest).sum())
    return found


# -- speed

SIZES = ((16384, 4096), (4096, 11008))
Case = tuple[str, KernelSpec]


def speed_cases() -> list[Case]:
    sr = NVFP4(rounding="stochastic")
    found: list[Case] = []
    for memory in ("rows", "columns"):
        tail = "" if memory == "rows" else ", along dim 0"
        for output in ("decoded", "packed"):
            for name, q, rotation in (
                ("nearest", NVFP4(), None),
                ("nearest 16x16", NVFP4(block=(16, 16)), None),
                ("nearest H16", NVFP4(), H16),
                ("nearest H128", NVFP4(), H128),
                ("stochastic", sr, None),
                ("stochastic H16", sr, H16),
                ("four_six", NVFP4(four_six=True), None),
                ("ms_eden H128", NVFP4(rounding="ms_eden"), H128),
                ("mxfp4 floor", MXFP4(), None),
            ):
                found.append((f"{name} {output}{tail}", KernelSpec(q, rotation, output=output, memory=memory)))
        found.append((f"amax{tail}", KernelSpec(None, output="amax", memory=memory)))
        found.append((f"amax H16{tail}", KernelSpec(None, H16, output="amax", memory=memory)))
        found.append((f"amax H128{tail}", KernelSpec(None, H128, output="amax", memory=memory)))
        found.append((f"rotated H16{tail}", KernelSpec(None, H16, output="rotated", memory=memory)))
    for name, q in (
        ("outer 128", NVFP4(outer=128)),
        ("mxfp4 quest", MXFP4(scale_rule="quest")),
        ("mxfp4 32x32", MXFP4(block=(32, 32))),
        ("mxfp8", MXFP8()),
        ("fp8", FP8()),
        ("fp8 128x128", FP8(block=(128, 128))),
    ):
        found.append((f"{name} packed", KernelSpec(q)))
    found.append(("mxfp4 floor decoded e5m2", KernelSpec(MXFP4(), output="decoded", dtype="e5m2")))
    named = set(sys.argv[2:]) - PARTS
    return [case for case in found if not named or case[0] in named]


# Rows, units and warps of the tiles tried.
BY_ROWS = (
    (4, 32, 4), (8, 32, 4), (2, 32, 2), (1, 64, 2), (1, 32, 1), (2, 32, 1), (2, 64, 4), (2, 64, 2), (4, 64, 4), (1, 256, 4),
    (8, 64, 4), (4, 64, 2), (2, 128, 8), (1, 128, 4), (1, 128, 2),
)  # fmt: skip
BY_COLUMNS = (
    (64, 16, 4), (64, 8, 4), (32, 16, 4), (64, 4, 4), (64, 4, 2), (128, 4, 4), (32, 8, 2), (32, 8, 4), (64, 16, 8), (16, 16, 4),
    (64, 2, 1), (128, 2, 2), (256, 2, 4), (64, 4, 1),
)  # fmt: skip


def tiles(spec: KernelSpec, shape: tuple[int, int]) -> list[Tile]:
    """The usual tile of the shape first, then others of 1024 to 16384 elements."""
    rows, columns = shape if spec.memory == "rows" else shape[::-1]
    columns = flat(spec, {"rows": rows, "columns": columns, "stride_r": columns}, columns)["columns"]
    found = [fitted(spec, target_of(torch.device("cuda")), math.ceil(columns / spec.block[1]) * spec.block_units)]
    least_rows, least_units = spec.least_tile
    if "usual" in sys.argv:
        return found
    for rows, units, warps in BY_ROWS if spec.memory == "rows" else BY_COLUMNS:
        tile = Tile(max(rows, least_rows), max(units, least_units), warps)
        if tile not in found and 512 <= tile.rows * tile.units * spec.unit <= 32768:
            found.append(tile)
    return found


def launcher(spec: KernelSpec, shape: tuple[int, int]) -> tuple[Callable[[Tile | None], Any], int]:
    """A function that launches the kernel on a matrix of the shape with a tile, and the bytes that must move."""
    base = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = base if spec.memory == "rows" else base.t()
    rows, width = x.shape
    q, moved = spec.quantizer, x.nbytes
    pointers: dict[str, Tensor] = {
        "amax_ptr": torch.tensor(5.0, device="cuda"),
        "tensor_scale_ptr": torch.empty((), device="cuda"),
    }
    if spec.output == "amax":
        pointers["amax_ptr"] = torch.zeros((), dtype=torch.int32, device="cuda")
    elif spec.output == "packed":
        assert q is not None
        bits = 4 if q.packed else 8
        words = torch.uint8 if not q.packed else torch.int64 if spec.unit == 16 else torch.int32
        codes = torch.empty(rows * width * bits // 8, dtype=torch.uint8, device="cuda")
        dtype = torch.float32 if spec.fp8_blocks else torch.uint8
        scales = torch.empty(math.ceil(rows / q.block[0]) * math.ceil(width / q.block[1]), dtype=dtype, device="cuda")
        moved += codes.nbytes + scales.nbytes
        pointers |= {"codes_ptr": codes.view(words), "scales_ptr": scales}
        if q.has_outer_scale:
            pointers["tensor_scale_ptr"] = torch.empty(rows, math.ceil(width / q.outer), device="cuda")
    else:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(spec.dtype, torch.uint8)
        y = torch.empty(rows, width, device="cuda", dtype=dtype)
        moved += y.nbytes
        pointers["y_ptr"] = y
    seed = torch.tensor([SEED], device="cuda")
    target = target_of(x.device)

    @functools.cache
    def launches(tile: Tile | None) -> Callable[[], Any]:
        return launcher_of(spec, target, x, width, seed, SITE, SITE, pointers, tile)

    return lambda tile: launches(tile)(), moved


def warm(job: tuple[int, int, tuple[int, int]]) -> None:
    """Compile a case's kernels in a worker, into Triton's cache on disk."""
    case, tile, shape = job
    spec = speed_cases()[case][1]
    try:
        launcher(spec, (256, 512))[0](tiles(spec, shape)[tile])
        torch.cuda.synchronize()
    except Exception:
        torch.cuda.empty_cache()  # the measurement will meet the same error and report it


def graph_seconds(run: Callable[[], Any], launches: int = 20) -> float:
    """GPU seconds of one launch: the median of five replays of a graph of many."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    found = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / launches)
    return statistics.median(found)


def copy_rate(shape: tuple[int, int]) -> float:
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / graph_seconds(lambda: y.copy_(x))


def speed(pool: Any, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    cases = speed_cases()
    start = time.time()
    jobs = [(i, j, shape) for shape in SIZES for i, (_, spec) in enumerate(cases) for j in range(len(tiles(spec, shape)))]
    pool.map(warm, jobs, chunksize=2)
    result: dict[str, Any] = {"compile seconds": time.time() - start, "kernels compiled": len(jobs)}
    for shape in SIZES:
        copy = copy_rate(shape)
        rows: dict[str, Any] = {"copy, TB/s": copy / 1e12}
        result[f"{shape}"] = rows
        for name, spec in cases:
            found: dict[str, Any] = {}
            try:
                run, moved = launcher(spec, shape)
                for i, tile in enumerate(tiles(spec, shape)):
                    try:
                        compiled = run(tile)
                        rate = moved / graph_seconds(functools.partial(run, tile))
                        entry = {
                            "TB/s": round(rate / 1e12, 3),
                            "of copy": round(rate / copy, 3),
                            "tile": list(astuple(tile)),
                            "registers": compiled.n_regs,
                            "spills": compiled.n_spills,
                        }
                    except Exception as error:
                        found.setdefault("failed", {})[str(tile)] = f"{type(error).__name__}: {str(error)[:200]}"
                        continue
                    if i == 0:
                        found["usual"] = entry
                    if entry["TB/s"] > found.get("best", {"TB/s": 0})["TB/s"]:
                        found["best"] = entry
                    found.setdefault("all", []).append([*entry["tile"], entry["of copy"]])
            except Exception as error:
                found["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows[name] = found
        save(result)
    return result


def host_microseconds() -> dict[str, float]:
    """CPU time of one call, the kernel being small."""
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    seed, one = torch.tensor([SEED], device="cuda"), torch.tensor(1.0, device="cuda")
    stochastic = NVFP4(rounding="stochastic")
    found = {}
    for name, run in (
        ("quantize, amax given", lambda: kernels.quantize(x, NVFP4(), amax=one)),
        ("quantize", lambda: kernels.quantize(x, NVFP4())),
        (
            "fake_quantize H16 stochastic",
            lambda: kernels.fake_quantize(x, stochastic, rotation=H16, seed=seed),
        ),
    ):
        for _ in range(20):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            run()
        found[name] = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    return found


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

    if "speed" in chosen or "usual" in chosen:
        save("host microseconds", host_microseconds())  # while no worker starts
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        parts: list[tuple[str, Callable[[], Any]]] = []
        if "equality" in chosen:
            parts += [
                ("graph replays", graph_replays_draw_anew),
                ("beyond int32", beyond_int32),
                ("unequal reciprocals", reciprocals),
                ("equality", lambda: equality(pool)),
            ]
        if "speed" in chosen or "usual" in chosen:
            parts.append(("speed", lambda: speed(pool, functools.partial(save, "speed"))))
        for name, run in parts:
            try:
                save(name, run())
            except Exception as error:  # one part's failure must not lose the others' figures
                save(name, f"failed: {type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}")
            torch.cuda.empty_cache()
            print(name, str(result[name])[:600], flush=True)


if __name__ == "__main__":
    main()
