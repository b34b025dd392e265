"""The generated quantize kernels beside other projects' quantizers, on one CUDA GPU in one run.

    python -m benchmarks.gpu_rivals RESULT.json [--peers DIR] [--quick] [--warm]

For (16384, 4096) and (4096, 11008) BF16 (--quick: the first alone, the amax given): GPU time of an operation, ours and each
rival's that has it, as a share of a device copy of the bytes that must move: 2 an element, read once, and what is written: 2 an
element decoded, 1/2 and a block scale packed. An amax pass reads again what is not counted again. Times are of CUDA graphs,
which leave out the host, or of events where capture fails ("timed by"). Along dim 0 the result is the quantized transpose,
contiguous. Decoded, ours leaves the tensor scale to the GEMM, as in a compiled model; "ours, scaled" multiplies by it, as the
rivals do.

"amax": given, to both; computed, by both, each in its own way, ours by one kernel more; none: MXFP4 has none. "bar": how many
times faster ours should be: 1 for rounding to nearest along rows; 2 with another rounding, four_six, a rotation or a transpose.
"error": squared error over squares, of decoded results without a rotation; a rival which does less shows it.

Rivals: plain fake quantizers under torch.compile, below; and those of --peers: plain checkouts, imported without a package's
own __init__ where that imports more than its kernels need. What fails is recorded with the reason.

    DIR/quartet2     IST-DASLab/Quartet-II    8776a90b7aa0c0a400ad858a3c05a66f7ec55b73
    DIR/fouroversix  mit-han-lab/fouroversix  dadfad6901d473a734fe71e0b082e70ee993e23a
    DIR/torchao      pytorch/ao               36027d82d1ad9949597ea16002ff4940374b1b94

Each is on GitHub under that name: clone it there, check the commit out. Python files are enough: of Quartet II
src/models/quantization (it needs SciPy), of fouroversix src/fouroversix, of torchao torchao. Quartet II's and fouroversix's
CUDA kernels and torchao's Triton kernels need a Blackwell GPU. Elsewhere the rivals are the first two's Triton kernels and
torchao's quantizers compiled by Inductor, as its users run them. Kernels of Quartet II's that tune themselves do it anew for
each case. Not quite alike: fouroversix rounds MXFP4 scales up, ours and torchao's down, and its stochastic rounding in software
has the same draws in every tile; Quartet II's MS-EDEN also gathers the next step's amax, and its seed is constant here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import H16, H128, SEED, SITE, SIZES, copy_rate, graph_seconds
from fp4.kernels import quantize as kernels
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation

WORKERS, WARM_SECONDS = 12, 240
OPERATIONS: dict[str, tuple[Quantizer, Rotation | None]] = {
    "nearest": (NVFP4(), None),
    "nearest H16": (NVFP4(), H16),
    "stochastic": (NVFP4(rounding="stochastic"), None),
    "four_six": (NVFP4(four_six=True), None),
    "ms_eden H128": (NVFP4(rounding="ms_eden"), H128),
    "mxfp4": (MXFP4(), None),
}
PLAIN = ("nearest", "mxfp4")


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation. along: the dimension its blocks lie along. output: decoded or packed. amax: given, computed or none."""

    operation: str
    along: int
    output: str
    amax: str

    def __str__(self) -> str:
        return f"{self.operation} {self.output}{'' if self.along else ', along dim 0'}, amax {self.amax}"

    @property
    def bar(self) -> float:
        return 1.0 if self.operation in PLAIN and self.along else 2.0

    @property
    def bytes(self) -> float:
        """Bytes an element that must move."""
        return 4 if self.output == "decoded" else 2.5 + 1 / OPERATIONS[self.operation][0].block[1]

    def given(self, x: Tensor) -> Tensor | None:
        """The amax that both are given: any of the right order does."""
        return torch.tensor(8.0, device=x.device) if self.amax == "given" else None


Run = Callable[[], Any]
Build = Callable[[Case, Tensor], Run | None]  # None: the rival has no such operation


def cases(quick: bool = False) -> Iterator[Case]:
    for operation, along, output in itertools.product(OPERATIONS, (1, 0), ("decoded", "packed")):
        for amax in ("given", "computed") if OPERATIONS[operation][0].needs_amax else ("none",):
            if not (quick and amax == "computed"):
                yield Case(operation, along, output, amax)


def ours(case: Case, x: Tensor) -> partial[Any]:
    q, rotation = OPERATIONS[case.operation]
    run = kernels.quantize if case.output == "packed" else kernels.fake_quantize
    seed = torch.tensor([SEED], device=x.device)
    return partial(run, x if case.along else x.t(), q, amax=case.given(x), rotation=rotation, seed=seed, site=SITE)


def scaled(case: Case, x: Tensor) -> Run | None:
    """Ours with the tensor scale multiplied into the decoded values."""
    if case.output == "packed" or case.amax == "none":
        return None
    run = partial(ours(case, x), scaled=True)
    return lambda: run()[0]


OURS: dict[str, Build] = {"ours": ours, "ours, scaled": scaled}


# -- torch.compile


def fake(x: Tensor, amax: Tensor | None, along: int = 1, h: Tensor | None = None, stochastic: bool = False) -> Tensor:
    """NVFP4 quantized and decoded as one writes it in an afternoon: (R, C), or along dim 0 (C, R), BF16, contiguous."""
    x = x if along else x.t()
    if h is not None:
        x = (x.reshape(-1, h.shape[0]) @ h).view(x.shape)
    b = x.float().unflatten(-1, (-1, 16))
    t = (x.abs().amax().float() if amax is None else amax) / (6 * 448)
    s = (b.abs().amax(-1, keepdim=True) / (6 * t)).to(torch.float8_e4m3fn).float().clamp(min=2**-9) * t
    a = (b / s).abs().clamp(max=6)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    a = ((a / step + torch.rand_like(a)).floor() if stochastic else (a / step).round()) * step
    return (a.copysign(b) * s).flatten(-2).to(x.dtype).contiguous()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled anew: what was compiled before would count against Dynamo's limit of compilations of one function."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


@cache
def hadamard(n: int, device: torch.device) -> Tensor:
    """H_n / sqrt(n), n x n, BF16."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / n**0.5).to(device, torch.bfloat16)


def inductor(case: Case, x: Tensor) -> Run | None:
    if case.output == "packed" or case.operation not in ("nearest", "nearest H16", "stochastic"):
        return None
    h = hadamard(16, x.device) if case.operation == "nearest H16" else None
    return partial(compiled(fake), x, case.given(x), case.along, h, case.operation == "stochastic")


# -- peers


def constant_seed(module: Any) -> None:
    """Give a module's launches one seed: Triton compiles anew for a multiple of 16, which no graph can capture."""
    module.randint = lambda low, high: SEED


def bare(name: str, folder: Path) -> None:
    """Make `name` a package of the folder without running its __init__."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder.name} for {name}")
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def eden(module: Any, case: Case, x: Tensor, **more: Any) -> Run:
    """Quartet II's MS-EDEN as it uses it: the rotated amax, then one kernel that rotates and quantizes."""
    constant_seed(module)
    module.eden_1x16s_fp4_kernel.cache.clear()
    h = hadamard(128, x.device)
    x = x if case.along else x.t()
    run = partial(module.eden_1x16s_fp4_kernel_wrapper, x, h, 17 / 16 * 0.93, 16, **more)
    if (amax := case.given(x)) is not None:
        return lambda: run(current_amax=amax)[0]
    of = compiled(lambda x: (x.reshape(-1, 128) @ h.T).abs().max().float())
    return lambda: run(current_amax=of(x))[0]


def quartet2(folder: Path) -> dict[str, Build]:
    for name in ("models", "models.quantization", "models.quantization.quantizers", "models.quantization.schemes"):
        bare(name, folder / "src" / name.replace(".", "/"))
    plain = importlib.import_module("models.quantization.quantizers.nvfp4_triton")
    scheme = importlib.import_module("models.quantization.schemes.quartet_2")
    constant_seed(plain)

    def build(case: Case, x: Tensor) -> Run | None:
        if case.output == "packed" or case.operation == "mxfp4":
            return None
        if case.operation == "ms_eden H128":
            return eden(scheme, case, x)
        sr = case.operation == "stochastic"
        kernel = plain.sr_1x16s_fp4_kernel if sr else plain.rtn_1x16s_fp4_kernel
        kernel.cache.clear()
        how: dict[str, Any] = {
            "scale_override": 17 / 16 if sr else 1.0,
            "group_size": 16,
            "four_over_six": case.operation == "four_six",
        }
        amax, h = case.given(x), hadamard(16, x.device)
        x = x if case.along else x.t()

        def run() -> Tensor:
            y = (x.reshape(-1, 16) @ h).view(x.shape) if case.operation == "nearest H16" else x.contiguous()
            if amax is None:
                return (plain.sr_1x16s_fp4_kernel_wrapper if sr else plain.rtn_1x16s_fp4_kernel_wrapper)(y, **how)
            out, n, seed = torch.empty_like(y), y.numel(), {"seed": SEED} if sr else {}
            kernel[lambda meta: (-(-n // meta["BLOCK_SIZE"]),)](y, amax, out, n_elements=n, **how, **seed)
            return out

        return run

    return {"Quartet II": build}


def fouroversix(folder: Path) -> dict[str, Build]:
    bare("fouroversix", folder / "src" / "fouroversix")
    ops = importlib.import_module("fouroversix.kernels.triton.ops")
    scheme = importlib.import_module("fouroversix.kernels.triton.quartet_ii")

    def build(case: Case, x: Tensor) -> Run | None:
        if case.operation == "ms_eden H128":
            return eden(scheme, case, x, dtype=ops.DataType.nvfp4) if case.output == "decoded" else None
        if case.operation == "nearest H16" and case.amax == "given":
            return None  # with a rotation it always computes the amax
        return partial(
            ops.quantize if case.output == "packed" else ops.pseudo_quantize,
            x,
            case.given(x),
            hadamard(16, x.device) if case.operation == "nearest H16" else None,
            dtype=ops.DataType.mxfp4 if case.operation == "mxfp4" else ops.DataType.nvfp4,
            round_style=ops.RoundStyle.stochastic if case.operation == "stochastic" else ops.RoundStyle.nearest,
            scale_rule=ops.ScaleRule.mse if case.operation == "four_six" else ops.ScaleRule.static_6,
            transpose=not case.along,
        )

    return {"fouroversix": build}


def torchao(folder: Path) -> dict[str, Build]:
    if not (folder / "torchao").is_dir():
        raise FileNotFoundError("no folder torchao for torchao")
    sys.path.insert(0, str(folder))
    nv = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")

    def nvfp4(x: Tensor, amax: Tensor | None, along: int, packed: bool) -> Any:
        x = x if along else x.t().contiguous()
        scale = nv.per_tensor_amax_to_scale(x.abs().max() if amax is None else amax)
        if packed:
            return nv.nvfp4_quantize(x, 16, scale)
        return nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.bfloat16)

    def mxfp4(x: Tensor, along: int, packed: bool) -> Any:
        x = x if along else x.t().contiguous()
        scales, codes = mx.to_mx(x, torch.float4_e2m1fn_x2, 32)
        return (scales, codes) if packed else mx.to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.bfloat16)

    def build(case: Case, x: Tensor) -> Run | None:
        packed = case.output == "packed"
        if case.operation == "mxfp4":
            return partial(compiled(mxfp4), x, case.along, packed)
        return partial(compiled(nvfp4), x, case.given(x), case.along, packed) if case.operation == "nearest" else None

    def triton(case: Case, x: Tensor) -> Run | None:
        """Its one fused kernel: the rows as they are and the rotated columns, both packed."""
        if case != Case("nearest H16", 0, "packed", "given"):
            return None
        module = importlib.import_module("torchao.prototype.moe_training.nvfp4_training.hadamard_quantize_row_col_triton")
        return partial(module.triton_rht_quantize_row_col, x, case.given(x), case.given(x), [1] * 16)

    return {"torchao": build, "torchao, Triton": triton}


PEERS: dict[str, Callable[[Path], dict[str, Build]]] = {
    "quartet2": quartet2,
    "fouroversix": fouroversix,
    "torchao": torchao,
}


def rivals(peers: Path | None) -> tuple[dict[str, Build], dict[str, str]]:
    """What there is to compare with, by name, and each peer's state: "imported", or why not."""
    found: dict[str, Build] = {"torch.compile": inductor}
    states = {}
    for name, load in PEERS.items():
        if peers is None:
            states[name] = "not asked for: --peers DIR"
            continue
        try:
            found |= load((peers / name).resolve())
            states[name] = "imported"
        except Exception as error:  # one peer's failure must not lose the others' figures
            states[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return found, states


# -- measurement


def gpu_seconds(run: Run) -> tuple[float, str]:
    """GPU seconds of one call and how they were timed."""
    run()  # a failure here is the rival's own, not the capture's
    torch.cuda.synchronize()
    try:
        return graph_seconds(run), "CUDA graph"
    except Exception:
        torch.cuda.synchronize()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times), "events"


def error_of(case: Case, x: Tensor, y: Any) -> float | None:
    """Relative squared error of a decoded result, None where there is none or it is rotated."""
    if case.output == "packed" or OPERATIONS[case.operation][1] is not None:
        return None
    exact = (x if case.along else x.t()).float()
    y = y[0].float() * y[1] if isinstance(y, tuple) else y  # values and tensor scale
    return round(float((y.float() - exact).square().mean() / exact.square().mean()), 5)


def entry(
    case: Case, x: Tensor, build: Build, copy: float, seconds: Callable[[Run], tuple[float, str]]
) -> dict[str, Any] | None:
    """Time of one competitor, its share of a copy and its error. copy: bytes a second."""
    try:
        if (run := build(case, x)) is None:
            return None
        found, how = seconds(run)
        share = case.bytes * x.numel() / found / copy
        return {
            "microseconds": round(found * 1e6, 1),
            "of copy": round(share, 3),
            "error": error_of(case, x, run()),
            "timed by": how,
        }
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(
    x: Tensor,
    own: dict[str, Build],
    others: dict[str, Build],
    copy: float,
    seconds: Callable[[Run], tuple[float, str]],
    quick: bool = False,
) -> Iterator[dict[str, Any]]:
    """A row for each case that any rival has."""
    for case in cases(quick):
        found = {name: row for name, build in others.items() if (row := entry(case, x, build, copy, seconds))}
        if not found:
            continue
        mine = {name: row for name, build in own.items() if (row := entry(case, x, build, copy, seconds))}
        for row in found.values():
            if "microseconds" in row and "microseconds" in mine["ours"]:
                row["ours is faster"] = round(row["microseconds"] / mine["ours"]["microseconds"], 2)
        yield {"case": str(case), **dataclasses.asdict(case), "bar": case.bar, **mine, "rivals": found}


def line(row: dict[str, Any]) -> str:
    """A row of the table: shares of a copy, in brackets how many times faster ours is, and a star where that misses the bar."""

    def cell(name: str, found: dict[str, Any]) -> str:
        if "of copy" not in found:
            return f"{name} failed"
        times = found.get("ours is faster")
        return f"{name} {found['of copy']:.2f}" + (
            f" ({times}x{'' if times > 1 and times >= row['bar'] else ' *'})" if times else ""
        )

    found = {name: row[name] for name in OURS if name in row} | row["rivals"]
    return f"{row['case']:48} {row['bar']:.0f}x  " + ", ".join(cell(name, entry) for name, entry in found.items())


def warm(job: tuple[Path | None, tuple[int, int], Case]) -> None:
    """Compile one case's kernels in a worker, into the caches on disk."""
    peers, shape, case = job
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    for build in (*OURS.values(), *rivals(peers)[0].values()):
        try:
            if run := build(case, x):
                run()
            torch.cuda.synchronize()
        except Exception:
            continue  # the measurement will meet the same error and record it
    del x
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_rivals", description="Our quantize kernels beside others'.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--peers", type=Path, metavar="DIR", help="checkouts, as the module's docstring lays them out")
    parser.add_argument("--warm", action="store_true", help="compile into the caches on disk, measure nothing")
    parser.add_argument("--quick", action="store_true", help="(16384, 4096) alone, the amax given")
    arguments = parser.parse_args()
    sizes = SIZES[:1] if arguments.quick else SIZES
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here")
    import triton

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the workers are threads enough
    others, states = rivals(arguments.peers)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "peers": states,
    }
    print(states, flush=True)
    if arguments.warm:
        jobs = [(arguments.peers, shape, case) for shape in sizes for case in cases(arguments.quick)]
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            try:
                pool.map_async(warm, jobs, chunksize=1).get(timeout=WARM_SECONDS)
            except multiprocessing.TimeoutError:  # a worker that died answers never
                print(f"not all compiled after {WARM_SECONDS} s", flush=True)
        return
    for shape in sizes:
        copy = copy_rate(shape)
        rows: list[dict[str, Any]] = []
        result[f"{shape}"] = {"copy, TB/s": copy / 1e12, "rows": rows}
        print(f"{shape}: share of a copy at {copy / 1e12:.2f} TB/s (ours is faster by; * below the bar)", flush=True)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for row in measure(x, OURS, others, copy, gpu_seconds, arguments.quick):
            rows.append(row)
            print(line(row), flush=True)
            arguments.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
